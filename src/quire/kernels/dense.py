"""Products with floating-point weights that are packed once.

CPU tensors use the compiled kernels. Other tensors use plain torch, which is cuBLAS on a GPU; if results must be
deterministic, Triton replaces cuBLAS. The arithmetic of one row never depends on the other rows of a call or on the
number of threads, except with cuBLAS.

Dimensions: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain

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
    """A weight in the form that `linear` reads. Only the code that has packed it knows the layout.

    Attributes:
        data: the kernels' panel layout, uint8, if `is_packed`; else the weight [N, K].
    """

    data: Tensor
    N: int
    K: int
    dtype: torch.dtype
    is_packed: bool

    @cached_property
    def panels(self) -> cpu._C.PackedWeight:
        """The weight as the kernels take it: see cpu.packed_weight."""
        return cpu.packed_weight(self.data, self.N, self.K)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def packs(device: torch.device) -> bool:
    """Whether weights on this device are packed. Only the compiled kernels on a CPU need packed weights."""
    return cpu.available() and device.type == "cpu" and not gpu.serves(device)


def pack_linear(weight_NK: Tensor, memory: Memory = WEIGHTS) -> PackedLinear:
    """Turn a weight [N, K] of dtype float32, bfloat16 or float16 into the form that `linear` reads.

    Rows may be strided. With the compiled kernels, the weight is copied by several threads, and pages of a mapped file
    are released after they are read. Then the caller may free `weight_NK`. Raises TypeError for another dtype, and
    ValueError for a weight without rows or columns.

    Args:
        memory: provides the memory of the packed weight.
    """
    check_weight(weight_NK)
    N, K = weight_NK.shape
    if not packs(weight_NK.device):
        return PackedLinear(weight_NK, N, K, weight_NK.dtype, is_packed=False)
    return pack_linear_bands(pages.row_bands(weight_NK), N, memory)


def pack_linear_bands(bands: Iterable[Tensor], N: int, memory: Memory = WEIGHTS) -> PackedLinear:
    """Like `pack_linear`, for a weight of N rows that comes in bands of rows. The device must be one that `packs`.

    The bands come in the order of rows. Each band except the last has a multiple of PANEL_WIDTH rows.
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

    Plain torch rounds to x's dtype first.

    Args:
        x_TK: has the weight's dtype; rows may be strided.
        bias_N: float32, bfloat16 or float16; None: there is no bias.
        out: memory for the result; rows may be strided. None: new memory.
        out_dtype: the dtype of the result without `out`; None: x's.
        adapters: see lora.RowAdapters; None: no row has an adapter.

    Raises:
        ValueError, TypeError: a shape, a stride, a device or a dtype does not fit.
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
    """weight[rows_T], [T, K] in the weight's dtype, from the packed form.

    It is the embedding lookup of models whose embeddings are the weight of the output projection.

    Args:
        rows_T: int64, each in [0, N). On a CPU, other values raise IndexError.
    """
    check_rows(rows_T, packed.data, packed.dtype)
    if not packed.is_packed:
        reference.check_rows(rows_T, packed.N)
        return F.embedding(rows_T, packed.data)
    return cpu.weight_rows(packed.panels, rows_T, packed.K, packed.dtype)
