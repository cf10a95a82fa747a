"""Latent attention on GPUs: rotation with the cache write, and causal attention over the paged rows.

A program of attention takes BLOCK_M rows: BLOCK_Q query tokens of one sequence times up to HEADS heads. All of them
read the same latent rows, so a tile of rows is loaded once. A latent row is the key; without its rotating end it is the
value. Keys are summed in ranges of RANGE keys. One program or a second kernel joins the ranges in order. So the bits of
a row depend only on its own query and keys, and the only form is deterministic. Lengths are read on the device, so a
launch can be captured in a CUDA graph. See attention.py for the rest.

Dimensions: T tokens, H heads, L elements of a row, V latents, R rotary dims, P block size, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels.layer_rules import AttentionRule, LatentRotation
from quire.kernels.triton import attention, codes
from quire.kernels.triton.attention import _join, _sequence_of
from quire.kernels.triton.launch import IS_INTERPRETED, ceil_div, next_power_of_2, row_strides, strides
from quire.kernels.triton.rope_cache import _store

if TYPE_CHECKING:
    from quire.kernels.partial_attention import Partials

_BLOCK_M = 16  # rows of a program; with more rows, two outputs of 512 elements would not fit into registers


@triton.jit
def _attend(
    q,
    q_rope,
    position,
    begin,
    end,
    table_ptr,
    cache_ptr,
    scales_ptr,
    scale,
    cache_stride_b,
    scales_stride_b,
    V: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    CODES: tl.constexpr,
    OWNERS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend to the latent rows begin to end - 1. Their pages have one owner, as in attention.

    Returns maxima (of log2) and sums [BLOCK_M], and the unnormalised output [BLOCK_M, BLOCK_V].
    """
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    e, r = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    for start in range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        is_key = key < end
        page = tl.load(table_ptr + key // P, mask=is_key, other=0).to(tl.int64) // OWNERS
        at = page * cache_stride_b + (key % P) * (V + R)
        latents = tl.load(cache_ptr + at[:, None] + e[None, :], mask=is_key[:, None] & (e < V)[None, :], other=0)
        k_rope = tl.load(cache_ptr + at[None, :] + V + r[:, None], mask=is_key[None, :] & (r < R)[:, None], other=0)
        if CODES != "none":
            latents = codes.decode(latents, CODES).to(q.dtype)
            k_rope = codes.decode(k_rope, CODES).to(q.dtype)
        if UPCAST:
            scores = tl.dot(q.to(tl.float32), tl.trans(latents).to(tl.float32))
            scores += tl.dot(q_rope.to(tl.float32), k_rope.to(tl.float32))
        else:
            scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
            scores = tl.dot(q_rope, k_rope, scores, input_precision="ieee")
        scores *= scale
        if CODES == "int8":
            row_scales = tl.load(scales_ptr + page * scales_stride_b + key % P, mask=is_key, other=0.0)
            scores *= row_scales[None, :]
        is_visible = (key[None, :] <= position[:, None]) & is_key[None, :]
        scores = tl.where(is_visible, scores * 1.4426950408889634, float("-inf"))  # log2(e)
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        safe_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        p = tl.exp2(scores - safe_maximum[:, None])
        decay = tl.exp2(maximum - safe_maximum)
        total = total * decay + tl.sum(p, axis=1)
        if CODES == "int8":
            p *= row_scales[None, :]
        if UPCAST:
            acc = acc * decay[:, None] + tl.dot(p.to(latents.dtype).to(tl.float32), latents.to(tl.float32))
        else:
            acc = tl.dot(p.to(latents.dtype), latents, acc * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    return maximum, total, acc


@triton.jit
def _latent_attention_kernel(
    q_ptr,
    cache_ptr,
    scales_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    out_ptr,
    max_ptr,
    sum_ptr,
    num_seqs,
    scale,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    cache_stride_b,
    scales_stride_b,
    table_stride,
    H: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    RANGE: tl.constexpr,
    CODES: tl.constexpr,
    OWNERS: tl.constexpr,
    OWNER: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Without segments, it writes out [T, H, V]. With segments, it writes float32 out [T, H, SEGMENTS, V], maxima and
    sums [T, H, SEGMENTS].

    With several owners, it takes the pages of OWNER only, and writes one segment. A page is a range then.
    """
    block = tl.program_id(0)
    s = _sequence_of(cu_seqlens_ptr, block, num_seqs, BLOCK_Q)
    first_token = tl.load(cu_seqlens_ptr + s)
    query_len = tl.load(cu_seqlens_ptr + s + 1) - first_token
    first_query = (block - (first_token // BLOCK_Q + s)) * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + s)

    m = tl.arange(0, BLOCK_M)
    query = first_query + m // HEADS
    head = tl.program_id(1) * HEADS + m % HEADS
    is_row = (m < BLOCK_Q * HEADS) & (query < query_len) & (head < H)
    token = (first_token + query).to(tl.int64)
    position = seq_len - query_len + query
    e, r = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    q_row = q_ptr + token * q_stride_t + head * q_stride_h
    q = tl.load(q_row[:, None] + e[None, :], mask=is_row[:, None] & (e < V)[None, :], other=0.0)
    q_rope = tl.load(q_row[:, None] + V + r[None, :], mask=is_row[:, None] & (r < R)[None, :], other=0.0)

    end = seq_len - query_len + tl.minimum(first_query + BLOCK_Q, query_len)  # the last row sees the keys before it
    table_ptr = block_tables_ptr + s.to(tl.int64) * table_stride
    first_range = 0
    segment = 0
    end_range = tl.cdiv(end, RANGE)
    if SEGMENTS > 1:
        segment = tl.program_id(2)
        first_range = segment
        end_range = first_range + 1
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for part in range(first_range, end_range):
        part_end = tl.minimum(end, (part + 1) * RANGE)
        if OWNERS > 1:
            is_own = tl.load(table_ptr + part) % OWNERS == OWNER
            part_end = tl.where(is_own, part_end, part * RANGE)
        part_maximum, part_total, part_acc = _attend(
            q=q,
            q_rope=q_rope,
            position=position,
            begin=part * RANGE,
            end=part_end,
            table_ptr=table_ptr,
            cache_ptr=cache_ptr,
            scales_ptr=scales_ptr,
            scale=scale,
            cache_stride_b=cache_stride_b,
            scales_stride_b=scales_stride_b,
            V=V,
            R=R,
            P=P,
            BLOCK_V=BLOCK_V,
            BLOCK_R=BLOCK_R,
            BLOCK_M=BLOCK_M,
            TILE=TILE,
            CODES=CODES,
            OWNERS=OWNERS,
            UPCAST=UPCAST,
        )
        if SEGMENTS > 1:
            maximum, total, acc = part_maximum, part_total, part_acc
        else:
            maximum, total, acc = _join(maximum, total, acc, part_maximum, part_total, part_acc)

    is_out = is_row[:, None] & (e < V)[None, :]
    if SEGMENTS > 1 or OWNERS > 1:
        row = (token * H + head) * SEGMENTS + segment
        tl.store(max_ptr + row, maximum, mask=is_row)
        tl.store(sum_ptr + row, total, mask=is_row)
        tl.store(out_ptr + row[:, None] * V + e[None, :], acc, mask=is_out)
    else:
        out_row = out_ptr + token * out_stride_t + head * out_stride_h
        tl.store(out_row[:, None] + e[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_out)


def blocks(H: int, V: int, R: int, dtype: torch.dtype) -> dict[str, int]:
    """The tiles of a launch. They are the same for every batch."""
    heads = min(H, _BLOCK_M)
    return {
        "HEADS": heads,
        "BLOCK_V": attention.block_of(V),
        "BLOCK_R": attention.block_of(R),
        "BLOCK_M": _BLOCK_M,
        "BLOCK_Q": _BLOCK_M // heads,
        "TILE": 16 if dtype == torch.float32 else 32,
    }


def options(dtype: torch.dtype) -> dict[str, Any]:
    """The options of the compiler. Products and sums are not fused, so that one program and two kernels join ranges
    with equal bits.
    """
    num_stages = 1 if dtype == torch.float32 else 2
    return {"num_warps": 8, "num_stages": num_stages, "maxnreg": 255, "enable_fp_fusion": False}


def latent_attention(
    q_THL: Tensor,
    cache: LayerCache,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    cu_seqlens_q_S1: Tensor,
    rule: AttentionRule,
    out_THV: Tensor,
    range_len: int | None = None,
) -> None:
    """See ops.paged_attention. The values of the cache are the beginnings of its keys. There is no window and no cap.

    Args:
        range_len: the number of keys in a range; None: it follows from the width of the block tables.

    Raises ValueError for a rule with a window, chunks or a cap.
    """
    T, H, L = q_THL.shape
    V, S, P = out_THV.shape[2], seq_lens_S.shape[0], cache.k_BGPE.shape[2]
    max_keys = block_tables_SM.shape[1] * P
    range_len = range_len or attention.range_of(max_keys)
    head_blocks = ceil_div(H, blocks(H, V, L - V, q_THL.dtype)["HEADS"])
    is_split = T <= S and S * head_blocks < attention.PROGRAMS_WANTED
    num_segments = ceil_div(max_keys, range_len) if is_split else 1
    segments = attention.Segments(out_THV, num_segments)
    outputs = {**segments.arguments, **strides("th", out=out_THV)}
    sizes = {"RANGE": range_len, "SEGMENTS": num_segments, "OWNERS": 1, "OWNER": 0}
    _launch(q_THL, cache, block_tables_SM, seq_lens_S, cu_seqlens_q_S1, rule, outputs, sizes)
    segments.join(None, in_order=True)


def partial_latent_attention(
    q_THL: Tensor,
    cache: LayerCache,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    cu_seqlens_q_S1: Tensor,
    rule: AttentionRule,
    out: Partials,
    num_owners: int,
    owner: int,
) -> None:
    """See kernels.partial_attention. Raises ValueError like `latent_attention`."""
    outputs = attention.partial_outputs(out)
    sizes = {"RANGE": cache.k_BGPE.shape[2], "SEGMENTS": 1, "OWNERS": num_owners, "OWNER": owner}
    _launch(q_THL, cache, block_tables_SM, seq_lens_S, cu_seqlens_q_S1, rule, outputs, sizes)


def _launch(
    q_THL: Tensor,
    cache: LayerCache,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    cu_seqlens_q_S1: Tensor,
    rule: AttentionRule,
    outputs: dict[str, Any],
    sizes: dict[str, int],
) -> None:
    """Launch the kernel. `outputs`, `sizes`: its arguments for the result, and its ranges and owners, by name."""
    T, H, L = q_THL.shape
    V, S, P = cache.v_BGPE.shape[3], seq_lens_S.shape[0], cache.k_BGPE.shape[2]
    if rule.sliding_window or rule.soft_cap or rule.chunk:
        raise ValueError(f"the rule is {rule}, expected no window, chunk or cap for latent rows")
    rows, name = cache.k_BGPE, codes.NAMES.get(cache.k_BGPE.dtype, "none")
    if name != "none":
        rows = rows.view(torch.int8)
    tiles = blocks(H, V, L - V, q_THL.dtype)
    _latent_attention_kernel[(T // tiles["BLOCK_Q"] + S, ceil_div(H, tiles["HEADS"]), sizes["SEGMENTS"])](
        q_ptr=q_THL,
        cache_ptr=rows,
        scales_ptr=cache.k_scales_BGP,
        block_tables_ptr=block_tables_SM,
        seq_lens_ptr=seq_lens_S,
        cu_seqlens_ptr=cu_seqlens_q_S1,
        **outputs,
        num_seqs=S,
        scale=rule.scale,
        **strides("th", q=q_THL),
        **strides("b", cache=rows, scales=cache.k_scales_BGP),
        **row_strides(table=block_tables_SM),
        H=H,
        V=V,
        R=L - V,
        P=P,
        **sizes,
        CODES=name,
        UPCAST=IS_INTERPRETED,
        **tiles,
        **options(q_THL.dtype),
    )


@triton.jit
def _latent_rope_and_cache_kernel(
    q_ptr,
    rows_ptr,
    positions_ptr,
    cos_sin_ptr,
    slots_ptr,
    cache_ptr,
    scales_ptr,
    out_ptr,
    q_stride_t,
    q_stride_h,
    rows_stride,
    cache_stride_b,
    scales_stride_b,
    out_stride_t,
    out_stride_h,
    H: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STEP: tl.constexpr,
    SECOND: tl.constexpr,
    CODES: tl.constexpr,
):
    """Pair i of the rotating elements is STEP * i and STEP * i + SECOND. In results, it is i and i + R / 2."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = R // 2
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * R
    if head < H:
        i = tl.arange(0, BLOCK_R)
        is_pair = i < HALF
        x_ptr = q_ptr + token * q_stride_t + head * q_stride_h + i * STEP
        x = tl.load(x_ptr, mask=is_pair, other=0.0).to(tl.float32)
        y = tl.load(x_ptr + SECOND, mask=is_pair, other=0.0).to(tl.float32)
        cos = tl.load(angles_ptr + i, mask=is_pair, other=1.0)
        sin = tl.load(angles_ptr + HALF + i, mask=is_pair, other=0.0)
        y_ptr = out_ptr + token * out_stride_t + head * out_stride_h + i
        tl.store(y_ptr, (x * cos - y * sin).to(out_ptr.dtype.element_ty), mask=is_pair)
        tl.store(y_ptr + HALF, (y * cos + x * sin).to(out_ptr.dtype.element_ty), mask=is_pair)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            e = tl.arange(0, BLOCK_L)
            row_ptr = rows_ptr + token * rows_stride
            latents = tl.load(row_ptr + e, mask=e < V, other=0.0).to(tl.float32)
            is_rope = (e >= V) & (e < V + R)
            is_first = e < V + HALF
            i = tl.where(is_first, e - V, e - V - HALF)
            x = tl.load(row_ptr + V + i * STEP, mask=is_rope, other=0.0).to(tl.float32)
            y = tl.load(row_ptr + V + i * STEP + SECOND, mask=is_rope, other=0.0).to(tl.float32)
            cos = tl.load(angles_ptr + i, mask=is_rope, other=1.0)
            sin = tl.load(angles_ptr + HALF + i, mask=is_rope, other=0.0)
            row = tl.where(is_rope, tl.where(is_first, x * cos - y * sin, y * cos + x * sin), latents)
            at = (slot // P) * cache_stride_b + (slot % P) * (V + R)
            _store(cache_ptr, scales_ptr, row, at, (slot // P) * scales_stride_b + slot % P, V + R, BLOCK_L, CODES)


def latent_rope_and_cache(
    q_THR: Tensor,
    rows_TL: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    cache: LayerCache,
    rotation: LatentRotation,
    out_THR: Tensor,
) -> None:
    """See ops.latent_rope_and_cache.

    Positions and slots are not checked, because the host would have to wait for the device.
    """
    (T, H, R), L = q_THR.shape, rows_TL.shape[1]
    rows_BGPE, name = cache.k_BGPE, codes.NAMES.get(cache.k_BGPE.dtype, "none")
    if name != "none":
        rows_BGPE = rows_BGPE.view(torch.int8)
    _latent_rope_and_cache_kernel[(T, H + 1)](
        q_ptr=q_THR,
        rows_ptr=rows_TL,
        positions_ptr=positions_T,
        cos_sin_ptr=rotation.cos_sin_PR,
        slots_ptr=slot_mapping_T,
        cache_ptr=rows_BGPE,
        scales_ptr=cache.k_scales_BGP,
        out_ptr=out_THR,
        **strides("th", q=q_THR, out=out_THR),
        **row_strides(rows=rows_TL),
        **strides("b", cache=rows_BGPE, scales=cache.k_scales_BGP),
        H=H,
        V=L - R,
        R=R,
        P=rows_BGPE.shape[2],
        BLOCK_L=next_power_of_2(L),
        BLOCK_R=next_power_of_2(R // 2),
        STEP=2 if rotation.is_interleaved else 1,
        SECOND=1 if rotation.is_interleaved else R // 2,
        CODES=name,
        num_warps=4,
        enable_fp_fusion=False,  # codes of int8 are rounded products, as in the twin
    )
