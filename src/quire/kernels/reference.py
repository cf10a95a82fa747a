"""Twins of every op of this package in plain torch. They define what is correct, in float32, on any device.

For CPU tensors, they refuse the same numbers as the compiled kernels.

Dimensions: see ops.py; L positions of a sequence, Q its query tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.formats.weight_format import LORA_PANEL, Fp8Format
from quire.forward_batch import LayerCache
from quire.kernels import kv_codes
from quire.kernels.fp8_weight import Fp8Weight
from quire.kernels.grouped_weight import E2M1, GroupedWeight
from quire.kernels.layer_rules import AttentionRule, HeadRotation, LatentRotation

if TYPE_CHECKING:
    from quire.kernels.lora import LoraTable

# The reciprocal of a smaller temperature overflows float32, so sampling is greedy then.
SMALLEST_TEMPERATURE = 2.0**-128
# If all activations of a group are smaller than this, they count as zeros.
_SMALLEST_GROUP = 1e-30


_MAX_SEQ_LEN = 2**24 - 1  # kMaxSeqLen of csrc/bindings_attention.cpp


def _check_numbers(
    name: str, x: Tensor, is_legal: Callable[[Tensor], Tensor], expected: str, error: type[Exception] = ValueError
) -> None:
    """Raise an error for the first illegal number. Tensors on a GPU are not checked: the host would have to wait."""
    if x.device.type != "cpu" or bool((is_legal_X := is_legal(x)).all()):
        return
    first = (~is_legal_X).nonzero()[0].tolist()
    raise error(f"{name}{first} is {x[tuple(first)].item()}, expected {expected}")


def check_indices(name: str, x: Tensor, end: int) -> None:
    """Raise IndexError for a number that is not in [0, end)."""
    expected = f"0 or more, and less than {end}"
    _check_numbers(name, x, lambda x: (x >= 0) & (x < end), expected, IndexError)


def check_rows(rows_T: Tensor, N: int) -> None:
    """Raise IndexError for a row that is not in [0, N)."""
    check_indices("rows", rows_T, N)


def linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """y_TN = x @ weight.T + bias, accumulated in float32, rounded once to `out_dtype` (default: x's dtype)."""
    y_TN = F.linear(x_TK.float(), weight_NK.float(), None if bias_N is None else bias_N.float())
    return y_TN.to(out_dtype or x_TK.dtype)


def head_linear(x_THK: Tensor, weight_HNK: Tensor) -> Tensor:
    """See head_linear.head_linear: each head of x times a matrix of its own."""
    return torch.einsum("thk,hnk->thn", x_THK.float(), weight_HNK.float()).to(x_THK.dtype)


def add_lora(base_TN: Tensor, x: Tensor, slots_T: Tensor, table: LoraTable, out_dtype: torch.dtype) -> Tensor:
    num_slots = len(table.deltas)
    expected = f"-1 or more, and less than {num_slots}"
    _check_numbers("slots", slots_T, lambda x: (x >= -1) & (x < num_slots), expected, IndexError)
    if table.looks_up:
        check_indices("token_ids", x, table.K)
    y_TN = base_TN.clone()
    for slot in sorted(set(slots_T.tolist())):
        rows = slots_T == slot
        first = 0
        for delta, num_columns in zip(table.deltas[slot] if slot >= 0 else (), table.columns, strict=slot >= 0):
            if delta is not None:
                a = delta.a.float()
                h_TR = a[x[rows]] if table.looks_up else F.linear(x[rows].float(), a)
                added_TN = F.linear(delta.shape.scale * h_TR, delta.unpacked_b().float())
                y_TN[rows, first : first + num_columns] += added_TN
            first += num_columns
    return y_TN.to(out_dtype)


def pack_factors(source: Tensor, factors_F6: Tensor, memory: Tensor) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for begin, code, rows, columns, form, first in factors_F6.tolist():
        dtype = dtypes[code]
        factor = source[begin:][: rows * columns * dtype.itemsize].clone().view(dtype).view(rows, columns)
        if form == 1:
            factor = factor.t()
        elif form == 2:
            factor = F.pad(factor, (0, 0, 0, -rows % LORA_PANEL)).view(-1, LORA_PANEL, columns).transpose(1, 2)
        memory[first : first + factor.numel()] = factor.reshape(-1).to(memory.dtype)


def quantize_fp8(weight_NK: Tensor) -> Fp8Weight:
    """See fp8.quantize_fp8."""
    weight_NK = weight_NK.float()
    scale_N1 = weight_NK.abs().amax(1, keepdim=True) / torch.tensor(448.0)
    scale_N1 = torch.where(weight_NK.isfinite().all(1, keepdim=True), scale_N1, math.nan)
    scaled_NK = torch.where(scale_N1 > 0, weight_NK / scale_N1, 0).clamp(-448, 448)
    return Fp8Weight(scaled_NK.to(torch.float8_e4m3fn), scale_N1, Fp8Format(None).group_size_of(weight_NK.shape[1]))


def dequantize_fp8(weight: Fp8Weight) -> Tensor:
    """The weight [N, K] in float32."""
    scales_NK = weight.scales_NG.repeat_interleave(weight.group_size, 1)[:, : weight.shape[1]]
    return weight.codes_NK.float() * scales_NK


def fp8_linear(x_TK: Tensor, weight: Fp8Weight, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """See fp8.fp8_linear, for activations that are not quantized."""
    return linear(x_TK, dequantize_fp8(weight), bias_N, out_dtype)


def quantize_grouped(weight_NK: Tensor, bits: int, group_size: int) -> GroupedWeight:
    """See grouped.quantize_grouped."""
    K = weight_NK.shape[1]
    weight_NGS = _in_groups(weight_NK.float(), group_size)
    highest_NG1, lowest_NG1 = weight_NGS.amax(2, keepdim=True), weight_NGS.amin(2, keepdim=True)
    if bits == 8:
        scale_NG1 = torch.maximum(highest_NG1, -lowest_NG1) / 127
    else:
        scale_NG1 = torch.where(highest_NG1 > -lowest_NG1, highest_NG1 / -8, -lowest_NG1 / 8)
    inverse_NG1 = torch.where(scale_NG1 == 0, 0, 1 / scale_NG1)
    zero_code = 1 << (bits - 1)
    codes_NGS = ((weight_NGS * inverse_NG1).round() + zero_code).clamp(0, 2 * zero_code - 1)
    codes_NK = codes_NGS.flatten(1)[:, :K].to(torch.uint8).contiguous()
    return GroupedWeight(codes_NK=codes_NK, bits=bits, group_size=group_size, scales_NG=scale_NG1[:, :, 0])


def dequantize_grouped(weight: GroupedWeight) -> Tensor:
    """The weight [N, K] in float32. Its columns have the order of the in-features."""
    N, K = weight.shape
    scales_NG, minima_NG = weight.float_scales, weight.minima_NG
    if weight.super_scales_NS is not None:
        scales_NG = scales_NG * _per_group(weight.super_scales_NS, weight)
    codes_NGS = _in_groups(weight.codes_NK.float(), weight.group_size)
    if weight.has_floats:
        weight_NGS = E2M1.to(codes_NGS.device)[codes_NGS.long()] * scales_NG[:, :, None]
    elif minima_NG is not None:
        minima_NG = minima_NG.float()
        if weight.super_minima_NS is not None:
            minima_NG = minima_NG * _per_group(weight.super_minima_NS, weight)
        weight_NGS = codes_NGS * scales_NG[:, :, None] - minima_NG[:, :, None]
    else:
        zeros_NG = torch.full_like(scales_NG, 1 << (weight.bits - 1)) if weight.zeros_NG is None else weight.zeros_NG
        weight_NGS = (codes_NGS - zeros_NG.float()[:, :, None]) * scales_NG[:, :, None]
    weight_NK = weight_NGS.flatten(1)[:, :K]
    if weight.order_K is None:
        return weight_NK
    return weight_NK.new_empty((N, K)).index_copy_(1, weight.order_K, weight_NK)


def _per_group(super_NS: Tensor, weight: GroupedWeight) -> Tensor:
    return super_NS.float().repeat_interleave(weight.super_size, 1)[:, : weight.scales_NG.shape[1]]


def grouped_linear(x_TK: Tensor, weight: GroupedWeight, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """See grouped.grouped_linear, with the arithmetic of CPUs: rows of x are quantized to 8 bits."""
    K, order_K = weight.shape[1], weight.order_K
    x_TGS = _in_groups((x_TK if order_K is None else x_TK[:, order_K]).float(), weight.input_group_size)
    largest_TG1 = x_TGS.abs().amax(2, keepdim=True)
    # Both operands are tensors. For number / tensor, torch multiplies by the reciprocal, which rounds twice.
    inverse_TG1 = torch.where(largest_TG1 < _SMALLEST_GROUP, 0, torch.tensor(127.0) / largest_TG1)
    x_rounded_TK = ((x_TGS * inverse_TG1).round() * (largest_TG1 / 127)).flatten(1)[:, :K]
    x_rounded_TK = torch.where(x_TK.isfinite().all(1, keepdim=True), x_rounded_TK, math.nan)
    y_TN = F.linear(x_rounded_TK, dequantize_grouped(replace(weight, order_K=None)))
    return (y_TN if bias_N is None else y_TN + bias_N.float()).to(out_dtype)


def _in_groups(x_NK: Tensor, group_size: int) -> Tensor:
    """[N, G, group_size]; the last group is filled with zeros."""
    N, K = x_NK.shape
    return F.pad(x_NK, (0, -K % group_size)).view(N, -1, group_size)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (weight + offset) over the last dimension, in x's dtype."""
    x = x_TD.float()
    y = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * (weight_D.float() + weight_offset)
    return y.to(x_TD.dtype)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """(x - mean) * rsqrt(variance + eps) * weight + bias over the last dimension, in x's dtype."""
    x = x_TD.float()
    x = x - x.mean(dim=-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight_D.float() + bias_D.float()
    return y.to(x_TD.dtype)


def gated_activation(
    name: str, x_T2I: Tensor, factors_F: Tensor | None = None, order_T: Tensor | None = None
) -> Tensor:
    """activation(first half of each row) * second half; name is a key of cpu.ACTIVATION_CODES."""
    gate_TI, up_TI = x_T2I.float().chunk(2, dim=-1)
    if factors_F is not None and order_T is not None:
        check_indices("order", order_T, len(factors_F))
        factors_T1 = factors_F[order_T.long(), None]
        gate_TI, up_TI = gate_TI * factors_T1, up_TI * factors_T1
    if name == "clamped_swiglu":
        gate_TI, up_TI = gate_TI.clamp(max=7), up_TI.clamp(-7, 7) + 1
        activated_TI = gate_TI * torch.sigmoid(1.702 * gate_TI)
    elif name == "silu":
        activated_TI = F.silu(gate_TI)
    else:
        activated_TI = F.gelu(gate_TI, approximate="tanh" if name == "gelu_tanh" else "none")
    return (activated_TI * up_TI).to(x_T2I.dtype)


def rope_and_cache(
    q_THE: Tensor,
    k_TGE: Tensor,
    v_TGE: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    cache: LayerCache,
    rotation: HeadRotation,
) -> None:
    """See ops.rope_and_cache."""
    cos_sin_PR = rotation.cos_sin_PR
    _check_step(positions_T, slot_mapping_T, cache, cos_sin_PR)
    q, k = q_THE.float(), k_TGE.float()
    if rotation.q_norm_weight_E is not None:
        q = rms_norm(q, rotation.q_norm_weight_E, rotation.norm_eps, rotation.norm_weight_offset)
    if rotation.k_norm_weight_E is not None:
        k = rms_norm(k, rotation.k_norm_weight_E, rotation.norm_eps, rotation.norm_weight_offset)
    if cos_sin_PR is not None:
        cos_T1H, sin_T1H = cos_sin_PR[positions_T].unsqueeze(1).chunk(2, dim=-1)
        q, k = _rotate(q, cos_T1H, sin_T1H), _rotate(k, cos_T1H, sin_T1H)
    if rotation.temperature != 0:
        steps_T = ((positions_T.float() + 1) / rotation.temperature_floor).floor()
        q = q * (1 + rotation.temperature * steps_T.log1p())[:, None, None]
    q_THE.copy_(q)
    _write(k, cache.k_BGPE, cache.k_scales_BGP, slot_mapping_T)
    _write(v_TGE, cache.v_BGPE, cache.v_scales_BGP, slot_mapping_T)


def latent_rope_and_cache(
    q_THR: Tensor,
    rows_TL: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    cache: LayerCache,
    rotation: LatentRotation,
    out_THR: Tensor,
) -> None:
    """See ops.latent_rope_and_cache."""
    _check_step(positions_T, slot_mapping_T, cache, rotation.cos_sin_PR)
    R = rotation.cos_sin_PR.shape[1]
    cos_T1H, sin_T1H = rotation.cos_sin_PR[positions_T].unsqueeze(1).chunk(2, dim=-1)

    def rotated(x: Tensor) -> Tensor:
        x = x.reshape(*x.shape[:-1], -1, 2).mT.flatten(-2) if rotation.is_interleaved else x
        return _rotate(x.float(), cos_T1H, sin_T1H)

    rows_T1L = rows_TL.unsqueeze(1).float()
    out_THR.copy_(rotated(q_THR))
    rotated_T1L = torch.cat((rows_T1L[..., :-R], rotated(rows_T1L[..., -R:])), dim=-1)
    _write(rotated_T1L, cache.k_BGPE, cache.k_scales_BGP, slot_mapping_T)


def _check_step(positions_T: Tensor, slot_mapping_T: Tensor, cache: LayerCache, cos_sin_PR: Tensor | None) -> None:
    if cos_sin_PR is not None:
        check_indices("positions", positions_T, len(cos_sin_PR))
    num_slots = cache.k_BGPE.shape[0] * cache.k_BGPE.shape[2]
    expected = f"less than the {num_slots} slots of the cache"
    _check_numbers("slot_mapping", slot_mapping_T, lambda x: x < num_slots, expected, IndexError)


def _write(x_TGE: Tensor, cache_BGPE: Tensor, scales_BGP: Tensor | None, slot_mapping_T: Tensor) -> None:
    """Write rows to their slots, as codes if the cache holds codes."""
    is_written_T, block_size = slot_mapping_T >= 0, cache_BGPE.shape[2]
    slots = slot_mapping_T[is_written_T]
    blocks, offsets = slots // block_size, slots % block_size
    rows, dtype = x_TGE[is_written_T], cache_BGPE.dtype
    codes, scales = kv_codes.encode(rows.float(), dtype) if dtype in kv_codes.CODE_DTYPES else (rows.to(dtype), None)
    cache_BGPE[blocks, :, offsets] = codes
    if scales_BGP is not None and scales is not None:
        scales_BGP[blocks, :, offsets] = scales


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def paged_attention(
    q_THE: Tensor,
    cache: LayerCache,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    cu_seqlens_q_S1: Tensor,
    rule: AttentionRule,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See ops.paged_attention. For each sequence, it gathers keys and values and computes a dense softmax."""
    H, (B, G, P) = q_THE.shape[1], cache.k_BGPE.shape[:3]
    firsts_S = rule.first_visible(seq_lens_S - cu_seqlens_q_S1.diff())
    _check_batch(len(q_THE), B, P, block_tables_SM, firsts_S, seq_lens_S, cu_seqlens_q_S1)
    out_THE = q_THE.new_empty((*q_THE.shape[:2], cache.v_BGPE.shape[3]))
    starts = cu_seqlens_q_S1.tolist()
    for s, (first, seq_len) in enumerate(zip(firsts_S.tolist(), seq_lens_S.tolist(), strict=True)):
        tokens = slice(starts[s], starts[s + 1])
        first_block = first // P
        blocks = block_tables_SM[s, first_block : -(-seq_len // P)].long()
        seen = slice(first - first_block * P, seq_len - first_block * P)
        # [blocks, G, P, E] -> [H, positions, E]
        k_HLE, v_HLE = (
            kv_codes.decode(cache_BGPE[blocks], None if scales_BGP is None else scales_BGP[blocks])
            .transpose(0, 1)
            .flatten(1, 2)[:, seen]
            .repeat_interleave(H // G, dim=0)
            for cache_BGPE, scales_BGP in ((cache.k_BGPE, cache.k_scales_BGP), (cache.v_BGPE, cache.v_scales_BGP))
        )
        scores_HQL = rule.scale * (q_THE[tokens].float().transpose(0, 1) @ k_HLE.transpose(1, 2))
        if rule.soft_cap > 0:
            scores_HQL = rule.soft_cap * torch.tanh(scores_HQL / rule.soft_cap)
        key_L = torch.arange(first, seq_len, device=q_THE.device)
        query_Q1 = torch.arange(seq_len - (starts[s + 1] - starts[s]), seq_len, device=q_THE.device).unsqueeze(1)
        is_visible_QL = (key_L <= query_Q1) & (key_L >= rule.first_visible(query_Q1))
        scores_HQL = scores_HQL.masked_fill(~is_visible_QL, float("-inf"))
        if sinks_H is not None:
            sinks_HQ1 = sinks_H.float()[:, None, None].expand(-1, scores_HQL.shape[1], 1)
            probabilities_HQL = torch.cat((scores_HQL, sinks_HQ1), dim=-1).softmax(dim=-1)[:, :, :-1]
        else:
            probabilities_HQL = scores_HQL.softmax(dim=-1)
        out_THE[tokens] = (probabilities_HQL @ v_HLE).transpose(0, 1).to(q_THE.dtype)
    return out_THE


def partial_attention(
    q_THE: Tensor,
    cache: LayerCache,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    cu_seqlens_q_S1: Tensor,
    rule: AttentionRule,
    num_owners: int,
    owner: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See partial_attention.partial_attention: values, maxima and sums."""
    (T, H, _), (_, G, P) = q_THE.shape, cache.k_BGPE.shape[:3]
    firsts_S = rule.first_visible(seq_lens_S - cu_seqlens_q_S1.diff())
    values_THV = q_THE.new_zeros((T, H, cache.v_BGPE.shape[3]), dtype=torch.float32)
    maxima_TH = q_THE.new_full((T, H), -math.inf, dtype=torch.float32)
    sums_TH = q_THE.new_zeros((T, H), dtype=torch.float32)
    starts = cu_seqlens_q_S1.tolist()
    for s, (first, seq_len) in enumerate(zip(firsts_S.tolist(), seq_lens_S.tolist(), strict=True)):
        places_M = torch.arange(first // P, -(-seq_len // P), device=q_THE.device)
        places_M = places_M[block_tables_SM[s, places_M] % num_owners == owner]
        if len(places_M) == 0:
            continue
        tokens, blocks = slice(starts[s], starts[s + 1]), block_tables_SM[s, places_M].long() // num_owners
        k_HLE, v_HLE = (
            kv_codes.decode(cache_BGPE[blocks], None if scales_BGP is None else scales_BGP[blocks])
            .transpose(0, 1)
            .flatten(1, 2)
            .repeat_interleave(H // G, dim=0)
            for cache_BGPE, scales_BGP in ((cache.k_BGPE, cache.k_scales_BGP), (cache.v_BGPE, cache.v_scales_BGP))
        )
        scores_HQL = rule.scale * (q_THE[tokens].float().transpose(0, 1) @ k_HLE.transpose(1, 2))
        if rule.soft_cap > 0:
            scores_HQL = rule.soft_cap * torch.tanh(scores_HQL / rule.soft_cap)
        key_L = (places_M[:, None] * P + torch.arange(P, device=q_THE.device)).flatten()
        query_Q1 = torch.arange(seq_len - (starts[s + 1] - starts[s]), seq_len, device=q_THE.device).unsqueeze(1)
        is_visible_QL = (key_L <= query_Q1) & (key_L >= rule.first_visible(query_Q1))
        scores_HQL = (scores_HQL * math.log2(math.e)).masked_fill(~is_visible_QL, -math.inf)
        maxima_HQ = scores_HQL.amax(2)
        weights_HQL = torch.exp2(scores_HQL - maxima_HQ.clamp(min=torch.finfo(torch.float32).min)[:, :, None])
        is_seen_L = (key_L >= first) & (key_L < seq_len)  # what no token sees may hold anything
        values_THV[tokens] = (weights_HQL @ v_HLE.masked_fill(~is_seen_L[:, None], 0.0)).transpose(0, 1)
        maxima_TH[tokens], sums_TH[tokens] = maxima_HQ.T, weights_HQL.sum(2).T
    return values_THV, maxima_TH, sums_TH


def _check_batch(
    T: int, B: int, P: int, block_tables_SM: Tensor, firsts_S: Tensor, seq_lens_S: Tensor, cu_seqlens_q_S1: Tensor
) -> None:
    """Check that q has all query tokens, tables have all positions, and the cache has all blocks in use."""
    M = block_tables_SM.shape[1]
    most = min(M * P, _MAX_SEQ_LEN)
    _check_numbers("cu_seqlens_q", cu_seqlens_q_S1, lambda x: (x >= 0) & (x <= T), f"0 to {T}")
    query_lens_S = cu_seqlens_q_S1.diff()
    _check_numbers("lengths in cu_seqlens_q", query_lens_S, lambda x: x >= 0, "0 or more")
    expected = f"those of its query tokens to {most}: {M} blocks of {P}"
    _check_numbers("seq_lens", seq_lens_S, lambda x: (x >= query_lens_S) & (x <= most), expected)
    begin_M = torch.arange(M, device=seq_lens_S.device) * P
    is_unused_SM = (begin_M >= seq_lens_S[:, None]) | (begin_M + P <= firsts_S[:, None])
    check_indices("block_tables", block_tables_SM.masked_fill(is_unused_SM, 0), B)


def forbid_tokens(logits_RV: Tensor, masks_MW: Tensor, rows_M: Tensor) -> None:
    """See ops.forbid_tokens."""
    check_indices("rows", rows_M, logits_RV.shape[0])
    bits = torch.arange(32, dtype=torch.int32, device=masks_MW.device)
    is_forbidden_MV = (masks_MW[:, :, None] >> bits & 1).flatten(1)[:, : logits_RV.shape[1]] == 0
    for row, is_forbidden_V in zip(rows_M.tolist(), is_forbidden_MV, strict=True):
        logits_RV[row].masked_fill_(is_forbidden_V, -math.inf)


def greedy(logits_RV: Tensor) -> Tensor:
    """See ops.greedy."""
    return logits_RV.argmax(dim=-1).masked_fill(logits_RV.isnan().any(dim=-1), -1)


def sample(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor
) -> Tensor:
    """See ops.sample. It filters by sorting."""
    _check_numbers("temperature", temperature_R, lambda x: (x >= 0) & x.isfinite(), "a finite number, 0 or more")
    _check_numbers("top_k", top_k_R, lambda x: x >= 0, "0 or more")
    for name, x_R in (("top_p", top_p_R), ("min_p", min_p_R)):
        _check_numbers(name, x_R, lambda x: (x >= 0) & (x <= 1), "0 to 1")
    _check_numbers("uniform", uniform_R, lambda x: (x >= 0) & (x < 1), "0 or more, and less than 1")
    token_ids = []
    rows = zip(
        temperature_R.tolist(), top_k_R.tolist(), top_p_R.tolist(), min_p_R.tolist(), uniform_R.tolist(), strict=True
    )
    for logits_V, (temperature, top_k, top_p, min_p, uniform) in zip(logits_RV, rows, strict=True):
        highest = logits_V.max().item()
        if temperature < SMALLEST_TEMPERATURE:
            token_ids.append(int(greedy(logits_V.unsqueeze(0)).item()))
        elif not math.isfinite(highest):
            token_ids.append(-1)
        else:
            cumulated_V = sampling_units(logits_V, temperature, top_k, top_p, min_p).cumsum(0)
            target = int(uniform * 2**53) * int(cumulated_V[-1].item()) >> 53
            token_ids.append(int(torch.searchsorted(cumulated_V, target, right=True).item()))
    return torch.tensor(token_ids, dtype=torch.int64, device=logits_RV.device)


def sampling_units(logits_V: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The probabilities of one row after all filters, int64, in units of 2^-44 of the largest. 0: filtered out."""
    highest = logits_V.max()
    weights_V = torch.exp((logits_V - highest) * (1.0 / torch.tensor(temperature)).to(logits_V.device))
    units_V = (weights_V.double() * 2.0**44).long()
    if min_p > 0:
        units_V[logits_V.double() < highest.double() + temperature * math.log(min_p)] = 0
    sorted_V, order_V = logits_V.sort(descending=True, stable=True)
    if 0 < top_k < len(logits_V):
        units_V[logits_V < sorted_V[top_k - 1]] = 0
    if top_p < 1:
        ordered_units_V = units_V[order_V]
        total = int(ordered_units_V.sum().item())
        needed = min(max(math.ceil(top_p * float(total)), 1), total)
        mass_before_V = ordered_units_V.cumsum(0) - ordered_units_V
        units_V[order_V[mass_before_V >= needed]] = 0
    return units_V


def logprobs(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ops.logprobs."""
    check_indices("token_ids", token_ids_R, logits_RV.shape[1])
    logprobs_RV = logits_RV.double().log_softmax(dim=-1).float()
    logits_R1 = logits_RV.gather(1, token_ids_R.unsqueeze(1))
    ranks_R = (logits_RV > logits_R1).sum(dim=-1) + 1
    top_ids_RN = logits_RV.argsort(dim=-1, descending=True, stable=True)[:, :num_top]
    has_none_R = ~logits_RV.max(dim=-1).values.isfinite()
    return (
        logprobs_RV.gather(1, token_ids_R.unsqueeze(1)).squeeze(1).masked_fill(has_none_R, math.nan),
        ranks_R.masked_fill(has_none_R, -1),
        top_ids_RN.masked_fill(has_none_R.unsqueeze(1), -1),
        logprobs_RV.gather(1, top_ids_RN).masked_fill(has_none_R.unsqueeze(1), math.nan),
    )
