"""Typed functions on torch tensors with shape contracts: compiled kernels for CPU tensors, plain torch otherwise.

The arithmetic of one row never depends on the other rows of a call nor on the number of threads.
Dimensions: T tokens, K in-features, N out-features, D hidden, I inner (feed-forward), H query heads, G KV heads,
E head_dim, B cache blocks, P block_size (of a cache) or number of positions (of cos_sin), R rotary_dim (of cos_sin) or
rows (of logits), S sequences, M blocks per sequence, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import cpu, reference

PANEL_WIDTH = 64  # kPanelWidth of csrc/include/quire/kernels/gemm.h


@dataclass(frozen=True)
class PackedLinear:
    """A weight in the form `linear` reads. Opaque: the layout belongs to the path that packed it.

    `data` is the kernels' panel layout (uint8) when `is_packed`, else the weight [N, K] itself.
    """

    data: Tensor
    N: int
    K: int
    dtype: torch.dtype
    is_packed: bool

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def pack_linear(weight_NK: Tensor) -> PackedLinear:
    """Bring a weight [N, K] of dtype float32, bfloat16 or float16 into the form `linear` reads.

    On CPU with the compiled kernels this is a copy (multi-threaded): the caller may free `weight_NK`. Rows may be
    strided.
    """
    assert weight_NK.dim() == 2, f"weight must be [N, K], got shape {tuple(weight_NK.shape)}"
    assert weight_NK.dtype in cpu.DTYPE_CODES, f"weight dtype {weight_NK.dtype} is not float32, bfloat16 or float16"
    N, K = weight_NK.shape
    if not (cpu.available() and weight_NK.device.type == "cpu"):
        return PackedLinear(weight_NK, N, K, weight_NK.dtype, is_packed=False)
    if weight_NK.stride(1) != 1:
        weight_NK = weight_NK.contiguous()
    return PackedLinear(cpu.gemm_pack(weight_NK), N, K, weight_NK.dtype, is_packed=True)


def linear(
    x_TK: Tensor,
    packed: PackedLinear,
    bias_N: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y_TN = x_TK @ weight.T + bias_N with float32 accumulation, rounded once to the output dtype.

    x has the weight's dtype; the output has x's dtype unless `out_dtype` (or the dtype of `out`) says otherwise. Rows
    of
    x and of `out` may be strided. The bias may have any of the three dtypes.
    """
    assert x_TK.shape[1:] == (packed.K,), f"x is {tuple(x_TK.shape)}, expected [T, {packed.K}]"
    assert x_TK.dtype == packed.dtype, f"x is {x_TK.dtype}, the weight is {packed.dtype}"
    assert bias_N is None or bias_N.shape == (packed.N,), f"bias is not of shape ({packed.N},)"
    T = x_TK.shape[0]
    if out is None:
        out = torch.empty((T, packed.N), dtype=out_dtype or x_TK.dtype, device=x_TK.device)
    else:
        assert out.shape == (T, packed.N), f"out is {tuple(out.shape)}, expected [{T}, {packed.N}]"
        assert out.stride(1) == 1, "the last dimension of out is not contiguous"
        assert out_dtype is None or out_dtype == out.dtype, f"out is {out.dtype}, out_dtype is {out_dtype}"
    if packed.is_packed:
        if x_TK.stride(1) != 1:
            x_TK = x_TK.contiguous()
        if bias_N is not None and bias_N.stride(0) != 1:
            bias_N = bias_N.contiguous()
        cpu.gemm(x_TK, packed.data, packed.N, bias_N, out)
        return out
    bias = None if bias_N is None else bias_N.to(x_TK.dtype)
    return out.copy_(F.linear(x_TK, packed.data, bias))


def packed_rows(packed: PackedLinear, rows_T: Tensor) -> Tensor:
    """weight[rows_T] -> [T, K] out of the packed form: embedding lookup in a matrix that is also the output projection.

    rows_T int64, each in [0, N).
    """
    assert rows_T.dim() == 1, f"rows must be [T], got shape {tuple(rows_T.shape)}"
    if not packed.is_packed:
        return F.embedding(rows_T, packed.data)
    panels_T, columns_T = rows_T // PANEL_WIDTH, rows_T % PANEL_WIDTH
    num_panels = -(-packed.N // PANEL_WIDTH)
    if packed.dtype != torch.bfloat16:  # [panel][k][column]
        return packed.data.view(packed.dtype).view(num_panels, packed.K, PANEL_WIDTH)[panels_T, :, columns_T]
    # [panel][32 of k][16 of the columns][pair of k][column]; a pair moves as one int32
    pairs = packed.data.view(torch.int32).view(num_panels, -1, PANEL_WIDTH // 16, 16, 16)
    pairs_TK = pairs[panels_T, :, columns_T // 16, :, columns_T % 16].flatten(1)
    return pairs_TK.view(torch.bfloat16)[:, : packed.K]


@dataclass(frozen=True)
class PackedGrouped:
    """An integer weight in groups along K in the form `grouped_linear` reads. Opaque, as PackedLinear.

    `data` is the kernels' panel layout (uint8) when `is_packed`, else the codes [N, K] beside `scales_NG`.
    """

    data: Tensor
    scales_NG: Tensor | None
    N: int
    K: int
    bits: int
    group_size: int

    @property
    def is_packed(self) -> bool:
        return self.scales_NG is None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales_NG is None else self.scales_NG.nbytes)


def quantize_grouped(weight_NK: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """The nearest integer weight: codes uint8 [N, K] and float32 scales [N, ceil(K / group_size)].

    weight = scale * (code - zero) with zero 128 for 8 bits and 8 for 4 bits. 8 bits: scale = max |w| / 127. 4 bits: the
    element of largest magnitude gets code 0, so that all 16 codes are used (as GGUF's Q4_0 does).
    """
    _check_grouped(weight_NK, bits, group_size)
    if not _on_kernels(weight_NK):
        return reference.quantize_grouped(weight_NK, bits, group_size)
    return cpu.grouped_quantize(weight_NK if weight_NK.stride(1) == 1 else weight_NK.contiguous(), bits, group_size)


def pack_grouped(codes_NK: Tensor, scales_NG: Tensor, bits: int, group_size: int) -> PackedGrouped:
    """Bring codes and scales (see `quantize_grouped`) into the form `grouped_linear` reads; a copy on the kernels.

    Args:
        codes_NK: uint8, below 2^bits; rows may be strided.
        bits: 8 or 4.
        group_size: elements along K that share a scale: a multiple of 32, at most 65,536.
    """
    _check_grouped(codes_NK, bits, group_size)
    N, K = codes_NK.shape
    assert scales_NG.shape == (N, -(-K // group_size)), f"scales are {tuple(scales_NG.shape)}, weight {(N, K)}"
    assert codes_NK.dtype == torch.uint8 and scales_NG.dtype == torch.float32, "codes are not uint8 or scales float32"
    if not (cpu.available() and codes_NK.device.type == "cpu"):
        return PackedGrouped(codes_NK, scales_NG, N, K, bits, group_size)
    if codes_NK.stride(1) != 1:
        codes_NK = codes_NK.contiguous()
    packed = cpu.grouped_pack(codes_NK, scales_NG.contiguous(), bits, group_size)
    return PackedGrouped(packed, None, N, K, bits, group_size)


def grouped_linear(
    x_TK: Tensor, packed: PackedGrouped, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """y_TN = x @ weight.T + bias_N with rows of x quantized to 8 bits, one scale per row and group of the weight.

    Integer sums within a group are exact; groups are added in float32, in order. The output has x's dtype or
    `out_dtype`. A row with a value that is not finite gives NaN in its whole row of the output.
    """
    assert x_TK.shape[1:] == (packed.K,), f"x is {tuple(x_TK.shape)}, expected [T, {packed.K}]"
    assert x_TK.dtype in cpu.DTYPE_CODES, f"x is {x_TK.dtype}"
    assert bias_N is None or bias_N.shape == (packed.N,), f"bias is not of shape ({packed.N},)"
    out_dtype = out_dtype or x_TK.dtype
    if packed.scales_NG is not None:
        codes_NK = packed.data
        return reference.grouped_linear(
            x_TK, codes_NK, packed.scales_NG, packed.bits, packed.group_size, bias_N, out_dtype
        )
    out_TN = torch.empty((x_TK.shape[0], packed.N), dtype=out_dtype)
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    if bias_N is not None and bias_N.stride(0) != 1:
        bias_N = bias_N.contiguous()
    cpu.gemm(x_TK, packed.data, packed.N, bias_N, out_TN, packed.bits, packed.group_size)
    return out_TN


def grouped_rows(packed: PackedGrouped, rows_T: Tensor, dtype: torch.dtype) -> Tensor:
    """weight[rows_T] -> [T, K]: float32 products of scale and code, rounded to dtype. rows_T int64, each in [0, N)."""
    assert rows_T.dim() == 1, f"rows must be [T], got shape {tuple(rows_T.shape)}"
    N, K, bits, group_size = packed.N, packed.K, packed.bits, packed.group_size
    if packed.scales_NG is not None:
        return reference.dequantize_grouped(packed.data[rows_T], packed.scales_NG[rows_T], bits, group_size).to(dtype)
    num_groups = -(-K // group_size)
    panels_T, columns_T = rows_T // PANEL_WIDTH, rows_T % PANEL_WIDTH
    data = packed.data.view(-(-N // PANEL_WIDTH), -1)
    scale_bytes = 4 * PANEL_WIDTH * num_groups
    scales_PGW = data[:, :scale_bytes].view(torch.float32).reshape(len(data), num_groups, PANEL_WIDTH)
    quads_PQW4 = data[:, scale_bytes:].reshape(len(data), -1, PANEL_WIDTH, 4)
    scales_TG, quads_TQ4 = scales_PGW[panels_T, :, columns_T], quads_PQW4[panels_T, :, columns_T]
    if bits == 4:
        quads_TQ4 = torch.stack([quads_TQ4 & 15, quads_TQ4 >> 4], dim=2)
    codes_TK = quads_TQ4.reshape(len(rows_T), -1)[:, :K]
    return reference.dequantize_grouped(codes_TK, scales_TG, bits, group_size).to(dtype)


def _check_grouped(weight_NK: Tensor, bits: int, group_size: int) -> None:
    assert weight_NK.dim() == 2, f"weight must be [N, K], got shape {tuple(weight_NK.shape)}"
    assert bits in (4, 8), f"codes of {bits} bits"
    assert group_size % 32 == 0 and 32 <= group_size <= 65_536, f"group size {group_size}"


def _on_kernels(x: Tensor) -> bool:
    return cpu.available() and x.device.type == "cpu" and x.dtype in cpu.DTYPE_CODES


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, weight_offset: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (weight + weight_offset), float32 inside, rounded once.

    Zhang and Sennrich, arXiv 1910.07467. The weight has x's dtype or float32. Rows of x and `out` may be strided;
    `out` may be x.
    """
    _check_norm(x_TD, weight_D, out)
    if not _on_kernels(x_TD):
        y_TD = reference.rms_norm(x_TD, weight_D, eps, weight_offset)
        return y_TD if out is None else out.copy_(y_TD)
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype) if out is None else out
    cpu.rms_norm(x_TD, None, weight_D, eps, weight_offset, out)
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
    if not _on_kernels(x_TD):
        residual_TD += x_TD
        y_TD = reference.rms_norm(residual_TD, weight_D, eps, weight_offset)
        return y_TD if out is None else out.copy_(y_TD)
    assert residual_TD.stride(1) == 1, "the last dimension of residual is not contiguous"
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype) if out is None else out
    cpu.rms_norm(x_TD, residual_TD, weight_D, eps, weight_offset, out)
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


def silu_and_mul(x_T2I: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(first half of each row) * second half, float32 inside, rounded once; Shazeer, arXiv 2002.05202."""
    return _gated_activation("silu", x_T2I, out)


def gelu_and_mul(x_T2I: Tensor, out: Tensor | None = None) -> Tensor:
    """gelu(first half of each row) * second half with the exact (erf) gelu, float32 inside, rounded once."""
    return _gated_activation("gelu", x_T2I, out)


def gelu_tanh_and_mul(x_T2I: Tensor, out: Tensor | None = None) -> Tensor:
    """gelu(first half of each row) * second half with the tanh form of gelu, float32 inside, rounded once."""
    return _gated_activation("gelu_tanh", x_T2I, out)


def _gated_activation(name: str, x_T2I: Tensor, out: Tensor | None) -> Tensor:
    assert x_T2I.dim() == 2 and x_T2I.shape[1] % 2 == 0, f"x is {tuple(x_T2I.shape)}, expected [T, 2 * I]"
    shape = (x_T2I.shape[0], x_T2I.shape[1] // 2)
    assert out is None or (out.shape == shape and out.dtype == x_T2I.dtype), f"out is not {shape} of x's dtype"
    if not _on_kernels(x_T2I):
        y_TI = reference.gated_activation(name, x_T2I)
        return y_TI if out is None else out.copy_(y_TI)
    out = torch.empty(shape, dtype=x_T2I.dtype) if out is None else out
    assert x_T2I.stride(1) == 1 and out.stride(1) == 1, "the last dimension is not contiguous"
    cpu.gated_activation(name, x_T2I, out)
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
) -> None:
    """Between the qkv projection and attention: RMS norm per head, rotary embedding, write to the KV cache.

    q, k, v may be strided views of one projection (last dimension contiguous). q is changed in place; k and v stay as
    they are and go to the cache slots (int64, block * block_size + offset; negative: not written). The norm of q or k
    is
    left out where its weight (dtype of q, or float32) is None. The rotation (neox style: halves of the first R
    dimensions; Su et al., arXiv 2104.09864) takes float32 rows [R / 2 cosines, R / 2 sines] at `positions_T` (int64,
    below P, not checked) and is left out when cos_sin is None. float32 inside, rounded once. q, k, v and caches share
    one dtype.
    """
    T, _, E = q_THE.shape
    G, P = k_cache_BGPE.shape[1:3]
    assert k_TGE.shape == v_TGE.shape == (T, G, E), (
        f"k {tuple(k_TGE.shape)}, v {tuple(v_TGE.shape)}, expected {(T, G, E)}"
    )
    assert k_cache_BGPE.shape == v_cache_BGPE.shape and k_cache_BGPE.shape[3] == E, "caches are not [B, G, P, E] alike"
    assert q_THE.dtype == k_TGE.dtype == v_TGE.dtype == k_cache_BGPE.dtype == v_cache_BGPE.dtype, "dtypes differ"
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
        *(q_norm_weight_E, k_norm_weight_E, norm_eps, norm_weight_offset),
    )
    if not _on_kernels(q_THE) or E > cpu.MAX_HEAD_DIM:
        reference.rope_and_cache(*arguments)
        return
    assert q_THE.stride(2) == k_TGE.stride(2) == v_TGE.stride(2) == 1, "the last dimension of q, k, v is not contiguous"
    assert positions_T.is_contiguous() and slot_mapping_T.is_contiguous(), (
        "positions or slot_mapping are not contiguous"
    )
    assert all(w.is_contiguous() for w in norm_weights), "norm weights are not contiguous"
    assert k_cache_BGPE.stride()[2:] == v_cache_BGPE.stride()[2:] == (E, 1), f"blocks of {P} x {E} are not contiguous"
    cpu.rope_and_cache(*arguments)


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
) -> Tensor:
    """Causal attention over a paged KV cache for any mix of prefill and decode; head h reads KV head h // (H / G).

    The query tokens cu_seqlens_q[s] .. cu_seqlens_q[s + 1] are the last positions of sequence s, whose length (these
    tokens included) is seq_lens[s]; position i lies in block block_tables[s, i // P] (tables, lengths and sums: int32).
    With a sliding window w a token sees the positions above its own minus w (0: all). With a soft cap c scores become
    c * tanh(score / c). Softmax in float32; a token's result does not depend on the other tokens of the call, bit for
    bit. q may be strided (last dimension contiguous); q and caches share one dtype; seq_lens are below 2^24. What else
    the cache holds is never used.
    """
    T, H, E = q_THE.shape
    _, G, P, _ = k_cache_BGPE.shape
    S = seq_lens_S.shape[0]
    assert k_cache_BGPE.shape == v_cache_BGPE.shape and k_cache_BGPE.shape[3] == E, "caches are not [B, G, P, E] alike"
    assert H % G == 0, f"{H} query heads do not divide into {G} KV heads"
    assert q_THE.dtype == k_cache_BGPE.dtype == v_cache_BGPE.dtype, f"q is {q_THE.dtype}, caches {k_cache_BGPE.dtype}"
    assert block_tables_SM.shape[0] == S and cu_seqlens_q_S1.shape == (S + 1,), "one table row and length per sequence"
    assert block_tables_SM.dtype == seq_lens_S.dtype == cu_seqlens_q_S1.dtype == torch.int32, "tables are not int32"
    assert scale > 0 and sliding_window >= 0 and soft_cap >= 0, (
        f"scale {scale}, window {sliding_window}, cap {soft_cap}"
    )
    assert out_THE is None or (out_THE.shape == q_THE.shape and out_THE.dtype == q_THE.dtype), "out is not like q"
    tables = (block_tables_SM, seq_lens_S, cu_seqlens_q_S1)
    if not _on_kernels(q_THE) or E > cpu.MAX_HEAD_DIM:
        y_THE = reference.paged_attention(q_THE, k_cache_BGPE, v_cache_BGPE, *tables, scale, sliding_window, soft_cap)
        return y_THE if out_THE is None else out_THE.copy_(y_THE)
    out_THE = torch.empty((T, H, E), dtype=q_THE.dtype) if out_THE is None else out_THE
    assert q_THE.stride(2) == out_THE.stride(2) == 1, "the last dimension of q or out is not contiguous"
    assert k_cache_BGPE.stride()[2:] == v_cache_BGPE.stride()[2:] == (E, 1), f"blocks of {P} x {E} are not contiguous"
    assert block_tables_SM.stride(1) == seq_lens_S.stride(0) == cu_seqlens_q_S1.stride(0) == 1, (
        "tables are not contiguous"
    )
    cpu.paged_attention(q_THE, k_cache_BGPE, v_cache_BGPE, *tables, scale, sliding_window, soft_cap, out_THE)
    return out_THE


def greedy(logits_RV: Tensor) -> Tensor:
    """Token id (int64) of the highest logit of each float32 row; the lowest id wins ties; -1 for a row with NaN."""
    _check_logits(logits_RV)
    if not _on_kernels(logits_RV):
        return reference.greedy(logits_RV)
    token_ids_R = torch.empty(logits_RV.shape[0], dtype=torch.int64)
    cpu.greedy(logits_RV, token_ids_R)
    return token_ids_R


def sample(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor
) -> Tensor:
    """One random token id (int64) per float32 row of logits, -1 for a row that has no softmax (NaN, +inf, or all -inf).

    p = softmax(logits / temperature); keep p >= min_p * max(p); keep the top_k highest of them (ties at the k-th are
    kept); keep of the rest, renormalised, the smallest set of highest probabilities whose mass is at least top_p (ties:
    lowest id first; at least one token); draw by inverse CDF over ascending ids with `uniform`. Probabilities count in
    units of 2^-44 of the largest, so sums are exact. Rows of temperature 0 are greedy. temperature float32; top_k
    int32,
    0 = off; top_p and min_p float32, 1 and 0 = off; uniform float64 in [0, 1). V is at most 2^19.
    """
    _check_logits(logits_RV)
    R, V = logits_RV.shape
    assert V <= 1 << 19, f"vocabulary of {V} tokens: sums of probabilities would overflow above {1 << 19}"
    parameters = (temperature_R, top_k_R, top_p_R, min_p_R, uniform_R)
    assert all(x.shape == (R,) and x.is_contiguous() for x in parameters), f"expected one parameter per row, {R}"
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float64)
    assert tuple(x.dtype for x in parameters) == dtypes, f"parameter dtypes are not {dtypes}"
    if not _on_kernels(logits_RV):
        return reference.sample(logits_RV, *parameters)
    token_ids_R = torch.empty(R, dtype=torch.int64)
    cpu.sample(logits_RV, *parameters, token_ids_R)
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
    if not _on_kernels(logits_RV):
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
