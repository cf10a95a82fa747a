"""Ops: functions on tensors with checked shapes. They use compiled kernels on CPU, Triton on GPU, else plain torch.

The arithmetic of one row never depends on the other rows of a call or on the number of threads.

Whatever its arguments are, an op either computes its result or raises an error: TypeError for a dtype, ValueError for a
shape, a stride, a device or a parameter, IndexError for a number that leads out of a tensor (slot, position, block,
id). On a GPU, values in tensors are not checked, because the host would have to wait for the GPU.

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
    """The module with kernels for this tensor; None: plain torch is used."""
    if cpu.takes(x):
        return cpu
    return gpu.kernels() if gpu.takes(x) else None


def _attention_kernels(q_THE: Tensor) -> Any:
    """The module with attention kernels for a tensor of this shape; None: plain torch is used."""
    if cpu.takes(q_THE) and q_THE.shape[2] > cpu.MAX_HEAD_DIM:
        return None
    return _kernels(q_THE)


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, weight_offset: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (weight + weight_offset), computed in float32 and rounded once to x's dtype.

    The source is Zhang and Sennrich, arXiv 1910.07467.

    Args:
        x_TD: float32, bfloat16 or float16; rows may be strided.
        weight_D: x's dtype or float32.
        out: memory for the result; rows may be strided. It may be x. None: new memory.
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
    """Compute residual += multiplier * x in place, and return `rms_norm` of the new residual. `out` may be x.

    The product is rounded to the residual's dtype, and so is the sum. See `rms_norm` for the other arguments.
    """
    return _norm(x_TD, residual_TD, multiplier, weight_D, None, eps, weight_offset, out)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """(x - mean(x)) * rsqrt(variance(x) + eps) * weight + bias, computed in float32 and rounded once to x's dtype.

    The source is Ba, Kiros and Hinton, arXiv 1607.06450. The bias has the weight's dtype. See `rms_norm` for the other
    arguments.
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
    """Like `add_rms_norm`, but with `layer_norm` of the new residual."""
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
    """f(first half of each row) * second half, [T, I], computed in float32 and rounded once to x's dtype.

    The source is Shazeer, arXiv 2002.05202.

    Args:
        name: the function f: `silu`, `gelu` (exact, by erf) or `gelu_tanh` (the tanh form). Or `clamped_swiglu` of
            gpt-oss. Let g be the first half, clamped to at most 7, and u the second half, clamped to [-7, 7]. Then the
            result is g * sigmoid(1.702 * g) * (u + 1).
        x_T2I: float32, bfloat16 or float16; rows may be strided.
        out: memory for the result; rows may be strided. None: new memory.
        factors_F, order_T: row t of x is first multiplied by factors[order[t]]. They are float32, and int32 in [0, F).
        begins: int32. The kernels compute only the rows from its first number to its last one.
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
    kernels.gated_activation(name, x_T2I, out, factors_F, order_T, begins)
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
    """Normalize and rotate the heads of q and k, and write k and v to the KV cache.

    The RMS norm of single heads comes first. Then comes the rotary embedding in neox style: halves of the first R
    dimensions form pairs (Su et al., arXiv 2104.09864). It is computed in float32 and rounded once.

    Args:
        q_THE: changes in place.
        k_TGE, v_TGE: have q's dtype and do not change. q, k and v may be strided views of one projection, but their
            last dimension is contiguous.
        positions_T: int64, in [0, P): the rows of the rotary table.
        slot_mapping_T: int64, block * block_size + offset: the slots of the cache. A token with a negative slot is not
            written.
        cache: has q's dtype, or holds codes (see kv_codes); int8 codes have scales.
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
    """Rotate q and the end of each latent row, and write the rows to the KV cache. It is for latent attention.

    All tensors may be strided, but their last dimension is contiguous. See `rope_and_cache` for the other arguments.

    Args:
        q_THR: the rotating part of each query head.
        rows_TL: rows of L elements. The last R elements are the rotating part of the key; the elements before are the
            normed latents.
        cache: has one KV head. The values of this cache are the beginnings of its keys.
        out_THR: memory for the rotated q. Its dimensions have the order of the rotated keys: pairs are i and i + R / 2.
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
    """Causal attention over a paged KV cache, for any mix of prefill and decode. Head h reads KV head h // (H / G).

    The softmax is in float32. The bits of a token do not depend on the other tokens of the call.

    Args:
        q_THE: may be strided, but its last dimension is contiguous. Its tokens cu_seqlens_q[s] to cu_seqlens_q[s + 1] -
            1 are the last positions of sequence s. Tokens after the last sequence have no result.
        cache: has q's dtype, or holds codes (see kv_codes); int8 codes have scales. Only slots of the sequences are
            read.
        block_tables_SM: int32. Position i of sequence s lies in block block_tables[s, i // P]. Entries before the first
            position that a sequence sees may be any numbers.
        seq_lens_S: int32, below 2^24: the lengths of the sequences with their query tokens.
        cu_seqlens_q_S1: int32.
        out_THE: memory for the result; None: new memory.
        sinks_H: a score of each head, in q's dtype. It joins the softmax without a value (StreamingLLM, arXiv
            2309.17453; gpt-oss learns it). None: heads have no sinks.

    Returns:
        [T, H, V] in q's dtype. V is the size of the cache's values: E, or less if they are the beginnings of the keys.
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
    """Check that the cache fits q. A cache that has its compiled struct was checked before, so only q is checked."""
    k_BGPE = cache.k_BGPE
    check_filled("q", q_THE, "THE")
    if cache.compiled is None:
        _check_memory(q_THE, cache)
    check_places(k_cache=k_BGPE, q=q_THE)
    if k_BGPE.shape[3] != q_THE.shape[2]:
        check_shape("k_cache", k_BGPE, *k_BGPE.shape[:3], q_THE.shape[2])
    check_dtype("k_cache", k_BGPE, q_THE.dtype, *CODE_DTYPES)


def _check_memory(x: Tensor, cache: LayerCache) -> None:
    """Check that the tensors of a cache fit each other, and that they fit the heads or rows x."""
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
    """Set logits to -inf in place where a mask forbids the token.

    Args:
        logits_RV: float32.
        masks_MW: int32. Bit i of word w is 1 if token 32 w + i is allowed.
        rows_M: int32, in [0, R): the row of logits of each mask. A row may have several masks; then a token is allowed
            if all of them allow it.
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
    """The token id (int64) of the highest logit of each float32 row. The lowest id wins ties. -1: the row has a NaN."""
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
    """Draw one random token id (int64) for each row of logits. -1: the row has no softmax (NaN, +inf, or all -inf).

    1. p = softmax(logits / temperature).
    2. Keep the tokens with p >= min_p * max(p).
    3. Keep the top_k highest of them, with all ties at the k-th.
    4. Renormalize. Keep the smallest set of highest probabilities whose sum is at least top_p. Of ties, the lowest id
       comes first. At least one token is kept.
    5. Draw by inverse CDF over ascending ids, with `uniform`.

    Probabilities count in units of 2^-44 of the largest one, so sums are exact.

    Args:
        logits_RV: float32, V below 2^19.
        temperature_R: float32, finite and not negative. Rows with temperature 0 are greedy.
        top_k_R: int32; 0: off.
        top_p_R: float32 in [0, 1]; 1: off.
        min_p_R: float32 in [0, 1]; 0: off.
        uniform_R: float64 in [0, 1).
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
    """Compute the log-softmax of rows at the given tokens, and at the num_top highest logits.

    Args:
        logits_RV: float32.
        token_ids_R: int64, in [0, V).

    Returns:
        token_logprobs_R (float32), ranks_R (int64: 1 + the number of strictly greater logits), top_ids_RN (int64) and
        top_logprobs_RN (float32), in descending order; of ties, the lowest id comes first. A row without softmax gives
        NaN, rank -1 and ids -1.
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
