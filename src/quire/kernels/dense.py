"""Products with floating-point weights that are packed once.

CPU tensors use the compiled kernels, other tensors plain torch, which is cuBLAS on a GPU. On a GPU, Triton replaces it
if results must be deterministic. The arithmetic of one row never depends on the other rows of a call or on the number
of threads, except with cuBLAS.
Dimensions: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import cpu, gpu, pages, reference, weight_memory
from quire.kernels.guards import check_dtype, check_shape
from quire.kernels.lora import RowAdapters
from quire.kernels.product import check_product, check_result_dtype, check_rows, check_weight, result_memory
from quire.kernels.strides import contiguous_rows
from quire.kernels.weight_memory import WEIGHTS, Memory


@dataclass(frozen=True)
class PackedLinear:
    """A weight in the form that `linear` reads. Only the code that packed it knows the layout.

    `data` is the kernels' panel layout (uint8) if `is_packed`, else the weight [N, K].
    """

    data: Tensor
    N: int
    K: int
    dtype: torch.dtype
    is_packed: bool

    @cached_property
    def panels(self) -> Any:
        """`data` in the form of the kernels."""
        return cpu.packed_weight(self.data, self.N, self.K)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def packs(device: torch.device) -> bool:
    """Whether weights on this device are packed: only the compiled kernels on a CPU do it."""
    return cpu.available() and device.type == "cpu" and not gpu.serves(device)


def pack_linear(weight_NK: Tensor, memory: Memory = WEIGHTS) -> PackedLinear:
    """Turn a weight [N, K] of dtype float32, bfloat16 or float16 into the form that `linear` reads.

    With the compiled kernels this is a multi-threaded copy, which releases pages of a mapped file on the way. The
    caller may free `weight_NK`. Rows may be strided.
    """
    check_weight(weight_NK)
    N, K = weight_NK.shape
    if not packs(weight_NK.device):
        return PackedLinear(weight_NK, N, K, weight_NK.dtype, is_packed=False)
    return pack_linear_bands(pages.row_bands(weight_NK), N, memory)


def pack_linear_bands(bands: Iterable[Tensor], N: int, memory: Memory = WEIGHTS) -> PackedLinear:
    """The packed form of a weight of N rows that comes in bands, on a device that `packs`, in `memory`.

    Rows are in order. Each band except the last has a multiple of PANEL_WIDTH rows.
    """
    bands = iter(bands)
    first = next(bands)
    check_weight(first)
    dtype, K = first.dtype, first.shape[1]

    def bytes_of(band_NK: Tensor) -> int:
        check_weight(band_NK)
        check_shape("a band", band_NK, len(band_NK), K)
        check_dtype("a band", band_NK, dtype)
        return cpu.gemm_packed_bytes(dtype, *band_NK.shape)

    def pack(band_NK: Tensor, to: Tensor) -> None:
        cpu.gemm_pack(contiguous_rows(band_NK), to)

    data = weight_memory.filled(cpu.gemm_packed_bytes(dtype, N, K), chain([first], bands), bytes_of, pack, memory)
    return PackedLinear(data, N, K, dtype, is_packed=True)


def linear(
    x_TK: Tensor,
    packed: PackedLinear,
    bias_N: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    adapters: RowAdapters | None = None,
) -> Tensor:
    """y_TN = x_TK @ weight.T + bias_N, plus the additions of adapters, in float32, rounded once to the output dtype.

    x has the weight's dtype. The output has the dtype of `out`, or `out_dtype`, or else x's. Rows of x and of `out` may
    be strided. The bias may have any of the three dtypes. Plain torch rounds to x's dtype first.
    """
    check_product(x_TK, packed.data, packed.N, packed.K, bias_N, adapters)
    check_dtype("x", x_TK, packed.dtype)
    if adapters is not None and not packed.is_packed:
        return adapters.add_to(partial(linear, packed=packed, bias_N=bias_N), x_TK, out, out_dtype)
    on_gpu = gpu.takes(x_TK) and gpu.is_deterministic()
    if out is None and not (packed.is_packed or on_gpu):
        check_result_dtype(out_dtype or x_TK.dtype)
        return _plain(x_TK, packed, bias_N).to(out_dtype or x_TK.dtype)
    out = result_memory(x_TK, packed.N, out, out_dtype)
    if not (packed.is_packed or on_gpu):
        return out.copy_(_plain(x_TK, packed, bias_N))
    x_TK, bias_N = contiguous_rows(x_TK), None if bias_N is None else contiguous_rows(bias_N)
    if on_gpu:
        gpu.kernels().linear(x_TK, contiguous_rows(packed.data), bias_N, out)
    else:
        cpu.gemm(x_TK, packed.panels, bias_N, out, adapters)
    return out


def _plain(x_TK: Tensor, packed: PackedLinear, bias_N: Tensor | None) -> Tensor:
    return F.linear(x_TK, packed.data, None if bias_N is None else bias_N.to(x_TK.dtype))


def packed_rows(packed: PackedLinear, rows_T: Tensor) -> Tensor:
    """weight[rows_T] -> [T, K] from the packed form: embedding lookup in the matrix of the output projection.

    rows_T: int64, each in [0, N); on a CPU, IndexError for other values.
    """
    check_rows(rows_T, packed.data, packed.dtype)
    if not packed.is_packed:
        reference.check_rows(rows_T, packed.N)
        return F.embedding(rows_T, packed.data)
    out_TK = torch.empty((len(rows_T), packed.K), dtype=packed.dtype)
    cpu.weight_rows(packed.panels, rows_T.contiguous(), out_TK)
    return out_TK
