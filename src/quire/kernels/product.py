"""Checks the arguments of products with a packed weight, and of lookups of its rows.

Dimensions: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.guards import check_dtype, check_last_stride, check_places, check_shape

if TYPE_CHECKING:
    from quire.kernels.lora import RowAdapters


def check_weight(weight_NK: Tensor) -> None:
    """Check for a floating-point weight with at least one row and column."""
    check_places(weight=weight_NK)
    if weight_NK.dim() != 2 or 0 in weight_NK.shape:
        raise ValueError(f"weight is {list(weight_NK.shape)}, expected [N, K], neither of them 0")
    check_dtype("weight", weight_NK, *cpu.DTYPE_CODES)


def check_product(
    x_TK: Tensor, weight: Tensor, N: int, K: int, bias_N: Tensor | None, adapters: RowAdapters | None
) -> None:
    """Check that x, bias and adapters fit a weight [N, K]. `weight`: any tensor of the weight, to compare devices."""
    check_places(x=x_TK, weight=weight, bias=bias_N)
    if x_TK.dim() != 2 or x_TK.shape[1] != K:
        raise ValueError(f"x is {list(x_TK.shape)}, expected [T, {K}]")
    check_dtype("x", x_TK, *cpu.DTYPE_CODES)
    if bias_N is not None:
        check_shape("bias", bias_N, N)
        check_dtype("bias", bias_N, *cpu.DTYPE_CODES)
    if adapters is not None:
        check_places(x=x_TK, slots=adapters.slots_T)
        adapters.check(x_TK.shape[0], K, N)


def check_rows(rows_T: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    """Check that row numbers are int64 [T] on the weight's device, and that the result's dtype is legal."""
    check_places(rows=rows_T, weight=weight)
    if rows_T.dim() != 1:
        raise ValueError(f"rows is {list(rows_T.shape)}, expected [T]")
    check_dtype("rows", rows_T, torch.int64)
    check_result_dtype(dtype)


def check_result_dtype(dtype: torch.dtype) -> None:
    """Check that the result's dtype is one that kernels multiply."""
    if dtype not in cpu.DTYPE_CODES:
        raise TypeError(f"the result's dtype is {dtype}, expected {' or '.join(map(str, cpu.DTYPE_CODES))}")


def result_memory(x_TK: Tensor, N: int, out: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """Memory [T, N] for the result of a product: `out`, whose rows may be strided, or else new memory.

    Args:
        out_dtype: the dtype of new memory; None: x's.
    """
    T = x_TK.shape[0]
    if out is None:
        dtype = out_dtype or x_TK.dtype
        check_result_dtype(dtype)
        return torch.empty((T, N), dtype=dtype, device=x_TK.device)
    check_places(x=x_TK, out=out)
    check_shape("out", out, T, N)
    check_dtype("out", out, out_dtype or out.dtype)
    check_result_dtype(out.dtype)
    check_last_stride(out=out)
    return out
