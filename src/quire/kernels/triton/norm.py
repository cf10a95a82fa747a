"""RMS norm of rows, with and without adding to the residual first.

Dimensions: T tokens, D hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import next_power_of_2


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    weight_offset,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    is_inside = columns < D
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=is_inside, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * residual_stride + columns, x, mask=is_inside)
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0).to(tl.float32) + weight_offset
    y = x * inverse * weight
    tl.store(out_ptr + row * out_stride + columns, y.to(out_ptr.dtype.element_ty), mask=is_inside)


def rms_norm(
    x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, weight_offset: float, out_TD: Tensor
) -> None:
    """See ops.rms_norm and, with a residual (changed in place), ops.add_rms_norm."""
    T, D = x_TD.shape
    block = next_power_of_2(D)
    _rms_norm_kernel[(T,)](
        x_TD,
        residual_TD,
        weight_D,
        out_TD,
        x_TD.stride(0),
        0 if residual_TD is None else residual_TD.stride(0),
        out_TD.stride(0),
        eps,
        weight_offset,
        D=D,
        BLOCK_D=block,
        HAS_RESIDUAL=residual_TD is not None,
        num_warps=min(max(block // 512, 1), 16),
    )
