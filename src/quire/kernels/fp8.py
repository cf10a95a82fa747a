"""Products with FP8 weights (e4m3) and float32 scales.

They use the compiled kernels on CPU, Triton and cuBLAS on GPU, and plain torch otherwise. Activations are not quantized
("weight-only"), unless `quantizes_activations` is true. Only this choice depends on the number of rows. Apart from it,
the arithmetic of one row never depends on the other rows of a call or on the number of threads.

Dimensions: T tokens, K in-features, N out-features, G groups along K.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain

import torch
from torch import Tensor

from quire.formats.weight_format import Fp8Format
from quire.kernels import cpu, gpu, pages, reference, weight_memory
from quire.kernels.fp8_weight import Fp8Weight
from quire.kernels.guards import check_dtype, check_last_stride, check_places, check_shape
from quire.kernels.lora import RowAdapters
from quire.kernels.ops import check_gated, check_norm
from quire.kernels.packed_codes import PackedCodes
from quire.kernels.product import check_product, check_result_dtype, check_rows, check_weight, result_memory
from quire.kernels.strides import contiguous_rows
from quire.kernels.weight_memory import WEIGHTS, Memory

# With fewer rows, reading the weight takes longer than multiplying, so activations need not be FP8. The limit is above
# the largest CUDA graph (256 rows), because padding must not change the arithmetic of a row.
_FEWEST_QUANTIZED_ROWS = 257


@dataclass(frozen=True)
class PackedFp8(PackedCodes[Fp8Weight]):
    """An FP8 weight in the form that `fp8_linear` reads. Only the CPU kernels have panels."""

    group_size: int

    @cached_property
    def panels(self) -> cpu._C.PackedWeight:
        """`data` in the form of the CPU kernels."""
        assert self.data is not None
        return cpu.packed_weight(self.data, self.N, self.K, fp8_group_size=self.group_size)


@dataclass(frozen=True)
class Fp8Rows:
    """Rows of activations that were quantized already, by the norm or the activation before the layer.

    Attributes:
        codes_TK: float8_e4m3fn.
        scales_T1: float32.
        dtype: the dtype of the rows before quantization.
    """

    codes_TK: Tensor
    scales_T1: Tensor
    dtype: torch.dtype


Rows = Tensor | Fp8Rows  # the input of a linear layer


def quantize_fp8(weight_NK: Tensor) -> Fp8Weight:
    """Quantize a weight to FP8 (e4m3) with one scale per row: max |w| / 448. So the largest element becomes 448.

    Codes are the nearest ones (ties to even). A row with an element that is not finite gets the scale NaN.

    Args:
        weight_NK: float32, bfloat16 or float16; rows may be strided.
    """
    check_weight(weight_NK)
    on_gpu = gpu.takes(weight_NK)
    if not (on_gpu or cpu.takes(weight_NK)):
        return reference.quantize_fp8(weight_NK)
    weight_NK, group_size = contiguous_rows(weight_NK), Fp8Format(None).group_size_of(weight_NK.shape[1])
    if on_gpu:
        codes_NK, scales_N1 = gpu.kernels().quantize_rows(weight_NK)
        return Fp8Weight(codes_NK, scales_N1, group_size)
    codes_NK = pages.scratch(tuple(weight_NK.shape), torch.float8_e4m3fn)
    scales_N1 = torch.empty((weight_NK.shape[0], 1), dtype=torch.float32)
    cpu.fp8_quantize(weight_NK, codes_NK, scales_N1)
    return Fp8Weight(codes_NK, scales_N1, group_size)


def pack_fp8(weight: Fp8Weight, memory: Memory = WEIGHTS) -> PackedFp8:
    """Turn a weight into the form that `fp8_linear` reads. For the CPU kernels it is copied to `memory`."""
    return pack_fp8_bands([weight], weight.shape[0], memory)


def pack_fp8_bands(bands: Iterable[Fp8Weight], N: int, memory: Memory = WEIGHTS) -> PackedFp8:
    """Like `pack_fp8`, for a weight of N rows that comes in bands of rows. The CPU kernels need one band at a time.

    The bands come in the order of rows. Each band except the last has a multiple of PANEL_WIDTH rows. Raises ValueError
    if the bands do not fit each other.
    """
    bands = iter(bands)
    first = next(bands)
    group_size, (_, K), device = first.group_size, first.shape, first.codes_NK.device
    bands = chain([first], bands)
    del first  # nothing else may hold it, because the next band is made in its memory
    if gpu.serves(device):
        weight = Fp8Weight.joined([*bands])
        weight = Fp8Weight(contiguous_rows(weight.codes_NK), weight.scales_NG.contiguous(), group_size)
        return PackedFp8(None, weight, N, K, group_size)
    if not (cpu.available() and device.type == "cpu"):
        return PackedFp8(None, Fp8Weight.joined([*bands]), N, K, group_size)

    def bytes_of(band: Fp8Weight) -> int:
        check_shape("codes of a band", band.codes_NK, band.shape[0], K)
        if band.group_size != group_size:
            raise ValueError(f"group_size of a band is {band.group_size}, expected {group_size} like the first")
        return cpu.fp8_packed_bytes(*band.shape, group_size)

    def pack(band: Fp8Weight, to: Tensor) -> None:
        cpu.fp8_pack(contiguous_rows(band.codes_NK), band.scales_NG.contiguous(), group_size, to)

    data = weight_memory.filled(cpu.fp8_packed_bytes(N, K, group_size), bands, bytes_of, pack, memory)
    return PackedFp8(data, None, N, K, group_size)


def rms_norm_to_fp8(
    x_TD: Tensor, residual_TD: Tensor | None, multiplier: float, weight_D: Tensor, eps: float, weight_offset: float
) -> Fp8Rows:
    """On a GPU: ops.rms_norm (with a residual, ops.add_rms_norm, which changes it) and quantization in one kernel.

    The bits are those of the two steps.
    """
    check_norm(x_TD, residual_TD, weight_D, None)
    codes_TD, scales_T1 = gpu.kernels().rms_norm_to_fp8(x_TD, residual_TD, multiplier, weight_D, eps, weight_offset)
    return Fp8Rows(codes_TD, scales_T1, x_TD.dtype)


def gated_activation_to_fp8(name: str, x_T2I: Tensor) -> Fp8Rows:
    """On a GPU: ops.gated_activation and quantization in one kernel, with the bits of the two steps."""
    check_gated(name, x_T2I)
    check_last_stride(x=x_T2I)
    codes_TI, scales_T1 = gpu.kernels().gated_activation_to_fp8(name, x_T2I)
    return Fp8Rows(codes_TI, scales_T1, x_T2I.dtype)


def fp8_linear(
    x_TK: Rows,
    packed: PackedFp8,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    adapters: RowAdapters | None = None,
) -> Tensor:
    """y_TN = x @ weight.T + bias_N, plus the additions of adapters. Groups are summed in float32 and then scaled.

    The result is rounded once. If `quantizes_activations` is true, x is quantized first, with one scale per row.

    Args:
        x_TK: float32, bfloat16 or float16 rows, which may be strided; or Fp8Rows, if the caller has quantized them.
        bias_N: float32, bfloat16 or float16; None: there is no bias.
        out_dtype: the dtype of the result; None: x's.
        out: memory for the result, if x is not quantized; None: new memory.
        adapters: see lora.RowAdapters; None: no row has an adapter.

    Raises:
        ValueError, TypeError: a shape, a stride, a device or a dtype does not fit.
    """
    if isinstance(x_TK, Fp8Rows):
        assert adapters is None, "rows that are quantized already"
        return _product_of_codes(x_TK, packed, bias_N, out_dtype or x_TK.dtype)
    check_product(x_TK, packed.tensor, packed.N, packed.K, bias_N, adapters)
    if adapters is not None and packed.data is None:
        return adapters.add_to(partial(fp8_linear, packed=packed, bias_N=bias_N), x_TK, out, out_dtype)
    on_gpu = gpu.takes(x_TK)
    if packed.data is None and not on_gpu:
        assert packed.weight is not None
        out_TN = result_memory(x_TK, packed.N, out, out_dtype)
        return out_TN.copy_(reference.fp8_linear(x_TK, packed.weight, bias_N, out_TN.dtype))
    x_TK = contiguous_rows(x_TK)
    bias_N = None if bias_N is None else contiguous_rows(bias_N)
    if on_gpu and quantizes_activations(x_TK, packed, out_dtype or x_TK.dtype):
        codes_TK, scales_T1 = gpu.kernels().quantize_rows(x_TK)
        return _product_of_codes(Fp8Rows(codes_TK, scales_T1, x_TK.dtype), packed, bias_N, out_dtype or x_TK.dtype)
    out_TN = result_memory(x_TK, packed.N, out, out_dtype)
    if on_gpu:
        assert packed.weight is not None
        codes_NK, scales_NG = packed.weight.codes_NK, packed.weight.scales_NG
        gpu.kernels().fp8_linear(x_TK, codes_NK, scales_NG, packed.group_size, bias_N, out_TN)
        return out_TN
    cpu.gemm(x_TK, packed.panels, bias_N, out_TN, adapters)
    return out_TN


def quantizes_activations(x_TK: Tensor, packed: PackedFp8, out_dtype: torch.dtype) -> bool:
    """Whether `fp8_linear` on a GPU rounds rows of x to FP8, and multiplies codes by codes.

    It needs tensor cores with FP8 (sm_89 and later), a scale per output channel (torch._scaled_mm takes no other scales
    of our checkpoints), a result in bfloat16, sizes in multiples of 16, and many rows. It is false if results must be
    deterministic, because it depends on the number of rows.

    Args:
        x_TK: only its number of rows and its device matter.
    """
    return (
        x_TK.shape[0] >= _FEWEST_QUANTIZED_ROWS
        and not gpu.is_deterministic()
        and packed.group_size >= packed.K
        and out_dtype == torch.bfloat16
        and packed.N % 16 == packed.K % 16 == 0
        and _multiplies_fp8(x_TK.device)
    )


@cache
def _multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _product_of_codes(rows: Fp8Rows, packed: PackedFp8, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if packed.weight is None:
        raise TypeError("x are Fp8Rows, expected a Tensor: the CPU kernels multiply no codes with codes")
    check_places(x=rows.codes_TK, x_scales=rows.scales_T1, weight=packed.weight.codes_NK, bias=bias_N)
    T = len(rows.codes_TK)
    check_shape("x", rows.codes_TK, T, packed.K)
    check_dtype("x", rows.codes_TK, torch.float8_e4m3fn)
    check_shape("x_scales", rows.scales_T1, T, 1)
    check_dtype("x_scales", rows.scales_T1, torch.float32)
    if bias_N is not None:
        check_shape("bias", bias_N, packed.N)
    check_result_dtype(out_dtype)
    bias_N = None if bias_N is None else bias_N.to(out_dtype)
    return torch._scaled_mm(
        rows.codes_TK,
        packed.weight.codes_NK.T,
        scale_a=rows.scales_T1,
        scale_b=packed.weight.scales_NG.T,
        bias=bias_N,
        out_dtype=out_dtype,
        use_fast_accum=True,
    )


def fp8_rows(packed: PackedFp8, rows_T: Tensor, dtype: torch.dtype) -> Tensor:
    """weight[rows_T], [T, K]: float32 products of scale and code, rounded to dtype.

    Args:
        rows_T: int64, each in [0, N). On a CPU, other values raise IndexError.
    """
    check_rows(rows_T, packed.tensor, dtype)
    if packed.data is None:
        assert packed.weight is not None
        reference.check_rows(rows_T, packed.N)
        return reference.dequantize_fp8(packed.weight.rows(rows_T)).to(dtype)
    return cpu.weight_rows(packed.panels, rows_T, packed.K, dtype)
