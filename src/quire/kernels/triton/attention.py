"""Causal attention over a paged KV cache for any mix of prompts and decodes, with a split form for few long sequences.

A program takes BLOCK_M rows: BLOCK_Q query tokens of one sequence times the query heads of one KV head. So keys and
values are read once for all these rows. The softmax is online over tiles of keys (Dao et al., arXiv 2205.14135).

In the split form, a sequence is cut into `SEGMENTS` parts of equal length. Each part gives its maximum, its sum and its
unnormalised output, and a second kernel joins them (FlashDecoding).

Lengths are read on the device, and the launch does not depend on them. So a launch can be captured in a CUDA graph.
Tiles of a cache of 8-bit codes are decoded exactly to q's dtype. Scales of int8 rows multiply scores and probabilities.

The deterministic form (gpu.is_deterministic) has the same tiles for every batch and cuts keys at multiples of `RANGE`.
Each range is summed separately. One program or the second kernel joins the ranges in order. So a row's bits depend only
on its own query and keys.

Dimensions: T tokens, H query heads, G kv heads, E head dim, B cache blocks, P block size, S sequences, M blocks per
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels import gpu
from quire.kernels.guards import check_strides
from quire.kernels.layer_rules import AttentionRule
from quire.kernels.triton import codes
from quire.kernels.triton.launch import IS_INTERPRETED, ceil_div, has_wgmma, next_power_of_2, row_strides, strides

if TYPE_CHECKING:
    from quire.kernels.partial_attention import Partials

# A launch should have at least this number of programs: two for each of the 132 multiprocessors of an H100.
PROGRAMS_WANTED = 264
_MAX_REGISTERS = 224  # the most registers of a thread with which two programs of 128 threads fit
# For the deterministic form: the fewest keys of a range, and the most ranges of a sequence.
_SHORTEST_RANGE, _MOST_RANGES = 1024, 32


@triton.jit
def _sequence_of(cu_seqlens_ptr, block, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence with the query block `block`. The first block of sequence s is cu_seqlens[s] // BLOCK_Q + s."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(cu_seqlens_ptr + middle) // BLOCK_Q + middle
        if first <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend(
    q,
    position,
    begin,
    end,
    table_ptr,
    at_head,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    scale,
    soft_cap,
    cache_stride_b,
    scales_stride_b,
    first,
    E: tl.constexpr,
    P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    CODES: tl.constexpr,
    OWNERS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend to the keys begin to end - 1. With a window or chunks, keys before `first` are not read.

    All their pages have one of OWNERS owners, whose number of page p is p // OWNERS.

    Returns maxima (of log2) and sums [BLOCK_M], and the unnormalised output [BLOCK_M, BLOCK_E].
    """
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    e = tl.arange(0, BLOCK_E)
    is_e = e < E
    for start in range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        is_key = key < end
        if WINDOW > 0 or CHUNK > 0:
            is_key = is_key & (key >= first)
        page = tl.load(table_ptr + key // P, mask=is_key, other=0).to(tl.int64) // OWNERS
        at = page * cache_stride_b + at_head + (key % P) * E
        k = tl.load(k_cache_ptr + at[None, :] + e[:, None], mask=is_key[None, :] & is_e[:, None], other=0)
        v = tl.load(v_cache_ptr + at[:, None] + e[None, :], mask=is_key[:, None] & is_e[None, :], other=0)
        if CODES != "none":
            k = codes.decode(k, CODES).to(q.dtype)
            v = codes.decode(v, CODES).to(q.dtype)
        if UPCAST:
            scores = tl.dot(q.to(tl.float32), k.to(tl.float32)) * scale
        else:
            scores = tl.dot(q, k, input_precision="ieee") * scale
        if CODES == "int8":
            scale_at = page * scales_stride_b + tl.program_id(1) * P + key % P
            scores *= tl.load(k_scales_ptr + scale_at, mask=is_key, other=0.0)[None, :]
        if HAS_SOFT_CAP:
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        is_visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            is_visible = is_visible & (key[None, :] > position[:, None] - WINDOW)
        if CHUNK > 0:
            is_visible = is_visible & (key[None, :] >= position[:, None] // CHUNK * CHUNK)
        scores = tl.where(is_visible & is_key[None, :], scores * 1.4426950408889634, float("-inf"))  # log2(e)
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        safe_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        p = tl.exp2(scores - safe_maximum[:, None])
        decay = tl.exp2(maximum - safe_maximum)
        total = total * decay + tl.sum(p, axis=1)
        if CODES == "int8":
            p *= tl.load(v_scales_ptr + scale_at, mask=is_key, other=0.0)[None, :]
        if UPCAST:
            acc = acc * decay[:, None] + tl.dot(p.to(v.dtype).to(tl.float32), v.to(tl.float32))
        else:
            acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    return maximum, total, acc


@triton.jit
def _join(maximum, total, acc, part_maximum, part_total, part_acc):
    """Join two results of `_attend` to the result over both ranges. A range that a row does not see changes no bit."""
    new_maximum = tl.maximum(maximum, part_maximum)
    safe_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weight, part_weight = tl.exp2(maximum - safe_maximum), tl.exp2(part_maximum - safe_maximum)
    total = total * weight + part_total * part_weight
    return new_maximum, total, acc * weight[:, None] + part_acc * part_weight[:, None]


@triton.jit
def _join_sink(maximum, total, acc, sink):
    """Join the sink of each row: a score without a value."""
    sink = sink.to(tl.float32) * 1.4426950408889634  # log2(e)
    new_maximum = tl.maximum(maximum, sink)
    weight = tl.exp2(maximum - new_maximum)
    return new_maximum, total * weight + tl.exp2(sink - new_maximum), acc * weight[:, None]


@triton.jit
def _attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    out_ptr,
    max_ptr,
    sum_ptr,
    k_scales_ptr,
    v_scales_ptr,
    sinks_ptr,
    num_seqs,
    scale,
    soft_cap,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    cache_stride_b,
    cache_stride_g,
    scales_stride_b,
    table_stride,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    SEGMENTS: tl.constexpr,
    RANGE: tl.constexpr,
    CODES: tl.constexpr,
    OWNERS: tl.constexpr,
    OWNER: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Without segments, it writes out [T, H, E]. With segments, it writes float32 out [T, H, SEGMENTS, E], maxima and
    sums [T, H, SEGMENTS].

    RANGE is 0, or the number of keys that are summed separately. With segments, a segment has this number of keys.

    With several owners, it takes the pages of OWNER only, and writes one segment. A page is a range then.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    s = _sequence_of(cu_seqlens_ptr, block, num_seqs, BLOCK_Q)
    first_token = tl.load(cu_seqlens_ptr + s)
    query_len = tl.load(cu_seqlens_ptr + s + 1) - first_token
    first_query = (block - (first_token // BLOCK_Q + s)) * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + s)

    m = tl.arange(0, BLOCK_M)
    query = first_query + m // GROUP
    is_row = (m < BLOCK_Q * GROUP) & (query < query_len)
    head = kv_head * GROUP + m % GROUP
    token = (first_token + query).to(tl.int64)
    position = seq_len - query_len + query
    e = tl.arange(0, BLOCK_E)
    is_e = e < E
    q_ptrs = q_ptr + token[:, None] * q_stride_t + head[:, None] * q_stride_h + e[None, :]
    q = tl.load(q_ptrs, mask=is_row[:, None] & is_e[None, :], other=0.0)

    last_query = tl.minimum(first_query + BLOCK_Q, query_len) - 1
    end = seq_len - query_len + last_query + 1  # the last row sees the keys before this one
    first = 0  # the first row sees keys from here on; earlier slots may hold anything, and their blocks may be illegal
    if WINDOW > 0:
        first = tl.maximum(seq_len - query_len + first_query - WINDOW + 1, 0)
    if CHUNK > 0:
        first = (seq_len - query_len + first_query) // CHUNK * CHUNK
    begin = first // TILE * TILE
    segment = 0
    if SEGMENTS > 1:
        segment_len = RANGE if RANGE > 0 else tl.cdiv(tl.cdiv(seq_len, SEGMENTS), TILE) * TILE
        segment = tl.program_id(2)
        begin = tl.maximum(begin, segment * segment_len)
        end = tl.minimum(end, (segment + 1) * segment_len)

    at_head = kv_head * cache_stride_g
    table_ptr = block_tables_ptr + s.to(tl.int64) * table_stride
    if RANGE > 0 and SEGMENTS == 1:
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        for part in range(begin // RANGE, tl.cdiv(end, RANGE)):
            part_begin, part_end = tl.maximum(begin, part * RANGE), tl.minimum(end, (part + 1) * RANGE)
            if OWNERS > 1:
                is_own = tl.load(table_ptr + part) % OWNERS == OWNER
                part_end = tl.where(is_own, part_end, part_begin)
            part_maximum, part_total, part_acc = _attend(
                q=q,
                position=position,
                begin=part_begin,
                end=part_end,
                table_ptr=table_ptr,
                at_head=at_head,
                k_cache_ptr=k_cache_ptr,
                v_cache_ptr=v_cache_ptr,
                k_scales_ptr=k_scales_ptr,
                v_scales_ptr=v_scales_ptr,
                scale=scale,
                soft_cap=soft_cap,
                cache_stride_b=cache_stride_b,
                scales_stride_b=scales_stride_b,
                first=first,
                E=E,
                P=P,
                BLOCK_E=BLOCK_E,
                BLOCK_M=BLOCK_M,
                TILE=TILE,
                WINDOW=WINDOW,
                CHUNK=CHUNK,
                HAS_SOFT_CAP=HAS_SOFT_CAP,
                CODES=CODES,
                OWNERS=OWNERS,
                UPCAST=UPCAST,
            )
            maximum, total, acc = _join(maximum, total, acc, part_maximum, part_total, part_acc)
    else:
        maximum, total, acc = _attend(
            q=q,
            position=position,
            begin=begin,
            end=end,
            table_ptr=table_ptr,
            at_head=at_head,
            k_cache_ptr=k_cache_ptr,
            v_cache_ptr=v_cache_ptr,
            k_scales_ptr=k_scales_ptr,
            v_scales_ptr=v_scales_ptr,
            scale=scale,
            soft_cap=soft_cap,
            cache_stride_b=cache_stride_b,
            scales_stride_b=scales_stride_b,
            first=first,
            E=E,
            P=P,
            BLOCK_E=BLOCK_E,
            BLOCK_M=BLOCK_M,
            TILE=TILE,
            WINDOW=WINDOW,
            CHUNK=CHUNK,
            HAS_SOFT_CAP=HAS_SOFT_CAP,
            CODES=CODES,
            OWNERS=OWNERS,
            UPCAST=UPCAST,
        )

    if SEGMENTS > 1 or OWNERS > 1:
        row = (token * tl.num_programs(1) * GROUP + head) * SEGMENTS + segment
        tl.store(max_ptr + row, maximum, mask=is_row)
        tl.store(sum_ptr + row, total, mask=is_row)
        tl.store(out_ptr + row[:, None] * E + e[None, :], acc, mask=is_row[:, None] & is_e[None, :])
    else:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0)
            maximum, total, acc = _join_sink(maximum, total, acc, sink)
        y = acc / total[:, None]
        out_ptrs = out_ptr + token[:, None] * out_stride_t + head[:, None] * out_stride_h + e[None, :]
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_e[None, :])


@triton.jit
def _join_segments_kernel(
    partial_ptr,
    max_ptr,
    sum_ptr,
    sinks_ptr,
    out_ptr,
    out_stride_t,
    out_stride_h,
    H: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = (token * H + head) * SEGMENTS
    segment = tl.arange(0, SEGMENTS)
    e = tl.arange(0, BLOCK_E)
    is_e = e < E
    maxima = tl.load(max_ptr + first + segment)
    maximum = tl.max(maxima, axis=0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634  # log2(e)
        maximum = tl.maximum(maximum, sink)
    weights = tl.exp2(maxima - maximum)
    total = tl.sum(weights * tl.load(sum_ptr + first + segment), axis=0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - maximum)
    partials = tl.load(partial_ptr + (first + segment)[:, None] * E + e[None, :], mask=is_e[None, :], other=0.0)
    y = tl.sum(partials * weights[:, None], axis=0) / total
    out_ptrs = out_ptr + token * out_stride_t + head * out_stride_h + e
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=is_e)


@triton.jit
def _join_ranges_kernel(
    partial_ptr,
    max_ptr,
    sum_ptr,
    sinks_ptr,
    out_ptr,
    out_stride_t,
    out_stride_h,
    H: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Join segments one after the other, in the same order as a single program."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = (token * H + head) * SEGMENTS + tl.arange(0, 1)
    e = tl.arange(0, BLOCK_E)[None, :]
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_E], tl.float32)
    for segment in range(SEGMENTS):
        part_acc = tl.load(partial_ptr + (row + segment)[:, None] * E + e, mask=e < E, other=0.0)
        part_maximum, part_total = tl.load(max_ptr + row + segment), tl.load(sum_ptr + row + segment)
        maximum, total, acc = _join(maximum, total, acc, part_maximum, part_total, part_acc)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head + tl.arange(0, 1))
        maximum, total, acc = _join_sink(maximum, total, acc, sink)
    y = acc / total[:, None]
    out_ptrs = out_ptr + token * out_stride_t + head * out_stride_h + e
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=e < E)


@dataclass(frozen=True)
class AttentionShape:
    """The tiles of a launch: rows and keys of a tile, segments of a sequence, and options of the compiler.

    Args:
        range_len: the number of keys that are summed separately, whatever the length of a sequence is. A segment then
            has this number of keys. 0: there are no ranges.
        max_registers: the most registers of a thread; None: the compiler chooses. It may spill some registers to run
            more programs at once.
    """

    block_m: int
    tile: int
    segments: int
    num_warps: int
    num_stages: int
    range_len: int = 0
    max_registers: int | None = None


def choose_shape(
    num_tokens: int,
    num_seqs: int,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    has_codes: bool = False,
    is_wgmma: bool = False,
    is_float32: bool = False,
) -> AttentionShape:
    """The tiles for a batch. The host knows only the sizes of the batch, and no lengths.

    Decodes (one token of each sequence) take 16 rows, the fewest that tensor cores multiply. Prompts take 64 or 128
    rows, with which sm_90 uses wgmma. Decodes of few sequences are split until every multiprocessor has work. Tiles of
    codes are smaller, because they are decoded in registers. Tiles of float32 are the smallest, because tensor cores do
    not multiply float32. Without wgmma, tiles are also smaller if groups do not divide the rows, because this takes
    registers.

    Args:
        group: the number of query heads of a KV head.
        is_wgmma: see launch.has_wgmma.
        is_float32: whether q is float32.
    """
    is_wide = head_dim > 128
    if num_tokens > num_seqs and not is_float32:
        block_m = 64 if is_wide else 128
        is_even = is_wgmma or block_m % group == 0
        tile = 32 if is_wide or has_codes or not is_even else 64
        has_small_tiles = has_codes and not is_wgmma
        most = _MAX_REGISTERS if is_wide and has_small_tiles else None  # else the compiler takes 128 and spills
        return AttentionShape(block_m // 2 if has_small_tiles else block_m, tile, 1, 8, 2, max_registers=most)
    block_m = max(16, next_power_of_2(group))
    segments = min(32, next_power_of_2(max(1, PROGRAMS_WANTED // (num_seqs * num_kv_heads))))
    segments = segments if num_tokens <= num_seqs else 1
    if is_float32:
        return AttentionShape(block_m, 16, segments, 8, 1, max_registers=_MAX_REGISTERS)
    num_stages = 2 if has_codes and not is_wide else 3
    return AttentionShape(block_m, 64 >> (is_wide + has_codes), segments, 4, num_stages, max_registers=_MAX_REGISTERS)


def range_of(max_keys: int) -> int:
    """The keys of a range, if the block tables have room for `max_keys` keys."""
    shortest: int = next_power_of_2(ceil_div(max_keys, _MOST_RANGES))
    return max(_SHORTEST_RANGE, shortest)


def choose_fixed_shape(
    num_tokens: int,
    num_seqs: int,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    max_keys: int,
    is_wgmma: bool = False,
    is_float32: bool = False,
) -> AttentionShape:
    """The tiles of the deterministic form. Tiles and ranges do not depend on the batch.

    The batch decides only whether ranges get programs of their own; they do in decodes of few sequences. With wgmma,
    tiles have 64 rows even for a single token, so that the same instruction multiplies prompts and decodes. Registers
    hold two outputs, of the present range and of all earlier ranges. So tiles are spread over 8 warps.

    Args:
        max_keys: the number of keys for which the block tables have room. It must be the same in all calls.
        is_wgmma: whether 16-bit types use wgmma: see launch.has_wgmma.
        is_float32: whether q is float32.
    """
    is_wide = head_dim > 128
    range_len = range_of(max_keys)
    is_split = num_tokens <= num_seqs and num_seqs * num_kv_heads < PROGRAMS_WANTED
    segments = ceil_div(max_keys, range_len) if is_split else 1
    if is_float32:
        return AttentionShape(
            max(16, next_power_of_2(group)), 16, segments, 8, 1, range_len, max_registers=_MAX_REGISTERS
        )
    block_m = max(64 if is_wgmma or not is_wide else 32, next_power_of_2(group))
    is_even = block_m % group == 0
    return AttentionShape(
        block_m=block_m,
        tile=(16 if is_wide else 64) if is_wgmma else 32 if is_even else 16,
        segments=segments,
        num_warps=8,
        num_stages=2,
        range_len=range_len,
    )


class Segments:
    """Memory for the results of segments, and the kernel that joins them. A single segment writes to `out` itself.

    Attributes:
        arguments: of the kernel that computes the segments, by name.
    """

    def __init__(self, out_THE: Tensor, count: int) -> None:
        self._out_THE, self._count = out_THE, count
        self.arguments: dict[str, Tensor | None] = {"out_ptr": out_THE, "max_ptr": None, "sum_ptr": None}
        if count > 1:
            T, H, E = out_THE.shape
            stats_THK = torch.empty((2, T, H, count), dtype=torch.float32, device=out_THE.device)
            partial = torch.empty((T, H, count, E), dtype=torch.float32, device=out_THE.device)
            self.arguments = {"out_ptr": partial, "max_ptr": stats_THK[0], "sum_ptr": stats_THK[1]}

    def join(self, sinks_H: Tensor | None, *, in_order: bool) -> None:
        """Write the result.

        Args:
            in_order: whether segments are joined one after the other, as a single program joins ranges.
        """
        if self._count == 1:
            return
        T, H, E = self._out_THE.shape
        kernel = _join_ranges_kernel if in_order else _join_segments_kernel
        kernel[(T, H)](
            partial_ptr=self.arguments["out_ptr"],
            max_ptr=self.arguments["max_ptr"],
            sum_ptr=self.arguments["sum_ptr"],
            sinks_ptr=sinks_H,
            out_ptr=self._out_THE,
            **strides("th", out=self._out_THE),
            H=H,
            E=E,
            BLOCK_E=block_of(E),
            SEGMENTS=self._count,
            num_warps=4,
            enable_fp_fusion=not in_order,  # one program or this kernel joins ranges with equal bits
        )


def block_of(head_dim: int) -> int:
    """The dimensions of a tile. Tensor cores multiply at least 16."""
    size: int = next_power_of_2(head_dim)
    return max(16, size)


def paged_attention(
    q_THE: Tensor,
    cache: LayerCache,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    cu_seqlens_q_S1: Tensor,
    rule: AttentionRule,
    out_THE: Tensor,
    shape: AttentionShape | None = None,
    sinks_H: Tensor | None = None,
) -> None:
    """See ops.paged_attention. `shape`: the tiles; None: `choose_shape` chooses them.

    Values in tables, lengths and sums are not checked, because the host would have to wait for the device.
    """
    T, H, E = q_THE.shape
    G, P = cache.k_BGPE.shape[1:3]
    S, group = seq_lens_S.shape[0], H // G
    has_codes, is_float32 = cache.k_BGPE.dtype in codes.NAMES, q_THE.dtype == torch.float32
    is_wgmma = has_wgmma(q_THE.device) and not is_float32
    if shape is None and gpu.is_deterministic():
        shape = choose_fixed_shape(T, S, group, G, E, block_tables_SM.shape[1] * P, is_wgmma, is_float32)
    shape = shape or choose_shape(T, S, group, G, E, has_codes, is_wgmma, is_float32)
    segments = Segments(out_THE, shape.segments)
    outputs = {**segments.arguments, **strides("th", out=out_THE)}
    outputs["sinks_ptr"] = sinks_H if shape.segments == 1 else None  # else the second kernel joins them
    _launch(q_THE, cache, block_tables_SM, seq_lens_S, cu_seqlens_q_S1, rule, shape, outputs)
    segments.join(sinks_H, in_order=shape.range_len > 0)


def partial_attention(
    q_THE: Tensor,
    cache: LayerCache,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    cu_seqlens_q_S1: Tensor,
    rule: AttentionRule,
    out: Partials,
    num_owners: int,
    owner: int,
) -> None:
    """See kernels.partial_attention. A program joins the ranges of a row, as in the deterministic form."""
    T, H, E = q_THE.shape
    G, P = cache.k_BGPE.shape[1:3]
    S, is_float32 = seq_lens_S.shape[0], q_THE.dtype == torch.float32
    is_wgmma = has_wgmma(q_THE.device) and not is_float32
    shape = choose_fixed_shape(T, S, H // G, G, E, block_tables_SM.shape[1] * P, is_wgmma, is_float32)
    shape = replace(shape, segments=1, range_len=P)
    outputs = partial_outputs(out) | {"sinks_ptr": None}
    _launch(q_THE, cache, block_tables_SM, seq_lens_S, cu_seqlens_q_S1, rule, shape, outputs, num_owners, owner)


def partial_outputs(out: Partials) -> dict[str, Any]:
    """The arguments of a kernel for a partial result, by name. See Segments for those of a whole one."""
    pointers = {"out_ptr": out.values_THV, "max_ptr": out.maxima_TH, "sum_ptr": out.sums_TH}
    return {**pointers, **strides("th", out=out.values_THV)}


def _launch(
    q_THE: Tensor,
    cache: LayerCache,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    cu_seqlens_q_S1: Tensor,
    rule: AttentionRule,
    shape: AttentionShape,
    outputs: dict[str, Any],
    num_owners: int = 1,
    owner: int = 0,
) -> None:
    """Launch the kernel. `outputs`: its arguments for the result and for sinks, by name."""
    H, E = q_THE.shape[1:]
    k_cache_BGPE, v_cache_BGPE = cache.k_BGPE, cache.v_BGPE
    G, P = k_cache_BGPE.shape[1:3]
    S, group = seq_lens_S.shape[0], H // G
    check_strides(cache)
    name = codes.NAMES.get(k_cache_BGPE.dtype, "none")
    if name != "none":
        k_cache_BGPE, v_cache_BGPE = k_cache_BGPE.view(torch.int8), v_cache_BGPE.view(torch.int8)
    if group > shape.block_m:
        raise ValueError(f"a KV head has {group} query heads, expected at most {shape.block_m}, the rows of a tile")
    block_q = shape.block_m // group
    _attention_kernel[(len(q_THE) // block_q + S, G, shape.segments)](
        q_ptr=q_THE,
        k_cache_ptr=k_cache_BGPE,
        v_cache_ptr=v_cache_BGPE,
        block_tables_ptr=block_tables_SM,
        seq_lens_ptr=seq_lens_S,
        cu_seqlens_ptr=cu_seqlens_q_S1,
        **outputs,
        k_scales_ptr=cache.k_scales_BGP,
        v_scales_ptr=cache.v_scales_BGP,
        num_seqs=S,
        scale=rule.scale,
        soft_cap=rule.soft_cap,
        **strides("th", q=q_THE),
        **strides("bg", cache=k_cache_BGPE),
        **strides("b", scales=cache.k_scales_BGP),
        **row_strides(table=block_tables_SM),
        GROUP=group,
        E=E,
        P=P,
        BLOCK_E=block_of(E),
        BLOCK_M=shape.block_m,
        BLOCK_Q=block_q,
        TILE=shape.tile,
        WINDOW=rule.sliding_window,
        CHUNK=rule.chunk,
        HAS_SOFT_CAP=rule.soft_cap > 0,
        SEGMENTS=shape.segments,
        RANGE=shape.range_len,
        CODES=name,
        OWNERS=num_owners,
        OWNER=owner,
        UPCAST=IS_INTERPRETED,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        maxnreg=shape.max_registers,
        enable_fp_fusion=shape.range_len == 0 or num_owners > 1,
    )
