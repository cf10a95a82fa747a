"""AWQ (Lin et al., arXiv 2306.00978): in-features with large inputs are scaled up before rounding and lose less.

The inverse factors go into the part that makes the inputs: the norm before, or the rows of the linear layer before.
Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.checkpoint_writer.rounding import as_grouped, choose_grid, in_groups
from quire.kernels.grouped_weight import GroupedWeight

BITS = 4
NUM_EXPONENTS = 20  # the search tries the factors |x|^(i / 20) for i from 0 to 19 (equation 5 of the paper)


@dataclass(frozen=True)
class Inputs:
    """Sums that calibration took over a linear layer's inputs X, T x K."""

    gram_KK: Tensor  # X^T X, float32
    magnitude_K: Tensor  # mean of |X|, float32


def search_factors(weight_NK: Tensor, inputs: Inputs, group_size: int, repeat: tuple[int, int] | None = None) -> Tensor:
    """The factors of the in-features, float32 [K], with the smallest error of the rounded weight's output.

    Args:
        weight_NK: floating point.
        repeat: (times, width): each block of `width` in-features comes `times` times in a row, and all copies get the
            same factors. This is the case for the heads of v, because several query heads share one of them.
    """
    weight_NK = weight_NK.float()
    magnitude_K = inputs.magnitude_K
    if repeat is not None:
        times, width = repeat
        heads = magnitude_K.view(-1, times, width).mean(1, keepdim=True)
        magnitude_K = heads.expand(-1, times, width).reshape(-1)
    magnitude_K = magnitude_K.clamp_min(1e-4 * magnitude_K.mean().item() + 1e-30)
    best_K, best_error = torch.ones_like(magnitude_K), float("inf")
    for i in range(NUM_EXPONENTS):
        factors_K = magnitude_K ** (i / NUM_EXPONENTS)
        factors_K = factors_K / (factors_K.max() * factors_K.min()).sqrt()
        scaled = _values(weight_NK * factors_K, group_size) / factors_K
        error = output_error(weight_NK - scaled, inputs.gram_KK)
        if error < best_error:
            best_K, best_error = factors_K, error
    return best_K


def output_error(delta_NK: Tensor, gram_KK: Tensor) -> float:
    """The sum of squares of X delta^T over the calibration inputs X, whose X^T X is `gram_KK`."""
    return ((delta_NK @ gram_KK) * delta_NK).sum().item()


def round_clipped(weight_NK: Tensor, gram_K: Tensor, group_size: int) -> GroupedWeight:
    """Round with zero points. The squared inputs `gram_K` (a diagonal) choose the best range of each group."""
    groups_NGS = in_groups(weight_NK.float(), group_size)
    grid = choose_grid(
        groups_NGS, BITS, symmetric=False, scale_dtype=torch.float16, importance=gram_K.view(-1, group_size)
    )
    return as_grouped(grid.codes(groups_NGS).flatten(1), grid.scales, grid.zeros, BITS, group_size, symmetric=False)


def _values(weight_NK: Tensor, group_size: int) -> Tensor:
    groups_NGS = in_groups(weight_NK, group_size)
    return choose_grid(groups_NGS, BITS, symmetric=False, scale_dtype=torch.float16).nearest(groups_NGS).flatten(1)
