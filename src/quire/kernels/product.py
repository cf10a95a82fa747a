"""What every product with a packed weight, and every look-up of its rows, asks of its arguments.

Dimensions: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import cpu


def check_product(x_TK: Tensor, N: int, K: int, bias_N: Tensor | None) -> None:
    """Asserts that shapes fit a weight [N, K], and that x is of a dtype that is multiplied."""
    assert x_TK.shape[1:] == (K,), f"x is {tuple(x_TK.shape)}, expected [T, {K}]"
    assert x_TK.dtype in cpu.DTYPE_CODES, f"x is {x_TK.dtype}"
    assert bias_N is None or bias_N.shape == (N,), f"bias is not of shape ({N},)"


def check_rows(rows_T: Tensor) -> None:
    """Asserts that row numbers are int64 [T]; what they may be is for the caller."""
    is_list = rows_T.dim() == 1 and rows_T.dtype == torch.int64
    assert is_list, f"rows must be int64 [T], got {rows_T.dtype} {tuple(rows_T.shape)}"


def result_memory(x_TK: Tensor, N: int, out: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """[T, N] for the result of a product: `out`, of which rows may be strided, or new memory in x's or `out_dtype`."""
    T = x_TK.shape[0]
    if out is None:
        return torch.empty((T, N), dtype=out_dtype or x_TK.dtype, device=x_TK.device)
    assert out.shape == (T, N), f"out is {tuple(out.shape)}, expected [{T}, {N}]"
    assert out.stride(1) == 1, "the last dimension of out is not contiguous"
    assert out_dtype is None or out_dtype == out.dtype, f"out is {out.dtype}, out_dtype is {out_dtype}"
    return out
