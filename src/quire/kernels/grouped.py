"""Products with integer weights in groups along K: compiled kernels for CPU tensors, plain torch otherwise.

The arithmetic of one row never depends on the other rows of a call nor on the number of threads.
Dimensions: T tokens, K in-features, N out-features, G groups along K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quire.kernels import cpu, reference
from quire.kernels.grouped_weight import GroupedWeight
from quire.weight_format import PANEL_WIDTH, GroupedFormat


@dataclass(frozen=True)
class PackedGrouped:
    """An integer weight in the form `grouped_linear` reads. Opaque: the layout belongs to the path that packed it.

    `data` is the kernels' panel layout (uint8), beside it the order of its columns (int32); where ops run on plain
    torch, `weight` is kept instead.
    """

    data: Tensor | None
    order_K: Tensor | None
    weight: GroupedWeight | None
    N: int
    K: int
    format: GroupedFormat

    @cached_property
    def form(self) -> tuple[int, ...]:
        """`format` as the kernels take it."""
        return cpu.grouped_form(self.format)

    @property
    def is_packed(self) -> bool:
        return self.data is not None

    @property
    def nbytes(self) -> int:
        if self.data is not None:
            return self.data.nbytes + (0 if self.order_K is None else self.order_K.nbytes)
        assert self.weight is not None
        return self.weight.nbytes


def quantize_grouped(weight_NK: Tensor, bits: int, group_size: int) -> GroupedWeight:
    """The nearest integer weight with zero 128 for 8 bits and 8 for 4 bits, and float32 scales.

    8 bits: scale = max |w| / 127. 4 bits: the element of largest magnitude gets code 0, so that all 16 codes are used
    (as GGUF's Q4_0 does).
    """
    assert weight_NK.dim() == 2, f"weight must be [N, K], got shape {tuple(weight_NK.shape)}"
    if not cpu.takes(weight_NK):
        return reference.quantize_grouped(weight_NK, bits, group_size)
    if weight_NK.stride(1) != 1:
        weight_NK = weight_NK.contiguous()
    codes_NK, scales_NG = cpu.grouped_quantize(weight_NK, bits, group_size)
    return GroupedWeight(codes_NK=codes_NK, bits=bits, group_size=group_size, scales_NG=scales_NG)


def pack_grouped(weight: GroupedWeight) -> PackedGrouped:
    """Bring a weight into the form `grouped_linear` reads; a copy on the kernels."""
    shape = (*weight.shape, weight.format)
    if not (cpu.available() and weight.codes_NK.device.type == "cpu"):
        return PackedGrouped(None, None, weight, *shape)
    contiguous: dict[str, Any] = {
        name: x.contiguous()
        for name, x in vars(weight).items()
        if isinstance(x, Tensor) and not (name == "codes_NK" and x.stride(1) == 1)
    }
    order_K = None if weight.order_K is None else weight.order_K.to(torch.int32).contiguous()
    return PackedGrouped(cpu.grouped_pack(replace(weight, **contiguous)), order_K, None, *shape)


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
    if packed.data is None:
        assert packed.weight is not None
        return reference.grouped_linear(x_TK, packed.weight, bias_N, out_dtype)
    out_TN = torch.empty((x_TK.shape[0], packed.N), dtype=out_dtype)
    cpu.gemm(x_TK, packed.data, packed.N, bias_N, out_TN, packed.form, packed.order_K)
    return out_TN


def grouped_rows(packed: PackedGrouped, rows_T: Tensor, dtype: torch.dtype) -> Tensor:
    """weight[rows_T] -> [T, K], computed in float32 and rounded to dtype. rows_T int64, each in [0, N)."""
    assert rows_T.dim() == 1, f"rows must be [T], got shape {tuple(rows_T.shape)}"
    weight = _unpacked_rows(packed, rows_T) if packed.weight is None else packed.weight.rows(rows_T)
    return reference.dequantize_grouped(weight).to(dtype)


def _unpacked_rows(packed: PackedGrouped, rows_T: Tensor) -> GroupedWeight:
    """From the layout of csrc/include/quire/kernels/grouped_layout.h."""
    form = packed.format
    assert packed.data is not None and form.group_size is not None
    num_groups = -(-packed.K // form.group_size)
    data_PB = packed.data.view(-(-packed.N // PANEL_WIDTH), -1)
    panels_T, columns_T = rows_T // PANEL_WIDTH, rows_T % PANEL_WIDTH
    end = 0

    def numbers(count: int, names: list[str]) -> list[Tensor]:
        """The next section: for each of `count` groups the numbers of each dtype in `names`; [T, count] of each."""
        nonlocal end
        widths = [PANEL_WIDTH * _dtype(name).itemsize for name in names]
        begin, end = end, end + count * sum(widths)
        parts = torch.split(data_PB[:, begin:end].reshape(len(data_PB), count, -1), widths, dim=2)
        # views: no section is copied, whatever the number of panels
        return [part.view(_dtype(name))[panels_T, :, columns_T] for part, name in zip(parts, names, strict=True)]

    scales_TG, *offsets_TG = numbers(num_groups, [form.scales] + ([] if form.offsets is None else [form.offsets]))
    has_super = [form.scales == "int8", form.offsets == "int8"]
    supers_TS = iter(numbers(-(-num_groups // form.super_size), ["float16"] * sum(has_super)))
    quads_TQ4 = data_PB[:, end:].reshape(len(data_PB), -1, PANEL_WIDTH, 4)[panels_T, :, columns_T]
    if form.bits == 4:
        quads_TQ4 = torch.stack([quads_TQ4 & 15, quads_TQ4 >> 4], dim=2)
    return GroupedWeight(
        codes_NK=quads_TQ4.flatten(1)[:, : packed.K],
        bits=form.bits,
        group_size=form.group_size,
        scales_NG=scales_TG,
        zeros_NG=offsets_TG[0] if form.offsets == "uint8" else None,
        minima_NG=offsets_TG[0] if form.offsets not in (None, "uint8") else None,
        super_scales_NS=next(supers_TS) if has_super[0] else None,
        super_minima_NS=next(supers_TS) if has_super[1] else None,
        super_size=form.super_size,
        order_K=None if packed.order_K is None else packed.order_K.long(),
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
