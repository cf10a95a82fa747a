"""The packed layout of grouped weights in plain torch, on any device.

csrc/include/quire/kernels/grouped_layout.h describes the layout. The compiled kernels and the GPU kernels both read it.

Dimensions: T rows, K in-features, N out-features, G groups along K, S super-groups, P panels, B bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.formats.weight_format import PANEL_WIDTH, GroupedFormat, plane_bits
from quire.kernels.grouped_weight import GroupedWeight


def to_panels(weight: GroupedWeight) -> Tensor:
    """The packed weight, uint8 [bytes], on the weight's device, without the order of columns."""
    N, K = weight.shape
    num_panels = -(-N // PANEL_WIDTH)
    added_rows, added_columns = -N % PANEL_WIDTH, weight.format.padded(K) - K

    def numbers(*parts: Tensor | None) -> Tensor:
        """[P, B]: for each group or super-group, the numbers of all 64 columns, one part after the other."""
        padded = [F.pad(part, (0, 0, 0, added_rows)) for part in parts if part is not None]
        sections = [
            part.reshape(num_panels, PANEL_WIDTH, -1).transpose(1, 2).contiguous().view(torch.uint8) for part in padded
        ]
        return torch.cat(sections, dim=2).flatten(1)

    codes_NK = F.pad(weight.codes_NK, (0, added_columns, 0, added_rows))
    quads = codes_NK.reshape(num_panels, PANEL_WIDTH, -1, 4).transpose(1, 2)
    offsets_NG = weight.zeros_NG if weight.minima_NG is None else weight.minima_NG
    sections = [numbers(weight.scales_NG, offsets_NG)]
    if weight.super_scales_NS is not None or weight.super_minima_NS is not None:
        sections.append(numbers(weight.super_scales_NS, weight.super_minima_NS))
    return torch.cat([*sections, _to_planes(quads, weight.bits).flatten(1)], dim=1).flatten()


def rows_of_panels(
    data: Tensor, order_K: Tensor | None, form: GroupedFormat, N: int, K: int, rows_T: Tensor
) -> GroupedWeight:
    """The weight of some out-features (int64, each in [0, N)) from the packed weight."""
    assert form.group_size is not None
    num_groups = -(-K // form.group_size)
    data_PB = data.view(-(-N // PANEL_WIDTH), -1)
    panels_T, columns_T = rows_T // PANEL_WIDTH, rows_T % PANEL_WIDTH
    end = 0

    def numbers(count: int, names: list[str]) -> list[Tensor]:
        """Read the next section. For each dtype in `names`, it gives [T, count]: the numbers of `count` groups."""
        nonlocal end
        widths = [PANEL_WIDTH * _dtype(name).itemsize for name in names]
        begin, end = end, end + count * sum(widths)
        parts = torch.split(data_PB[:, begin:end].reshape(len(data_PB), count, -1), widths, dim=2)
        # These are views, so no section is copied.
        return [part.view(_dtype(name))[panels_T, :, columns_T] for part, name in zip(parts, names, strict=True)]

    scales_TG, *offsets_TG = numbers(num_groups, [form.scales] + ([] if form.offsets is None else [form.offsets]))
    has_super = [form.scales == "int8", form.offsets == "int8"]
    supers_TS = iter(numbers(-(-num_groups // form.super_size), ["float16"] * sum(has_super)))
    lines_T = data_PB[:, end:].reshape(len(data_PB), -1, PANEL_WIDTH, 4)[panels_T, :, columns_T]
    return GroupedWeight(
        codes_NK=_of_planes(lines_T, form.bits).flatten(1)[:, :K],
        bits=form.bits,
        group_size=form.group_size,
        scales_NG=scales_TG,
        zeros_NG=offsets_TG[0] if form.offsets == "uint8" else None,
        minima_NG=offsets_TG[0] if form.offsets not in (None, "uint8") else None,
        super_scales_NS=next(supers_TS) if has_super[0] else None,
        super_minima_NS=next(supers_TS) if has_super[1] else None,
        super_size=form.super_size,
        order_K=None if order_K is None else order_K.long(),
    )


def _to_planes(codes: Tensor, bits: int) -> Tensor:
    """Turn quads of codes [P, quads, ...], one code per byte, into lines [P, lines, ...] of the layout's CodePlanes."""
    low_bits, high_bits = plane_bits(bits)
    low = _joined(codes & (1 << low_bits) - 1, low_bits)
    if high_bits == 0:
        return low
    high = _joined(codes >> low_bits, high_bits)
    return torch.cat([_in_runs(low, low_bits // high_bits), high[:, :, None]], dim=2).flatten(1, 2)


def _of_planes(lines: Tensor, bits: int) -> Tensor:
    """The inverse of `_to_planes`."""
    low_bits, high_bits = plane_bits(bits)
    if high_bits == 0:
        return _split(lines, low_bits)
    planes = _in_runs(lines, low_bits // high_bits + 1)
    return _split(planes[:, :, :-1].flatten(1, 2), low_bits) | _split(planes[:, :, -1], high_bits) << low_bits


def _joined(codes: Tensor, bits: int) -> Tensor:
    """Join the codes that fit into one byte. The first code is in the lowest bits."""
    joined, *others = _in_runs(codes, 8 // bits).unbind(2)
    for i, part in enumerate(others, start=1):
        joined = joined | part << bits * i
    return joined


def _split(lines: Tensor, bits: int) -> Tensor:
    """The inverse of `_joined`."""
    mask = (1 << bits) - 1
    return torch.stack([lines >> bits * i & mask for i in range(8 // bits)], dim=2).flatten(1, 2)


def _in_runs(x: Tensor, count: int) -> Tensor:
    """[P, n, ...] -> [P, n / count, count, ...]."""
    return x.reshape(len(x), -1, count, *x.shape[2:])


def _dtype(name: str) -> torch.dtype:
    dtype = torch.uint8 if name == "e8m0" else getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
