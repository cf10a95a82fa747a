"""GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded one by one; the remaining columns take up the error.

The update follows from the second derivative of the layer's squared output error, 2 X^T X, over calibration inputs X.
Dimensions: N out-features, K in-features, G groups along K, B columns of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.checkpoint_writer.rounding import Grid, as_grouped, choose_grid, in_groups
from quire.kernels.grouped_weight import GroupedWeight

BITS = 4
BLOCK = 128  # the updates of this number of columns reach the other columns together (section 3.3)
DAMPING = 0.01  # this share of the diagonal's mean is added to the diagonal (section 3.3)
MAX_DAMPING = 10.0


def gptq(weight_NK: Tensor, gram_KK: Tensor, group_size: int, *, act_order: bool = False) -> GroupedWeight:
    """A symmetric weight of 4 bits that changes the layer's output on the calibration inputs as little as possible.

    Args:
        weight_NK: floating point.
        gram_KK: X^T X over the calibration inputs, float32.
        act_order: round columns with large inputs first. Groups stay in the order of storage, and all grids are chosen
            first ("static groups"), so a reader of the format does not see the order. Without act_order a group's
            grid is chosen when its first column is reached.
    """
    K = weight_NK.shape[1]
    weight_NK, gram_KK = weight_NK.float(), gram_KK.clone()
    unused_K = gram_KK.diagonal() == 0
    gram_KK.diagonal()[unused_K] = 1.0
    importance_K = gram_KK.diagonal().clone()
    importance_K[unused_K] = 0.0

    def grid_of(group: int, weight_NS: Tensor) -> Grid:
        importance_S = importance_K[group * group_size : (group + 1) * group_size]
        return choose_grid(weight_NS, BITS, symmetric=True, scale_dtype=torch.float16, importance=importance_S)

    grids: list[Grid] = []
    order_K = torch.arange(K)
    if act_order:
        grids = [grid_of(group, columns) for group, columns in enumerate(in_groups(weight_NK, group_size).unbind(1))]
        order_K = gram_KK.diagonal().argsort(descending=True, stable=True)
        weight_NK, gram_KK = weight_NK[:, order_K], gram_KK[order_K][:, order_K]
    factor_KK = _inverse_factor(gram_KK)
    weight_KN = weight_NK.T.clone(memory_format=torch.contiguous_format)  # a column is one piece of memory
    codes_KN = torch.empty_like(weight_KN)
    for begin in range(0, K, BLOCK):
        end = min(begin + BLOCK, K)
        errors_BN = torch.empty_like(weight_KN[begin:end])
        for k in range(begin, end):
            group = int(order_K[k]) // group_size
            if group == len(grids):
                # The grid is chosen for the weights that the columns before have changed; some are beyond this block.
                columns_SN = weight_KN[k : k + group_size].clone()
                if k + group_size > end:
                    columns_SN[end - k :] -= factor_KK[begin:k, end : k + group_size].T @ errors_BN[: k - begin]
                grids.append(grid_of(group, columns_SN.T))
            column_N1 = weight_KN[k][:, None]
            codes_N1 = grids[group].codes(column_N1)
            codes_KN[order_K[k]] = codes_N1[:, 0]
            error_N1 = (column_N1 - grids[group].values(codes_N1)) / factor_KK[k, k]
            errors_BN[k - begin] = error_N1[:, 0]
            weight_KN[k:end].addr_(factor_KK[k, k:end], error_N1[:, 0], alpha=-1)
        weight_KN[end:].addmm_(factor_KK[begin:end, end:].T, errors_BN, alpha=-1)
    scales_NG, zeros_NG = (torch.stack([getattr(g, name) for g in grids], 1) for name in ("scales", "zeros"))
    return as_grouped(codes_KN.T.contiguous(), scales_NG, zeros_NG, BITS, group_size, symmetric=True)


def _inverse_factor(gram_KK: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped matrix's inverse. Its rows are the updates (algorithm 1)."""
    damping, mean = DAMPING, gram_KK.diagonal().mean()
    while True:
        damped_KK = gram_KK.clone()
        damped_KK.diagonal().add_(damping * mean)
        lower_KK, failed = torch.linalg.cholesky_ex(damped_KK)
        if not failed:
            factor_KK: Tensor
            factor_KK, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_KK), upper=True)
            if not failed:
                return factor_KK
        damping *= 10  # float32 cannot hold the small directions
        assert damping <= MAX_DAMPING, "the inputs of a layer are not finite"
