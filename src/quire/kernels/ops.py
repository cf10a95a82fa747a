"""Typed functions on torch tensors with shape contracts: compiled kernels on CPU, Triton on GPU, plain torch otherwise.

The arithmetic of one row never depends on the other rows of a call nor on the number of threads.
Dimensions: T tokens, D hidden, I inner (feed-forward), H query heads, G KV heads,
E head_dim, B cache blocks, P block_size (of a cache) or number of positions (of cos_sin), R rotary_dim (of cos_sin) or
rows (of logits), S sequences, M blocks per sequence, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.kernels import cpu, gpu, reference
from quire.kernels.kv_codes import CODE_DTYPES


def _kernels(x: Tensor) -> Any:
    """The module whose functions compute on this tensor; None: plain torch."""
    if cpu.takes(x):
        return cpu
    return gpu.kernels() if gpu.takes(x) else None


def _attention_kernels(q_THE: Tensor) -> Any:
    """The same for attention, which not every module has for every shape."""
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
    _check_norm(x_TD, weight_D, out)
    if (kernels := _kernels(x_TD)) is None:
        y_TD = reference.rms_norm(x_TD, weight_D, eps, weight_offset)
        return y_TD if out is None else out.copy_(y_TD)
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) if out is None else out
    kernels.rms_norm(x_TD, None, weight_D, eps, weight_offset, out)
    return out


def add_rms_norm(
    x_TD: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """residual += x in place (rounded to its dtype), then rms_norm of the new residual. `out` may be x."""
    _check_norm(x_TD, weight_D, out)
    assert residual_TD.shape == x_TD.shape and residual_TD.dtype == x_TD.dtype, "residual is not like x"
    if (kernels := _kernels(x_TD)) is None:
        residual_TD += x_TD
        y_TD = reference.rms_norm(residual_TD, weight_D, eps, weight_offset)
        return y_TD if out is None else out.copy_(y_TD)
    assert residual_TD.stride(1) == 1, "the last dimension of residual is not contiguous"
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) if out is None else out
    kernels.rms_norm(x_TD, residual_TD, weight_D, eps, weight_offset, out)
    return out


def _check_norm(x_TD: Tensor, weight_D: Tensor, out: Tensor | None) -> None:
    assert x_TD.dim() == 2 and x_TD.stride(1) == 1, (
        f"x is {tuple(x_TD.shape)} with strides {x_TD.stride()}, expected rows"
    )
    assert weight_D.shape == x_TD.shape[1:], f"weight is {tuple(weight_D.shape)}, x is {tuple(x_TD.shape)}"
    assert weight_D.dtype in (x_TD.dtype, torch.float32), f"weight is {weight_D.dtype}, x is {x_TD.dtype}"
    assert weight_D.stride(0) == 1, "weight is not contiguous"
    assert out is None or (out.shape == x_TD.shape and out.dtype == x_TD.dtype and out.stride(1) == 1), (
        "out is not like x"
    )


def gated_activation(name: str, x_T2I: Tensor, out: Tensor | None = None) -> Tensor:
    """f(first half of each row) * second half, float32 inside, rounded once; Shazeer, arXiv 2002.05202.

    Args:
        name: of f: silu, gelu (exact, by erf) or gelu_tanh (its tanh form).
    """
    assert x_T2I.dim() == 2 and x_T2I.shape[1] % 2 == 0, f"x is {tuple(x_T2I.shape)}, expected [T, 2 * I]"
    shape = (x_T2I.shape[0], x_T2I.shape[1] // 2)
    assert out is None or (out.shape == shape and out.dtype == x_T2I.dtype), f"out is not {shape} of x's dtype"
    if (kernels := _kernels(x_T2I)) is None:
        y_TI = reference.gated_activation(name, x_T2I)
        return y_TI if out is None else out.copy_(y_TI)
    out = torch.empty(shape, dtype=x_T2I.dtype, device=x_T2I.device) if out is None else out
    assert x_T2I.stride(1) == 1 and out.stride(1) == 1, "the last dimension is not contiguous"
    kernels.gated_activation(name, x_T2I, out)
    return out


def rope_and_cache(
    q_THE: Tensor,
    k_TGE: Tensor,
    v_TGE: Tensor,
    positions_T: Tensor,
    cos_sin_PR: Tensor | None,
    slot_mapping_T: Tensor,
    k_cache_BGPE: Tensor,
    v_cache_BGPE: Tensor,
    q_norm_weight_E: Tensor | None = None,
    k_norm_weight_E: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_weight_offset: float = 0.0,
    k_scales_BGP: Tensor | None = None,
    v_scales_BGP: Tensor | None = None,
) -> None:
    """Between the qkv projection and attention: RMS norm per head, rotary embedding, write to the KV cache.

    q, k, v may be strided views of one projection (last dimension contiguous). q is changed in place; k and v stay as
    they are and go to the cache slots (int64, block * block_size + offset; negative: not written). The norm of q or
    k is left out where its weight (dtype of q, or float32) is None. The rotation (neox style: halves of the first R
    dimensions; Su et al., arXiv 2104.09864) takes float32 rows [R / 2 cosines, R / 2 sines] at `positions_T` (int64,
    below P, not checked) and is left out when cos_sin is None. float32 inside, rounded once. q, k, v share
    one dtype; the caches have it too, or hold codes (see kv_codes), int8 with scales.
    """
    T, _, E = q_THE.shape
    G = k_cache_BGPE.shape[1]
    assert k_TGE.shape == v_TGE.shape == (T, G, E), (
        f"k {tuple(k_TGE.shape)}, v {tuple(v_TGE.shape)}, expected {(T, G, E)}"
    )
    assert q_THE.dtype == k_TGE.dtype == v_TGE.dtype, "dtypes of q, k and v differ"
    _check_caches(q_THE, k_cache_BGPE, v_cache_BGPE, k_scales_BGP, v_scales_BGP)
    assert positions_T.shape == slot_mapping_T.shape == (T,), "positions and slot_mapping are not [T]"
    assert positions_T.dtype == slot_mapping_T.dtype == torch.int64, "positions and slot_mapping are not int64"
    norm_weights = [w for w in (q_norm_weight_E, k_norm_weight_E) if w is not None]
    assert all(w.shape == (E,) and w.dtype in (q_THE.dtype, torch.float32) for w in norm_weights), "bad norm weight"
    assert len({w.dtype for w in norm_weights}) < 2, "norm weights of q and k differ in dtype"
    if cos_sin_PR is not None:
        R = cos_sin_PR.shape[1]
        assert R % 2 == 0 and R <= E, f"rotary_dim {R} is odd or above head_dim {E}"
        assert cos_sin_PR.dtype == torch.float32 and cos_sin_PR.is_contiguous(), "cos_sin is not contiguous float32"
    arguments = (
        *(q_THE, k_TGE, v_TGE, positions_T, cos_sin_PR, slot_mapping_T, k_cache_BGPE, v_cache_BGPE),
        *(q_norm_weight_E, k_norm_weight_E, norm_eps, norm_weight_offset, k_scales_BGP, v_scales_BGP),
    )
    if (kernels := _attention_kernels(q_THE)) is None:
        reference.rope_and_cache(*arguments)
        return
    assert q_THE.stride(2) == k_TGE.stride(2) == v_TGE.stride(2) == 1, "the last dimension of q, k, v is not contiguous"
    assert positions_T.is_contiguous() and slot_mapping_T.is_contiguous(), (
        "positions or slot_mapping are not contiguous"
    )
    assert all(w.is_contiguous() for w in norm_weights), "norm weights are not contiguous"
    kernels.rope_and_cache(*arguments)


def paged_attention(
    q_THE: Tensor,
    k_cache_BGPE: Tensor,
    v_cache_BGPE: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    cu_seqlens_q_S1: Tensor,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    out_THE: Tensor | None = None,
    k_scales_BGP: Tensor | None = None,
    v_scales_BGP: Tensor | None = None,
) -> Tensor:
    """Causal attention over a paged KV cache for any mix of prefill and decode; head h reads KV head h // (H / G).

    The query tokens cu_seqlens_q[s] .. cu_seqlens_q[s + 1] are the last positions of sequence s, whose length (these
    tokens included) is seq_lens[s]; position i lies in block block_tables[s, i // P] (tables, lengths and sums: int32).
    With a sliding window w a token sees the positions above its own minus w (0: all). With a soft cap c scores become
    c * tanh(score / c). Softmax in float32; a token's result does not depend on the other tokens of the call, bit for
    bit. q may be strided (last dimension contiguous); the caches have its dtype or hold codes (see kv_codes),
    int8 with scales; seq_lens are below 2^24. What else the cache holds is never used.
    """
    T, H, E = q_THE.shape
    G = k_cache_BGPE.shape[1]
    S = seq_lens_S.shape[0]
    _check_caches(q_THE, k_cache_BGPE, v_cache_BGPE, k_scales_BGP, v_scales_BGP)
    assert H % G == 0, f"{H} query heads do not divide into {G} KV heads"
    assert block_tables_SM.shape[0] == S and cu_seqlens_q_S1.shape == (S + 1,), "one table row and length per sequence"
    assert block_tables_SM.dtype == seq_lens_S.dtype == cu_seqlens_q_S1.dtype == torch.int32, "tables are not int32"
    assert scale > 0 and sliding_window >= 0 and soft_cap >= 0, (
        f"scale {scale}, window {sliding_window}, cap {soft_cap}"
    )
    assert out_THE is None or (out_THE.shape == q_THE.shape and out_THE.dtype == q_THE.dtype), "out is not like q"
    tables = (block_tables_SM, seq_lens_S, cu_seqlens_q_S1)
    if (kernels := _attention_kernels(q_THE)) is None:
        y_THE = reference.paged_attention(
            *(q_THE, k_cache_BGPE, v_cache_BGPE, *tables, scale, sliding_window, soft_cap, k_scales_BGP, v_scales_BGP)
        )
        return y_THE if out_THE is None else out_THE.copy_(y_THE)
    out_THE = torch.empty((T, H, E), dtype=q_THE.dtype, device=q_THE.device) if out_THE is None else out_THE
    assert q_THE.stride(2) == out_THE.stride(2) == 1, "the last dimension of q or out is not contiguous"
    assert block_tables_SM.stride(1) == seq_lens_S.stride(0) == cu_seqlens_q_S1.stride(0) == 1, (
        "tables are not contiguous"
    )
    caches = (k_cache_BGPE, v_cache_BGPE, k_scales_BGP, v_scales_BGP)
    kernels.paged_attention(q_THE, *caches, *tables, scale, sliding_window, soft_cap, out_THE)
    return out_THE


def _check_caches(
    q_THE: Tensor,
    k_cache_BGPE: Tensor,
    v_cache_BGPE: Tensor,
    k_scales_BGP: Tensor | None,
    v_scales_BGP: Tensor | None,
) -> None:
    P, E = k_cache_BGPE.shape[2:]
    assert k_cache_BGPE.shape == v_cache_BGPE.shape and q_THE.shape[2] == E, "caches are not [B, G, P, E] alike"
    assert k_cache_BGPE.stride()[2:] == v_cache_BGPE.stride()[2:] == (E, 1), f"blocks of {P} x {E} are not contiguous"
    dtype = k_cache_BGPE.dtype
    assert dtype == v_cache_BGPE.dtype and dtype in (q_THE.dtype, *CODE_DTYPES), f"q is {q_THE.dtype}, caches {dtype}"
    for scales in (k_scales_BGP, v_scales_BGP):
        assert (scales is not None) == (dtype == torch.int8), "scales belong to int8 caches"
        assert scales is None or (
            scales.shape == k_cache_BGPE.shape[:3] and scales.dtype == torch.float32 and scales.is_contiguous()
        ), "scales are not contiguous float32 [B, G, P]"


def greedy(logits_RV: Tensor) -> Tensor:
    """Token id (int64) of the highest logit of each float32 row; the lowest id wins ties; -1 for a row with NaN."""
    _check_logits(logits_RV)
    if (kernels := _kernels(logits_RV)) is None:
        return reference.greedy(logits_RV)
    token_ids_R = torch.empty(logits_RV.shape[0], dtype=torch.int64, device=logits_RV.device)
    kernels.greedy(logits_RV, token_ids_R)
    return token_ids_R


def sample(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor
) -> Tensor:
    """One random token id (int64) per float32 row of logits, -1 for a row that has no softmax (NaN, +inf, or all -inf).

    p = softmax(logits / temperature); keep p >= min_p * max(p); keep the top_k highest of them (ties at the k-th are
    kept); keep of the rest, renormalised, the smallest set of highest probabilities whose mass is at least top_p (ties:
    lowest id first; at least one token); draw by inverse CDF over ascending ids with `uniform`. Probabilities count in
    units of 2^-44 of the largest, so sums are exact. Rows of temperature 0 are greedy. temperature float32; top_k
    int32, 0 = off; top_p and min_p float32, 1 and 0 = off; uniform float64 in [0, 1). V is below 2^19.
    """
    _check_logits(logits_RV)
    R, V = logits_RV.shape
    assert V < 1 << 19, f"vocabulary of {V} tokens: sums of probabilities would overflow from {1 << 19} on"
    parameters = (temperature_R, top_k_R, top_p_R, min_p_R, uniform_R)
    assert all(x.shape == (R,) and x.is_contiguous() for x in parameters), f"expected one parameter per row, {R}"
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float64)
    assert tuple(x.dtype for x in parameters) == dtypes, f"parameter dtypes are not {dtypes}"
    if (kernels := _kernels(logits_RV)) is None:
        return reference.sample(logits_RV, *parameters)
    token_ids_R = torch.empty(R, dtype=torch.int64, device=logits_RV.device)
    kernels.sample(logits_RV, *parameters, token_ids_R)
    return token_ids_R


def logprobs(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of float32 rows at the given tokens and at the num_top highest.

    Returns token_logprobs_R (float32), ranks_R (int64, 1 + number of strictly greater logits), top_ids_RN (int64) and
    top_logprobs_RN (float32), descending, ties by lowest id. A row that has no softmax gives NaN, rank -1 and ids -1.
    """
    _check_logits(logits_RV)
    R, V = logits_RV.shape
    assert token_ids_R.shape == (R,) and token_ids_R.dtype == torch.int64, "token_ids are not int64 [R]"
    assert 0 <= num_top <= V, f"num_top is {num_top}, the vocabulary has {V} tokens"
    if not cpu.takes(logits_RV):
        return reference.logprobs(logits_RV, token_ids_R, num_top)
    token_logprobs_R, top_logprobs_RN = torch.empty(R), torch.empty(R, num_top)
    ranks_R, top_ids_RN = torch.empty(R, dtype=torch.int64), torch.empty((R, num_top), dtype=torch.int64)
    cpu.logprobs(logits_RV, token_ids_R.contiguous(), token_logprobs_R, ranks_R, top_ids_RN, top_logprobs_RN)
    return token_logprobs_R, ranks_R, top_ids_RN, top_logprobs_RN


def _check_logits(logits_RV: Tensor) -> None:
    assert logits_RV.dim() == 2 and logits_RV.dtype == torch.float32, (
        f"logits are not float32 [R, V]: {logits_RV.dtype}"
    )
    assert logits_RV.shape[1] > 0 and logits_RV.stride(1) == 1, "rows of logits are empty or not contiguous"
