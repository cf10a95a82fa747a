"""What every product with a packed weight asks of its arguments.

Dimensions: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels import cpu


def check_product(x_TK: Tensor, N: int, K: int, bias_N: Tensor | None) -> None:
    """Asserts that shapes fit a weight [N, K], and that x is of a dtype that is multiplied."""
    assert x_TK.shape[1:] == (K,), f"x is {tuple(x_TK.shape)}, expected [T, {K}]"
    assert x_TK.dtype in cpu.DTYPE_CODES, f"x is {x_TK.dtype}"
    assert bias_N is None or bias_N.shape == (N,), f"bias is not of shape ({N},)"
