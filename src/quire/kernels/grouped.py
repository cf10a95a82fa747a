"""Products with integer weights in groups along K: compiled kernels on CPU, Triton on GPU, plain torch otherwise.

The arithmetic of one row never depends on the other rows of a call or on the number of threads.

Dimensions: T tokens, K in-features, N out-features, G groups along K.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from quire.formats.weight_format import GroupedFormat
from quire.kernels import cpu, gpu, pages, reference, weight_memory
from quire.kernels.grouped_panels import rows_of_panels, to_panels
from quire.kernels.grouped_weight import GroupedWeight, check_groups
from quire.kernels.guards import check_shape
from quire.kernels.lora import RowAdapters
from quire.kernels.packed_codes import PackedCodes
from quire.kernels.product import check_product, check_rows, check_weight, result_memory
from quire.kernels.strides import contiguous_rows
from quire.kernels.weight_memory import WEIGHTS, Memory


@dataclass(frozen=True)
class PackedGrouped(PackedCodes[GroupedWeight]):
    """An integer weight in the form that `grouped_linear` reads. CPU kernels and GPU kernels share its panel layout.

    Attributes:
        order_K: the order of the columns, int32; None: they are in their natural order.
    """

    order_K: Tensor | None
    format: GroupedFormat

    @cached_property
    def panels(self) -> cpu._C.PackedWeight:
        """`data` in the form of the CPU kernels."""
        assert self.data is not None
        form = cpu.grouped_form(self.format)
        return cpu.packed_weight(self.data, self.N, self.K, form=form, order_K=self.order_K)

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self.order_K is None else self.order_K.nbytes)


def quantize_grouped(weight_NK: Tensor, bits: int, group_size: int) -> GroupedWeight:
    """Quantize a weight to the nearest codes, with a float32 scale per group. The zero is 128 (8 bits) or 8 (4 bits).

    With 8 bits, a scale is max |w| / 127. With 4 bits, the element of largest magnitude gets code 0, so that all 16
    codes are used, as in GGUF's Q4_0.

    Args:
        weight_NK: float32, bfloat16 or float16; rows may be strided.

    Raises ValueError for other bits or an illegal group size.
    """
    check_weight(weight_NK)
    check_groups(bits, group_size)
    if bits not in (4, 8):
        raise ValueError(f"bits are {bits}, expected 4 or 8")
    if not cpu.takes(weight_NK):
        return reference.quantize_grouped(weight_NK, bits, group_size)
    weight_NK = contiguous_rows(weight_NK)
    N, K = weight_NK.shape
    codes_NK = pages.scratch((N, K), torch.uint8)
    scales_NG = torch.empty((N, -(-K // group_size)), dtype=torch.float32)
    cpu.grouped_quantize(weight_NK, bits, group_size, codes_NK, scales_NG)
    return GroupedWeight(codes_NK=codes_NK, bits=bits, group_size=group_size, scales_NG=scales_NG)


def pack_grouped(weight: GroupedWeight, memory: Memory = WEIGHTS) -> PackedGrouped:
    """Turn a weight into the form that `grouped_linear` reads, on its device. For the kernels it is copied.

    Args:
        memory: provides the memory of the copy for the CPU kernels.
    """
    return pack_grouped_bands([weight], weight.shape[0], memory)


def pack_grouped_bands(bands: Iterable[GroupedWeight], N: int, memory: Memory = WEIGHTS) -> PackedGrouped:
    """Like `pack_grouped`, for a weight of N rows that comes in bands of rows. The CPU kernels need one band at a time.

    The bands come in the order of rows. Each band except the last has a multiple of PANEL_WIDTH rows. Raises ValueError
    if the bands do not fit each other.
    """
    bands = iter(bands)
    first = next(bands)
    (_, K), form, device = first.shape, first.format, first.codes_NK.device
    order_K = None
    if first.order_K is not None:
        columns = first.order_K.sort().values
        if not torch.equal(columns, torch.arange(K, device=device)):
            seen = f"{K} columns from {columns[0]} to {columns[-1]}"
            raise ValueError(f"order_K has {seen}, expected each of 0 to {K - 1} once")
        order_K = first.order_K.to(torch.int32).contiguous()
    bands = chain([first], bands)
    del first  # nothing else may hold it, because the next band is made in its memory
    if gpu.serves(device):
        return PackedGrouped(to_panels(GroupedWeight.joined([*bands])), None, N, K, order_K, form)
    if not (cpu.available() and device.type == "cpu"):
        return PackedGrouped(None, GroupedWeight.joined([*bands]), N, K, None, form)
    codes = cpu.grouped_form(form)

    def bytes_of(band: GroupedWeight) -> int:
        check_shape("codes of a band", band.codes_NK, band.shape[0], K)
        if band.format != form:
            raise ValueError(f"the format of a band is {band.format}, expected {form} like the first")
        return cpu.grouped_packed_bytes(*band.shape, codes)

    def pack(band: GroupedWeight, to: Tensor) -> None:
        cpu.grouped_pack(_contiguous(band), to)

    data = weight_memory.filled(cpu.grouped_packed_bytes(N, K, codes), bands, bytes_of, pack, memory)
    return PackedGrouped(data, None, N, K, order_K, form)


def _contiguous(weight: GroupedWeight) -> GroupedWeight:
    """The weight with contiguous tensors; rows of the codes may stay strided."""
    tensors: dict[str, Any] = {
        name: x.contiguous()
        for name, x in vars(weight).items()
        if isinstance(x, Tensor) and not (name == "codes_NK" and x.stride(1) == 1)
    }
    return replace(weight, **tensors)


def grouped_linear(
    x_TK: Tensor,
    packed: PackedGrouped,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    adapters: RowAdapters | None = None,
) -> Tensor:
    """y_TN = x @ weight.T + bias_N, plus the additions of adapters in float32, rounded once.

    On a CPU, rows of x are quantized to 8 bits. There is one scale per row and group of the weight, or super-group if
    the weight has factors. Integer sums within a group are exact. Then they are added in float32, in order. On a GPU, x
    is not quantized, the weight is rounded to x's dtype as in `grouped_rows`, and sums are float32. If a row of x has a
    value that is not finite, its row of the output has no finite number; on a CPU all are NaN.

    Args:
        x_TK: float32, bfloat16 or float16; rows may be strided.
        bias_N: float32, bfloat16 or float16; None: there is no bias.
        out_dtype: the dtype of the result; None: x's.
        out: memory for the result; None: new memory.
        adapters: see lora.RowAdapters; None: no row has an adapter.

    Raises:
        ValueError, TypeError: a shape, a stride, a device or a dtype does not fit.
    """
    check_product(x_TK, packed.tensor, packed.N, packed.K, bias_N, adapters)
    if adapters is not None and (packed.data is None or gpu.takes(x_TK)):
        return adapters.add_to(partial(grouped_linear, packed=packed, bias_N=bias_N), x_TK, out, out_dtype)
    out_TN = result_memory(x_TK, packed.N, out, out_dtype)
    if packed.data is None:
        assert packed.weight is not None
        return out_TN.copy_(reference.grouped_linear(x_TK, packed.weight, bias_N, out_TN.dtype))
    x_TK = contiguous_rows(x_TK)
    bias_N = None if bias_N is None else contiguous_rows(bias_N)
    if gpu.takes(x_TK):
        x_TK = x_TK if packed.order_K is None else x_TK.index_select(1, packed.order_K)
        gpu.kernels().grouped_linear(x_TK, packed.data, packed.N, packed.format, bias_N, out_TN)
        return out_TN
    cpu.gemm(x_TK, packed.panels, bias_N, out_TN, adapters)
    return out_TN


def grouped_rows(packed: PackedGrouped, rows_T: Tensor, dtype: torch.dtype) -> Tensor:
    """weight[rows_T], [T, K], computed in float32 and rounded to dtype.

    Args:
        rows_T: int64, each in [0, N). On a CPU, other values raise IndexError.
    """
    check_rows(rows_T, packed.tensor, dtype)
    if packed.data is not None and cpu.available() and packed.data.device.type == "cpu":
        return cpu.weight_rows(packed.panels, rows_T, packed.K, dtype)
    reference.check_rows(rows_T, packed.N)
    return reference.dequantize_grouped(_unpacked_rows(packed, rows_T)).to(dtype)


def unpack_grouped(packed: PackedGrouped) -> GroupedWeight:
    """The reverse of `pack_grouped`, in plain torch."""
    return _unpacked_rows(packed, torch.arange(packed.N, device=packed.tensor.device))


def _unpacked_rows(packed: PackedGrouped, rows_T: Tensor) -> GroupedWeight:
    if packed.data is None:
        assert packed.weight is not None
        return packed.weight.rows(rows_T)
    return rows_of_panels(packed.data, packed.order_K, packed.format, packed.N, packed.K, rows_T)
