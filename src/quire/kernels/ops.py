"""Typed functions on torch tensors with shape contracts: compiled kernels on CPU, Triton on GPU, plain torch otherwise.

The arithmetic of one row never depends on the other rows of a call or on the number of threads.

With any arguments, an op computes or raises: TypeError for a dtype, ValueError for a shape, a stride, a device or a
parameter, IndexError for a number that leads out of a tensor (slot, position, block, id). On a GPU, values in tensors
are not checked, because that would wait for the GPU.

Dimensions: T tokens, D hidden, I inner (feed-forward), H query heads, G KV heads,
E head_dim, B cache blocks, P block_size (of a cache) or number of positions (of cos_sin), R rotary_dim (of cos_sin) or
rows (of logits), S sequences, M blocks per sequence, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels import cpu, gpu, reference
from quire.kernels.guards import (
    check_contiguous,
    check_dtype,
    check_filled,
    check_last_stride,
    check_places,
    check_shape,
)
from quire.kernels.kv_codes import CODE_DTYPES
from quire.kernels.layer_rules import AttentionRule, HeadRotation, LatentRotation


def _kernels(x: Tensor) -> Any:
    """The module with kernels for this tensor; None: plain torch."""
    if cpu.takes(x):
        return cpu
    return gpu.kernels() if gpu.takes(x) else None


def _attention_kernels(q_THE: Tensor) -> Any:
    """The module with attention kernels for this tensor and its shape; None: plain torch."""
    if cpu.takes(q_THE) and q_THE.shape[2] > cpu.MAX_HEAD_DIM:
        return None
    return _kernels(q_THE)


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, weight_offset: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (weight + weight_offset), float32 inside, rounded once.

    Zhang and Sennrich, arXiv 1910.07467. The weight has x's dtype or float32. Rows of x and `out` may be strided;
    `out` may be x.
    """
    return _norm(x_TD, None, 1.0, weight_D, None, eps, weight_offset, out)


def add_rms_norm(
    x_TD: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    out: Tensor | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """residual += multiplier * x in place, then rms_norm of the new residual. `out` may be x.

    The product and the sum are rounded to the residual's dtype.
    """
    return _norm(x_TD, residual_TD, multiplier, weight_D, None, eps, weight_offset, out)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """(x - mean(x)) * rsqrt(variance(x) + eps) * weight + bias, float32 inside, rounded once.

    Ba, Kiros and Hinton, arXiv 1607.06450. The bias has the weight's dtype. For the rest see `rms_norm`.
    """
    return _norm(x_TD, None, 1.0, weight_D, bias_D, eps, 0.0, out)


def add_layer_norm(
    x_TD: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    out: Tensor | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """As add_rms_norm, with layer_norm of the new residual."""
    return _norm(x_TD, residual_TD, multiplier, weight_D, bias_D, eps, 0.0, out)


def _norm(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    multiplier: float,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    weight_offset: float,
    out: Tensor | None,
) -> Tensor:
    check_norm(x_TD, residual_TD, weight_D, out, bias_D)
    if (kernels := _kernels(x_TD)) is None:
        if residual_TD is not None:
            residual_TD += x_TD * multiplier
            x_TD = residual_TD
        if bias_D is None:
            y_TD = reference.rms_norm(x_TD, weight_D, eps, weight_offset)
        else:
            y_TD = reference.layer_norm(x_TD, weight_D, bias_D, eps)
        return y_TD if out is None else out.copy_(y_TD)
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) if out is None else out
    kernels.norm(x_TD, residual_TD, multiplier, weight_D, bias_D, eps, weight_offset, out)
    return out


def check_norm(
    x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, out: Tensor | None, bias_D: Tensor | None = None
) -> None:
    """Check the arguments of the norms."""
    check_places(x=x_TD, residual=residual_TD, weight=weight_D, bias=bias_D, out=out)
    check_filled("x", x_TD, "TD")
    check_shape("weight", weight_D, x_TD.shape[1])
    check_dtype("weight", weight_D, x_TD.dtype, torch.float32)
    if bias_D is not None:
        check_shape("bias", bias_D, x_TD.shape[1])
        check_dtype("bias", bias_D, weight_D.dtype)
    for name, like_x in (("residual", residual_TD), ("out", out)):
        if like_x is not None:
            check_shape(name, like_x, *x_TD.shape)
            check_dtype(name, like_x, x_TD.dtype)
    check_last_stride(x=x_TD, residual=residual_TD, weight=weight_D, bias=bias_D, out=out)


def gated_activation(
    name: str,
    x_T2I: Tensor,
    out: Tensor | None = None,
    factors_F: Tensor | None = None,
    order_T: Tensor | None = None,
    begins: Tensor | None = None,
) -> Tensor:
    """f(first half of each row) * second half, float32 inside, rounded once; Shazeer, arXiv 2002.05202.

    Args:
        name: f is silu, gelu (exact, by erf) or gelu_tanh (its tanh form). Or clamped_swiglu, of gpt-oss: with g the
            first half, at most 7, and u the second half, from -7 to 7, it is g * sigmoid(1.702 * g) * (u + 1).
        factors_F, order_T: row t of x is multiplied by factors[order[t]] first (float32, and int32 in [0, F)).
        begins: int32. Only rows from its first number to its last one are computed, by the compiled kernels.
    """
    check_gated(name, x_T2I)
    check_factors(x_T2I, factors_F, order_T)
    shape = (x_T2I.shape[0], x_T2I.shape[1] // 2)
    if out is not None:
        check_places(x=x_T2I, out=out)
        check_shape("out", out, *shape)
        check_dtype("out", out, x_T2I.dtype)
    if begins is not None:
        check_places(x=x_T2I, begins=begins)
        check_filled("begins", begins, "B")
        check_dtype("begins", begins, torch.int32)
        check_contiguous(begins=begins)
    if (kernels := _kernels(x_T2I)) is None:
        y_TI = reference.gated_activation(name, x_T2I, factors_F, order_T)
        return y_TI if out is None else out.copy_(y_TI)
    out = torch.empty(shape, dtype=x_T2I.dtype, device=x_T2I.device) if out is None else out
    check_last_stride(x=x_T2I, out=out)
    if begins is None:
        kernels.gated_activation(name, x_T2I, out, factors_F, order_T)
    else:
        cpu.gated_activation(name, x_T2I, out, factors_F, order_T, begins)
    return out


def check_factors(x_T2I: Tensor, factors_F: Tensor | None, order_T: Tensor | None) -> None:
    """Check the factors of rows of `gated_activation`."""
    if (factors_F is None) != (order_T is None):
        raise ValueError("factors without an order, or the reverse: expected both or none")
    if factors_F is not None and order_T is not None:
        check_places(x=x_T2I, factors=factors_F, order=order_T)
        check_filled("factors", factors_F, "F")
        check_dtype("factors", factors_F, torch.float32)
        check_shape("order", order_T, x_T2I.shape[0])
        check_dtype("order", order_T, torch.int32)
        check_contiguous(factors=factors_F, order=order_T)


def check_gated(name: str, x_T2I: Tensor) -> None:
    """Check the arguments of `gated_activation`, except `out` and strides."""
    check_places(x=x_T2I)
    check_filled("x", x_T2I, "TI")
    if x_T2I.shape[1] % 2 != 0:
        raise ValueError(f"x is {list(x_T2I.shape)}, expected [T, 2 * I]")
    if name not in cpu.ACTIVATION_CODES:
        raise ValueError(f"the activation is {name!r}, expected one of {', '.join(cpu.ACTIVATION_CODES)}")


def rope_and_cache(
    q_THE: Tensor,
    k_TGE: Tensor,
    v_TGE: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    cache: LayerCache,
    rotation: HeadRotation,
) -> None:
    """Between the qkv projection and attention: RMS norm per head, rotary embedding, write to the KV cache.

    q, k, v may be strided views of one projection (last dimension contiguous). q is changed in place. k and v do not
    change and go to the cache slots (int64, block * block_size + offset, in the cache; negative: not written). The
    rotation (neox style: halves of the first R dimensions; Su et al., arXiv 2104.09864) takes the rows of its table at
    `positions_T` (int64, in [0, P)). float32 inside, rounded once. q, k, v share one dtype. The cache has it too, or it
    holds codes (see kv_codes), int8 with scales.
    """
    _check_cache(q_THE, cache)
    check_shape("v_cache", cache.v_BGPE, *cache.k_BGPE.shape)
    _check_rotation(q_THE, rotation)
    check_places(q=q_THE, k=k_TGE, v=v_TGE, positions=positions_T, slot_mapping=slot_mapping_T)
    T, _, E = q_THE.shape
    G = cache.k_BGPE.shape[1]
    for name, x_TGE in (("k", k_TGE), ("v", v_TGE)):
        check_shape(name, x_TGE, T, G, E)
        check_dtype(name, x_TGE, q_THE.dtype)
    for name, x_T in (("positions", positions_T), ("slot_mapping", slot_mapping_T)):
        check_shape(name, x_T, T)
        check_dtype(name, x_T, torch.int64)
    if (kernels := _attention_kernels(q_THE)) is None:
        reference.rope_and_cache(q_THE, k_TGE, v_TGE, positions_T, slot_mapping_T, cache, rotation)
        return
    check_last_stride(q=q_THE, k=k_TGE, v=v_TGE)
    check_contiguous(positions=positions_T, slot_mapping=slot_mapping_T)
    check_contiguous(q_norm_weight=rotation.q_norm_weight_E, k_norm_weight=rotation.k_norm_weight_E)
    kernels.rope_and_cache(q_THE, k_TGE, v_TGE, positions_T, slot_mapping_T, cache, rotation)


def latent_rope_and_cache(
    q_THR: Tensor,
    rows_TL: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    cache: LayerCache,
    rotation: LatentRotation,
    out_THR: Tensor,
) -> None:
    """Latent attention between its projections and attention: rotary embedding, write to the KV cache.

    q holds the parts of the heads that rotate. A row of L elements holds the normed latents and, in the last R
    elements, the part of the key that rotates; it goes to its slot of a cache with one KV head. The values of this
    cache are the beginnings of its keys. `out` gets the rotated q, in the order of dimensions of the rotated keys:
    halves. All may be strided (last dimension contiguous). For the rest see `rope_and_cache`.
    """
    cos_sin_PR = rotation.cos_sin_PR
    check_filled("q", q_THR, "THR")
    check_filled("rows", rows_TL, "TL")
    (T, H, R), L = q_THR.shape, rows_TL.shape[1]
    check_shape("q", q_THR, T, H, cos_sin_PR.shape[1])
    check_shape("rows", rows_TL, T, max(L, R + 1))
    check_shape("out", out_THR, T, H, R)
    if cache.compiled is None:
        _check_memory(rows_TL, cache)
    check_shape("k_cache", cache.k_BGPE, cache.k_BGPE.shape[0], 1, cache.k_BGPE.shape[2], L)
    check_shape("v_cache", cache.v_BGPE, *cache.k_BGPE.shape[:3], L - R)
    places = {"positions": positions_T, "slot_mapping": slot_mapping_T}
    check_places(q=q_THR, rows=rows_TL, k_cache=cache.k_BGPE, cos_sin=cos_sin_PR, out=out_THR, **places)
    check_dtype("q", q_THR, *cpu.DTYPE_CODES)
    for name, x in (("rows", rows_TL), ("out", out_THR)):
        check_dtype(name, x, q_THR.dtype)
    check_dtype("k_cache", cache.k_BGPE, q_THR.dtype, *CODE_DTYPES)
    for name, x_T in places.items():
        check_shape(name, x_T, T)
        check_dtype(name, x_T, torch.int64)
    arguments = (q_THR, rows_TL, positions_T, slot_mapping_T, cache, rotation, out_THR)
    if (cpu.takes(q_THR) and L > cpu.MAX_HEAD_DIM) or (kernels := _kernels(q_THR)) is None:
        reference.latent_rope_and_cache(*arguments)
        return
    check_last_stride(q=q_THR, rows=rows_TL, out=out_THR)
    check_contiguous(**places)
    kernels.latent_rope_and_cache(*arguments)


def paged_attention(
    q_THE: Tensor,
    cache: LayerCache,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    cu_seqlens_q_S1: Tensor,
    rule: AttentionRule,
    out_THE: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention over a paged KV cache for any mix of prefill and decode; head h reads KV head h // (H / G).

    The result [T, H, V] has the size of the cache's values: E, or less if they are the beginnings of the keys.

    The query tokens cu_seqlens_q[s] .. cu_seqlens_q[s + 1] are the last positions of sequence s. seq_lens[s] is its
    length with these tokens. Position i lies in block block_tables[s, i // P] (tables, lengths and sums: int32). The
    softmax is in float32, and a token's bits do not depend on the other tokens of the call. q may be strided (last
    dimension contiguous). The cache has q's dtype or holds codes (see kv_codes), int8 with scales. seq_lens are below
    2^24. Other slots of the cache are never used. Entries of the tables before the first position that a sequence sees
    may be any numbers. Tokens of q after the last sequence have no result. `sinks_H`: a score of each head, in q's
    dtype. It takes a part of the weights, and has no value (StreamingLLM, arXiv 2309.17453; learned in gpt-oss).
    """
    _check_cache(q_THE, cache)
    check_places(q=q_THE, block_tables=block_tables_SM, seq_lens=seq_lens_S, cu_seqlens_q=cu_seqlens_q_S1, out=out_THE)
    T, H, E = q_THE.shape
    G = cache.k_BGPE.shape[1]
    if H % G != 0:
        raise ValueError(f"q has {H} heads, expected a multiple of the {G} KV heads")
    check_filled("seq_lens", seq_lens_S, "S")
    S = seq_lens_S.shape[0]
    check_shape("cu_seqlens_q", cu_seqlens_q_S1, S + 1)
    if block_tables_SM.dim() != 2 or block_tables_SM.shape[0] != S:
        raise ValueError(f"block_tables is {list(block_tables_SM.shape)}, expected [{S}, M]")
    for name, x in (("block_tables", block_tables_SM), ("seq_lens", seq_lens_S), ("cu_seqlens_q", cu_seqlens_q_S1)):
        check_dtype(name, x, torch.int32)
    V = cache.v_BGPE.shape[3]
    if sinks_H is not None:
        check_places(q=q_THE, sinks=sinks_H)
        check_shape("sinks", sinks_H, H)
        check_dtype("sinks", sinks_H, q_THE.dtype)
    if out_THE is not None:
        check_shape("out", out_THE, T, H, V)
        check_dtype("out", out_THE, q_THE.dtype)
    if (kernels := _attention_kernels(q_THE)) is None:
        y_THE = reference.paged_attention(q_THE, cache, block_tables_SM, seq_lens_S, cu_seqlens_q_S1, rule, sinks_H)
        return y_THE if out_THE is None else out_THE.copy_(y_THE)
    out_THE = torch.empty((T, H, V), dtype=q_THE.dtype, device=q_THE.device) if out_THE is None else out_THE
    check_last_stride(q=q_THE, out=out_THE)
    check_last_stride(block_tables=block_tables_SM, seq_lens=seq_lens_S, cu_seqlens_q=cu_seqlens_q_S1, sinks=sinks_H)
    arguments = (q_THE, cache, block_tables_SM, seq_lens_S, cu_seqlens_q_S1, rule, out_THE)
    if V == E or cpu.takes(q_THE):  # on a CPU, one kernel does both
        kernels.paged_attention(*arguments, sinks_H=sinks_H)
    else:
        kernels.latent_attention(*arguments)
    return out_THE


def _check_cache(q_THE: Tensor, cache: LayerCache) -> None:
    """Check that the cache fits q. A cache with a compiled form was checked before, so only q is checked."""
    k_BGPE = cache.k_BGPE
    check_filled("q", q_THE, "THE")
    if cache.compiled is None:
        _check_memory(q_THE, cache)
    check_places(k_cache=k_BGPE, q=q_THE)
    if k_BGPE.shape[3] != q_THE.shape[2]:
        check_shape("k_cache", k_BGPE, *k_BGPE.shape[:3], q_THE.shape[2])
    check_dtype("k_cache", k_BGPE, q_THE.dtype, *CODE_DTYPES)


def _check_memory(x: Tensor, cache: LayerCache) -> None:
    """Check that the tensors of a cache fit each other, and x: heads or rows of its size."""
    k_BGPE, scales = cache.k_BGPE, {"k_scales": cache.k_scales_BGP, "v_scales": cache.v_scales_BGP}
    check_places(x=x, k_cache=k_BGPE, v_cache=cache.v_BGPE, **scales)
    check_filled("k_cache", k_BGPE, "BGPE")
    check_shape("k_cache", k_BGPE, *k_BGPE.shape[:3], x.shape[-1])
    check_filled("v_cache", cache.v_BGPE, "BGPE")
    check_shape("v_cache", cache.v_BGPE, *k_BGPE.shape[:3], (cache.v_BGPE if cache.is_latent else k_BGPE).shape[3])
    check_dtype("k_cache", k_BGPE, x.dtype, *CODE_DTYPES)
    check_dtype("v_cache", cache.v_BGPE, k_BGPE.dtype)
    for name, cache_BGPE in (("k_cache", k_BGPE), ("v_cache", cache.v_BGPE)):
        if cache_BGPE.stride()[2:] != (k_BGPE.shape[3], 1):
            expected = f"expected the last two to be {k_BGPE.shape[3]} and 1"
            raise ValueError(f"{name} has strides {cache_BGPE.stride()}, {expected}")
    for name, scales_BGP in scales.items():
        if (scales_BGP is not None) != (k_BGPE.dtype == torch.int8):
            raise ValueError(
                f"{name} is {'missing' if scales_BGP is None else 'given'}, and the caches are {k_BGPE.dtype}: "
                "expected scales beside int8 and only there"
            )
        if scales_BGP is not None:
            check_shape(name, scales_BGP, *k_BGPE.shape[:3])
            check_dtype(name, scales_BGP, torch.float32)
            check_last_stride(**{name: scales_BGP})


def _check_rotation(q_THE: Tensor, rotation: HeadRotation) -> None:
    cos_sin_PR = rotation.cos_sin_PR
    norms = {"q_norm_weight": rotation.q_norm_weight_E, "k_norm_weight": rotation.k_norm_weight_E}
    check_places(q=q_THE, cos_sin=cos_sin_PR, **norms)
    E, dtypes = q_THE.shape[2], (q_THE.dtype, torch.float32)
    for name, weight_E in norms.items():
        if weight_E is not None:
            check_shape(name, weight_E, E)
            check_dtype(name, weight_E, *dtypes)
            dtypes = (weight_E.dtype, weight_E.dtype)
    if cos_sin_PR is not None:
        check_dtype("cos_sin", cos_sin_PR, torch.float32)
        check_filled("cos_sin", cos_sin_PR, "PR")
        if cos_sin_PR.shape[0] == 0 or cos_sin_PR.shape[1] % 2 != 0 or cos_sin_PR.shape[1] > E:
            raise ValueError(
                f"cos_sin is {list(cos_sin_PR.shape)}, expected [P, R] with R even and at most {E}, P above 0"
            )
        check_contiguous(cos_sin=cos_sin_PR)


def forbid_tokens(logits_RV: Tensor, masks_MW: Tensor, rows_M: Tensor) -> None:
    """Set float32 logits to -inf in place where a mask forbids the token.

    Bit i of word w of an int32 mask is 1 if token 32 w + i is allowed. rows: int32, the row of logits of each mask, in
    [0, R). A row may have several masks; then a token is allowed if all of them allow it.
    """
    _check_logits(logits_RV)
    M = rows_M.shape[0]
    check_places(logits=logits_RV, masks=masks_MW, rows=rows_M)
    check_shape("rows", rows_M, M)
    check_shape("masks", masks_MW, M, -(-logits_RV.shape[1] // 32))
    check_dtype("masks", masks_MW, torch.int32)
    check_dtype("rows", rows_M, torch.int32)
    check_contiguous(masks=masks_MW, rows=rows_M)
    (_kernels(logits_RV) or reference).forbid_tokens(logits_RV, masks_MW, rows_M)


def greedy(logits_RV: Tensor) -> Tensor:
    """Token id (int64) of the highest logit of each float32 row; the lowest id wins ties; -1 for a row with NaN."""
    _check_logits(logits_RV)
    if (kernels := _kernels(logits_RV)) is None:
        return reference.greedy(logits_RV)
    token_ids_R = torch.empty(logits_RV.shape[0], dtype=torch.int64, device=logits_RV.device)
    kernels.greedy(logits_RV, token_ids_R)
    return token_ids_R


_PARAMETERS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "uniform": torch.float64,
}


def sample(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor
) -> Tensor:
    """One random token id (int64) per float32 row of logits; -1 for a row without softmax (NaN, +inf, or all -inf).

    p = softmax(logits / temperature). Keep p >= min_p * max(p). Keep the top_k highest of them (ties at the k-th are
    kept). Renormalise, and keep the smallest set of highest probabilities with a mass of at least top_p (ties: lowest
    id first; at least one token). Draw by inverse CDF over ascending ids with `uniform`. Probabilities count in units
    of 2^-44 of the largest, so sums are exact. Rows of temperature 0 are greedy. temperature: float32, finite and not
    negative; top_k: int32, 0 = off; top_p and min_p: float32 in [0, 1], 1 and 0 = off; uniform: float64 in [0, 1). V is
    below 2^19.
    """
    _check_logits(logits_RV)
    R, V = logits_RV.shape
    if V >= 1 << 19:
        raise ValueError(f"logits are {[R, V]}, expected less than {1 << 19} tokens: sums would overflow")
    parameters = (temperature_R, top_k_R, top_p_R, min_p_R, uniform_R)
    by_name = dict(zip(_PARAMETERS, parameters, strict=True))
    check_places(logits=logits_RV, **by_name)
    for name, x_R in by_name.items():
        check_shape(name, x_R, R)
        check_dtype(name, x_R, _PARAMETERS[name])
    check_contiguous(**by_name)
    if (kernels := _kernels(logits_RV)) is None:
        return reference.sample(logits_RV, *parameters)
    token_ids_R = torch.empty(R, dtype=torch.int64, device=logits_RV.device)
    kernels.sample(logits_RV, *parameters, token_ids_R)
    return token_ids_R


def logprobs(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of float32 rows at the given tokens (int64, in [0, V)) and at the num_top highest.

    Returns token_logprobs_R (float32), ranks_R (int64, 1 + number of strictly greater logits), top_ids_RN (int64) and
    top_logprobs_RN (float32), descending, ties by lowest id. A row without softmax gives NaN, rank -1 and ids -1.
    """
    _check_logits(logits_RV)
    R, V = logits_RV.shape
    check_places(logits=logits_RV, token_ids=token_ids_R)
    check_shape("token_ids", token_ids_R, R)
    check_dtype("token_ids", token_ids_R, torch.int64)
    if not 0 <= num_top <= V:
        raise ValueError(f"num_top is {num_top}, expected 0 to {V}, the vocabulary")
    if not cpu.takes(logits_RV):
        return reference.logprobs(logits_RV, token_ids_R, num_top)
    token_logprobs_R, top_logprobs_RN = torch.empty(R), torch.empty(R, num_top)
    ranks_R, top_ids_RN = torch.empty(R, dtype=torch.int64), torch.empty((R, num_top), dtype=torch.int64)
    cpu.logprobs(logits_RV, token_ids_R.contiguous(), token_logprobs_R, ranks_R, top_ids_RN, top_logprobs_RN)
    return token_logprobs_R, ranks_R, top_ids_RN, top_logprobs_RN


def _check_logits(logits_RV: Tensor) -> None:
    check_places(logits=logits_RV)
    check_filled("logits", logits_RV, "RV")
    check_dtype("logits", logits_RV, torch.float32)
    check_last_stride(logits=logits_RV)
