"""The compiled CPU kernels: thin wrappers that turn tensors into addresses. The only file that calls them.

Wrappers trust the shapes, dtypes and strides of their arguments: ops, dense, grouped and fp8 check them. Numbers that
lead out of memory are refused below, in csrc/bindings_*.cpp.

Dimensions: M rows, N out-features, K in-features; those of the other ops are in ops.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire import envs
from quire.kernels import extension
from quire.kernels.grouped_weight import GroupedWeight
from quire.weight_format import GroupedFormat

_C: Any = extension.C  # None: installed without a compiler; ops run on plain torch

# enum class DType of csrc/include/quire/dtype.h
DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# enum class CacheType of csrc/include/quire/dtype.h: codes of the KV cache; 0 = elements of the model's dtype
CACHE_CODES: dict[torch.dtype, int] = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.int8: 3}
# enum class Activation of csrc/include/quire/kernels/activation.h
ACTIVATION_CODES: dict[str, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
# enum class GroupNumbers of csrc/include/quire/kernels/grouped_layout.h
GROUP_NUMBERS_CODES: dict[str | None, int] = {None: 0, "float32": 1, "float16": 2, "int8": 3, "uint8": 4}
# kMaxHeadDim of csrc/kernels/attention_tile.h; above it ops run on plain torch
MAX_HEAD_DIM = 256
_PEAK_ROUNDS = 20_000  # of multiply-adds per reading, under a millisecond each


def _load() -> bool:
    if not extension.is_used():
        return False
    if (isa := extension.wished_isa()) is not None:
        _C.set_isa(isa)
    if envs.NUM_THREADS.get() > 0:
        _C.set_num_threads(envs.NUM_THREADS.get())
    return True


_available = _load()
_recording = threading.RLock()  # one thread at a time


def available() -> bool:
    """True when ops on CPU tensors run on the compiled kernels (built, and QUIRE_FORCE_REFERENCE not set at import)."""
    return _available


def takes(x: Tensor) -> bool:
    """True when ops on this tensor run on the compiled kernels."""
    return _available and x.device.type == "cpu" and x.dtype in DTYPE_CODES


class _RecordedExtension:
    """Stands for the extension while calls of this thread are recorded; those of others are only made."""

    def __init__(self, recorded: Any, calls: list[Callable[[], Any]]) -> None:
        self._recorded, self._calls, self._thread = recorded, calls, threading.get_ident()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel = getattr(self._recorded, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._calls.append(partial(kernel, *args, **kwargs))
            return kernel(*args, **kwargs)

        return call


@contextmanager
def recorded_calls() -> Iterator[list[Callable[[], Any]]]:
    """Every kernel call of the block, made and appended to a list: to be repeated on the same addresses."""
    global _C
    calls: list[Callable[[], Any]] = []
    with _recording:
        recorded, _C = _C, _RecordedExtension(_C, calls)
        try:
            yield calls
        finally:
            _C = recorded


def isas() -> list[str]:
    """Names of the instruction sets this CPU can run, worst first; empty without the extension."""
    return list(_C.isas()) if _available else []


def isa() -> str:
    """Name of the active instruction set; "none" without the extension."""
    return str(_C.isa()) if _available else "none"


def set_isa(name: str) -> None:
    """Run every kernel on instruction set `name` from now on. ValueError if this CPU does not have it."""
    if not _available:
        raise ValueError(f"cannot select instruction set {name!r}: the compiled kernels are not in use")
    _C.set_isa(name)


def get_num_threads() -> int:
    """Threads of the kernels' pool, the calling one included."""
    return int(_C.num_threads()) if _available else torch.get_num_threads()


def set_num_threads(n: int) -> None:
    """Set the size of the kernels' pool (the default is the physical cores allowed by affinity and cgroup quota)."""
    if n < 1:
        raise ValueError(f"number of kernel threads must be at least 1, got {n}")
    if _available:
        _C.set_num_threads(n)


def default_num_threads() -> int:
    """Physical cores this process may use: affinity without hyper-thread siblings, limited by the cgroup CPU quota."""
    return int(_C.default_num_threads()) if _available else torch.get_num_threads()


def gemm_packed_bytes(dtype: torch.dtype, N: int, K: int) -> int:
    """Bytes of N rows in the panel layout of csrc/include/quire/kernels/gemm.h."""
    return int(_C.gemm_packed_bytes(DTYPE_CODES[dtype], N, K))


def gemm_pack(weight_NK: Tensor, packed: Tensor) -> None:
    """Copy a weight (rows may be strided) into that layout, to the beginning of `packed`."""
    code = DTYPE_CODES[weight_NK.dtype]
    _C.gemm_pack(weight_NK.data_ptr(), code, *weight_NK.shape, weight_NK.stride(0), packed.data_ptr())


def gemm_rows(packed: Tensor, N: int, rows_T: Tensor, out_TK: Tensor) -> None:
    """See dense.packed_rows; rows (int64) and out are contiguous. IndexError for a row that is not in [0, N)."""
    count, K = out_TK.shape
    _C.gemm_rows(packed.data_ptr(), DTYPE_CODES[out_TK.dtype], N, K, rows_T.data_ptr(), count, out_TK.data_ptr())


def gemm(
    x_MK: Tensor,
    packed: Tensor,
    N: int,
    bias_N: Tensor | None,
    out_MN: Tensor,
    form: tuple[int, ...] = (),
    order_K: Tensor | None = None,
    fp8_group_size: int = 0,
) -> None:
    """out = x @ weight.T + bias; rows of x and out may be strided, the last dimension is contiguous.

    `form` (of `grouped_form`) and `order_K` (int32) of a grouped integer weight, `fp8_group_size` of
    an FP8 one; without: the weight has x's dtype.
    """
    M, K = x_MK.shape
    bias_address, bias_code = (0, 0) if bias_N is None else (bias_N.data_ptr(), DTYPE_CODES[bias_N.dtype])
    _C.gemm(
        x_MK.data_ptr(),
        DTYPE_CODES[x_MK.dtype],
        x_MK.stride(0),
        packed.data_ptr(),
        M,
        N,
        K,
        bias_address,
        bias_code,
        out_MN.data_ptr(),
        DTYPE_CODES[out_MN.dtype],
        out_MN.stride(0),
        *form,
        order=_address(order_K),
        fp8_group_size=fp8_group_size,
    )


def grouped_form(grouped_format: GroupedFormat) -> tuple[int, ...]:
    """A format whose group size is given, as struct GroupedForm of csrc/include/quire/kernels/grouped_layout.h."""
    assert grouped_format.group_size is not None
    scales, offsets = GROUP_NUMBERS_CODES[grouped_format.scales], GROUP_NUMBERS_CODES[grouped_format.offsets]
    return grouped_format.bits, grouped_format.group_size, scales, offsets, grouped_format.super_size


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def fp8_quantize(weight_NK: Tensor, codes_NK: Tensor, scales_N: Tensor) -> None:
    """See fp8.quantize_fp8."""
    address, code, stride = weight_NK.data_ptr(), DTYPE_CODES[weight_NK.dtype], weight_NK.stride(0)
    _C.gemm_fp8_quantize(address, code, stride, *weight_NK.shape, codes_NK.data_ptr(), scales_N.data_ptr())


def fp8_packed_bytes(N: int, K: int, group_size: int) -> int:
    """Bytes of N rows in the panel layout of csrc/include/quire/kernels/gemm_fp8.h."""
    return int(_C.gemm_fp8_packed_bytes(N, K, group_size))


def fp8_pack(codes_NK: Tensor, scales_NG: Tensor, group_size: int, packed: Tensor) -> None:
    """Copy an FP8 weight into that layout, to the beginning of `packed`."""
    N, K = codes_NK.shape
    _C.gemm_fp8_pack(codes_NK.data_ptr(), codes_NK.stride(0), scales_NG.data_ptr(), N, K, group_size, packed.data_ptr())


def fp8_rows(packed: Tensor, N: int, group_size: int, rows_T: Tensor, out_TK: Tensor) -> None:
    """See fp8.fp8_rows; rows and out are contiguous. IndexError for a row that is not in [0, N)."""
    (count, K), code = out_TK.shape, DTYPE_CODES[out_TK.dtype]
    _C.gemm_fp8_rows(packed.data_ptr(), N, K, group_size, rows_T.data_ptr(), count, code, out_TK.data_ptr())


def grouped_quantize(weight_NK: Tensor, bits: int, group_size: int, codes_NK: Tensor, scales_NG: Tensor) -> None:
    """See grouped.quantize_grouped."""
    _C.gemm_grouped_quantize(
        weight_NK.data_ptr(),
        DTYPE_CODES[weight_NK.dtype],
        weight_NK.stride(0),
        *weight_NK.shape,
        bits,
        group_size,
        codes_NK.data_ptr(),
        scales_NG.data_ptr(),
    )


def grouped_packed_bytes(N: int, K: int, form: tuple[int, ...]) -> int:
    """Bytes of N rows in the panel layout of csrc/include/quire/kernels/grouped_layout.h; `form` of `grouped_form`."""
    return int(_C.gemm_grouped_packed_bytes(N, K, *form))


def grouped_pack(weight: GroupedWeight, packed: Tensor) -> None:
    """Copy a grouped weight into that layout, to the beginning of `packed`.

    Its tensors are contiguous, but for the rows of the codes.
    """
    _C.gemm_grouped_pack(
        weight.codes_NK.data_ptr(),
        weight.codes_NK.stride(0),
        weight.scales_NG.data_ptr(),
        _address(weight.zeros_NG if weight.minima_NG is None else weight.minima_NG),
        _address(weight.super_scales_NS),
        _address(weight.super_minima_NS),
        *weight.shape,
        packed.data_ptr(),
        *grouped_form(weight.format),
    )


def grouped_rows(
    packed: Tensor, N: int, form: tuple[int, ...], order_K: Tensor | None, rows_T: Tensor, out_TK: Tensor
) -> None:
    """See grouped.grouped_rows; rows and out are contiguous. IndexError for a row that is not in [0, N)."""
    count, K = out_TK.shape
    code = DTYPE_CODES[out_TK.dtype]
    _C.gemm_grouped_rows(
        packed.data_ptr(), N, K, _address(order_K), rows_T.data_ptr(), count, code, out_TK.data_ptr(), *form
    )


def read_bandwidth(num_bytes: int = 1 << 29, repeats: int = 3) -> float:
    """Best measured bytes per second of reading memory once, over all kernel threads. Needs the extension."""
    return float(_C.read_bandwidth(num_bytes, repeats))


def peak_flops(dtype: torch.dtype, repeats: int = 3) -> float:
    """Best measured multiply-add rate (FLOP/s) of the active instruction set on registers alone, all kernel threads.

    bfloat16 uses AMX tiles or vdpbf16ps where active; every other dtype float32. Needs the extension.
    """
    return max(float(_C.peak_flops(DTYPE_CODES[dtype], _PEAK_ROUNDS)) for _ in range(repeats))


def peak_int8_ops(repeats: int = 3) -> float:
    """The same for 8-bit integers (multiplications and additions per second), as grouped weights are multiplied.

    AMX tiles, vpdpbusd, or 16-bit multiply-adds. Needs the extension.
    """
    return max(float(_C.peak_int8_ops(_PEAK_ROUNDS)) for _ in range(repeats))


def advise_huge_pages(x: Tensor) -> None:
    """Ask the operating system to back a large contiguous CPU tensor that nobody has written yet with huge pages.

    A hint that may be ignored; nothing without the extension.
    """
    if _available:
        _C.advise_huge_pages(x.data_ptr(), x.nbytes)


def rms_norm(
    x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, weight_offset: float, out_TD: Tensor
) -> None:
    """See ops.rms_norm and ops.add_rms_norm (residual given). Rows may be strided."""
    residual, residual_stride = (0, 0) if residual_TD is None else (residual_TD.data_ptr(), residual_TD.stride(0))
    _C.rms_norm(
        DTYPE_CODES[x_TD.dtype],
        x_TD.data_ptr(),
        x_TD.stride(0),
        residual,
        residual_stride,
        weight_D.data_ptr(),
        DTYPE_CODES[weight_D.dtype],
        eps,
        weight_offset,
        out_TD.data_ptr(),
        out_TD.stride(0),
        *x_TD.shape,
    )


def rope_and_cache(
    q_THE: Tensor,
    k_TGE: Tensor,
    v_TGE: Tensor,
    positions_T: Tensor,
    cos_sin_PR: Tensor | None,
    slot_mapping_T: Tensor,
    k_cache_BGPE: Tensor,
    v_cache_BGPE: Tensor,
    q_norm_weight_E: Tensor | None,
    k_norm_weight_E: Tensor | None,
    norm_eps: float,
    norm_weight_offset: float,
    k_scales_BGP: Tensor | None,
    v_scales_BGP: Tensor | None,
) -> None:
    """See ops.rope_and_cache."""
    cos_sin, (num_positions, rotary_dim) = (
        (0, (0, 0)) if cos_sin_PR is None else (cos_sin_PR.data_ptr(), cos_sin_PR.shape)
    )
    norm_weight_E = q_norm_weight_E if q_norm_weight_E is not None else k_norm_weight_E
    _C.rope_and_cache(
        DTYPE_CODES[q_THE.dtype],
        CACHE_CODES.get(k_cache_BGPE.dtype, 0),
        q_THE.data_ptr(),
        q_THE.stride(0),
        q_THE.stride(1),
        k_TGE.data_ptr(),
        k_TGE.stride(0),
        k_TGE.stride(1),
        v_TGE.data_ptr(),
        v_TGE.stride(0),
        v_TGE.stride(1),
        positions_T.data_ptr(),
        cos_sin,
        rotary_dim,
        num_positions,
        slot_mapping_T.data_ptr(),
        k_cache_BGPE.data_ptr(),
        k_cache_BGPE.stride(0),
        k_cache_BGPE.stride(1),
        v_cache_BGPE.data_ptr(),
        v_cache_BGPE.stride(0),
        v_cache_BGPE.stride(1),
        _address(k_scales_BGP),
        _address(v_scales_BGP),
        0 if k_scales_BGP is None else k_scales_BGP.stride(0),
        q_THE.shape[0],
        q_THE.shape[1],
        k_TGE.shape[1],
        q_THE.shape[2],
        k_cache_BGPE.shape[2],
        k_cache_BGPE.shape[0],
        _address(q_norm_weight_E),
        _address(k_norm_weight_E),
        DTYPE_CODES[q_THE.dtype if norm_weight_E is None else norm_weight_E.dtype],
        norm_eps,
        norm_weight_offset,
    )


def paged_attention(
    q_THE: Tensor,
    k_cache_BGPE: Tensor,
    v_cache_BGPE: Tensor,
    k_scales_BGP: Tensor | None,
    v_scales_BGP: Tensor | None,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    cu_seqlens_q_S1: Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    out_THE: Tensor,
) -> None:
    """See ops.paged_attention."""
    _C.paged_attention(
        DTYPE_CODES[q_THE.dtype],
        CACHE_CODES.get(k_cache_BGPE.dtype, 0),
        q_THE.data_ptr(),
        q_THE.stride(0),
        q_THE.stride(1),
        k_cache_BGPE.data_ptr(),
        k_cache_BGPE.stride(0),
        k_cache_BGPE.stride(1),
        v_cache_BGPE.data_ptr(),
        v_cache_BGPE.stride(0),
        v_cache_BGPE.stride(1),
        _address(k_scales_BGP),
        _address(v_scales_BGP),
        0 if k_scales_BGP is None else k_scales_BGP.stride(0),
        k_cache_BGPE.shape[0],
        block_tables_SM.data_ptr(),
        block_tables_SM.stride(0),
        block_tables_SM.shape[1],
        seq_lens_S.data_ptr(),
        cu_seqlens_q_S1.data_ptr(),
        q_THE.shape[0],
        seq_lens_S.shape[0],
        q_THE.shape[1],
        k_cache_BGPE.shape[1],
        q_THE.shape[2],
        k_cache_BGPE.shape[2],
        scale,
        sliding_window,
        soft_cap,
        out_THE.data_ptr(),
        out_THE.stride(0),
        out_THE.stride(1),
    )


def gated_activation(name: str, x_T2I: Tensor, out_TI: Tensor) -> None:
    """out = activation(first half of x) * second half; `name` is a key of ACTIVATION_CODES. Rows may be strided."""
    _C.gated_activation(
        DTYPE_CODES[x_T2I.dtype],
        ACTIVATION_CODES[name],
        x_T2I.data_ptr(),
        x_T2I.stride(0),
        out_TI.data_ptr(),
        out_TI.stride(0),
        *out_TI.shape,
    )


def greedy(logits_RV: Tensor, token_ids_R: Tensor) -> None:
    """See ops.greedy."""
    _C.greedy(logits_RV.data_ptr(), logits_RV.stride(0), *logits_RV.shape, token_ids_R.data_ptr())


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    uniform_R: Tensor,
    token_ids_R: Tensor,
) -> None:
    """See ops.sample."""
    _C.sample(
        logits_RV.data_ptr(),
        logits_RV.stride(0),
        *logits_RV.shape,
        temperature_R.data_ptr(),
        top_k_R.data_ptr(),
        top_p_R.data_ptr(),
        min_p_R.data_ptr(),
        uniform_R.data_ptr(),
        token_ids_R.data_ptr(),
    )


def logprobs(
    logits_RV: Tensor,
    token_ids_R: Tensor,
    token_logprobs_R: Tensor,
    ranks_R: Tensor,
    top_ids_RN: Tensor,
    top_logprobs_RN: Tensor,
) -> None:
    """See ops.logprobs."""
    _C.logprobs(
        logits_RV.data_ptr(),
        logits_RV.stride(0),
        *logits_RV.shape,
        token_ids_R.data_ptr(),
        top_ids_RN.shape[1],
        token_logprobs_R.data_ptr(),
        ranks_R.data_ptr(),
        top_ids_RN.data_ptr(),
        top_logprobs_RN.data_ptr(),
    )
