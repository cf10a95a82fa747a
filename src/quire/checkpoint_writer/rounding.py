"""Rounding weights to integer codes: the choice of scales and zero points.

Dimensions: N out-features, K in-features, G groups along K, S elements of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.grouped_weight import GroupedWeight

# The full range of a group holds every element. It may shrink to one of these shares: large elements are cut, and the
# others get finer steps. Shares below 0.7 gain nothing for bell-shaped weights.
SHRUNK_RANGES = torch.linspace(1.0, 0.7, 13).tolist()


@dataclass(frozen=True)
class Grid:
    """The values that codes stand for: scale * (code - zero), for each row, or for each group of a row.

    scales and zeros are float32; zeros are whole numbers in [0, 2^bits). Both lack the weights' last dimension.
    """

    scales: Tensor
    zeros: Tensor
    bits: int

    def codes(self, weight: Tensor) -> Tensor:
        """The nearest codes of weights [..., S], as float32."""
        codes = torch.round(weight / self.scales[..., None]) + self.zeros[..., None]
        return codes.clamp_(0, 2**self.bits - 1)

    def values(self, codes: Tensor) -> Tensor:
        """The values of codes [..., S]."""
        return (codes - self.zeros[..., None]) * self.scales[..., None]

    def nearest(self, weight: Tensor) -> Tensor:
        """The nearest values of weights [..., S]."""
        return self.values(self.codes(weight))


def choose_grid(
    weight: Tensor,
    bits: int,
    *,
    symmetric: bool,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
) -> Grid:
    """The grid of every group of weights [..., S]. Scales are rounded to the dtype in which they will be stored.

    Args:
        symmetric: the zero point is 2^(bits - 1); else it is chosen for the range of the group.
        importance: weights of the squared errors, broadcast over [..., S]. They choose the best of SHRUNK_RANGES;
            None: take the range that holds every element.
    """
    high, low = weight.amax(-1).clamp_min(0), weight.amin(-1).clamp_max(0)
    if importance is None:
        return _grid(low, high, bits, symmetric, scale_dtype)
    best = _grid(low, high, bits, symmetric, scale_dtype)
    best_error = _error(best, weight, importance)
    for share in SHRUNK_RANGES[1:]:
        grid = _grid(low * share, high * share, bits, symmetric, scale_dtype)
        error = _error(grid, weight, importance)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = Grid(torch.where(better, grid.scales, best.scales), torch.where(better, grid.zeros, best.zeros), bits)
    return best


def _error(grid: Grid, weight: Tensor, importance: Tensor) -> Tensor:
    return ((grid.nearest(weight) - weight).square_() * importance).sum(-1)


def _grid(low: Tensor, high: Tensor, bits: int, symmetric: bool, scale_dtype: torch.dtype) -> Grid:
    top = 2**bits - 1
    if symmetric:
        scales = 2 * torch.maximum(-low, high) / top
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = (high - low) / top
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))  # a group of zeros
    # A scale below the smallest number of the dtype would round to 0.
    scales = scales.clamp_min(torch.finfo(scale_dtype).tiny).to(scale_dtype).float()
    if not symmetric:
        zeros = torch.round(-low / scales).clamp_(0, top)
    return Grid(scales, zeros, bits)


def round_to_nearest(
    weight_NK: Tensor, bits: int, group_size: int, *, symmetric: bool, scale_dtype: torch.dtype
) -> GroupedWeight:
    """Round every element by itself, in the range that holds its whole group."""
    groups_NGS = in_groups(weight_NK.float(), group_size)
    grid = choose_grid(groups_NGS, bits, symmetric=symmetric, scale_dtype=scale_dtype)
    return as_grouped(grid.codes(groups_NGS).flatten(1), grid.scales, grid.zeros, bits, group_size, symmetric)


def in_groups(weight_NK: Tensor, group_size: int) -> Tensor:
    """[N, K] -> [N, G, S]."""
    N, K = weight_NK.shape
    return weight_NK.reshape(N, K // group_size, group_size)


def as_grouped(
    codes_NK: Tensor, scales_NG: Tensor, zeros_NG: Tensor, bits: int, group_size: int, symmetric: bool
) -> GroupedWeight:
    """Codes and zero points as whole numbers in float32 -> the form that checkpoints and kernels share."""
    return GroupedWeight(
        codes_NK=codes_NK.to(torch.uint8),
        bits=bits,
        group_size=group_size,
        scales_NG=scales_NG,
        zeros_NG=None if symmetric else zeros_NG.to(torch.uint8),
    )
