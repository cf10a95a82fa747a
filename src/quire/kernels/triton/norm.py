"""RMS and layer norm of rows, also with an addition to the residual before it, and with the result quantized to FP8.

Dimensions: T tokens, D hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton import codes
from quire.kernels.triton.launch import next_power_of_2, row_strides


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    scales_ptr,
    x_stride,
    residual_stride,
    out_stride,
    multiplier,
    eps,
    weight_offset,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
):
    """It is a layer norm if there is a bias, else an RMS norm. If it is quantized, out gets codes."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    is_inside = columns < D
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=is_inside, other=0.0)
        product = (x.to(tl.float32) * multiplier).to(x.dtype)
        x = (residual.to(tl.float32) + product.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * residual_stride + columns, x, mask=is_inside)
    x = x.to(tl.float32)
    if bias_ptr is not None:
        x = tl.where(is_inside, x - tl.sum(x, axis=0) / D, 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0).to(tl.float32) + weight_offset
    y = x * inverse * weight
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    if IS_QUANTIZED:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)  # the norm without quantization rounds here too
        codes.store_row(out_ptr + row * out_stride, scales_ptr + row, y, columns, is_inside)
    else:
        tl.store(out_ptr + row * out_stride + columns, y.to(out_ptr.dtype.element_ty), mask=is_inside)


def norm(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    multiplier: float,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    weight_offset: float,
    out_TD: Tensor,
) -> None:
    """See ops.rms_norm, ops.layer_norm (with a bias), and their forms with a residual (changed in place)."""
    _launch(x_TD, residual_TD, multiplier, weight_D, bias_D, eps, weight_offset, out_TD, None)


def rms_norm_to_fp8(
    x_TD: Tensor, residual_TD: Tensor | None, multiplier: float, weight_D: Tensor, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    """Codes [T, D] in e4m3 and scales [T, 1], with the bits of `norm` in x's dtype and fp8.quantize_rows."""
    codes_TD = torch.empty(x_TD.shape, dtype=torch.int8, device=x_TD.device)
    scales_T1 = torch.empty((x_TD.shape[0], 1), dtype=torch.float32, device=x_TD.device)
    _launch(x_TD, residual_TD, multiplier, weight_D, None, eps, weight_offset, codes_TD, scales_T1)
    return codes_TD.view(torch.float8_e4m3fn), scales_T1


def _launch(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    multiplier: float,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    weight_offset: float,
    out_TD: Tensor,
    scales_T1: Tensor | None,
) -> None:
    T, D = x_TD.shape
    block = next_power_of_2(D)
    _norm_kernel[(T,)](
        x_ptr=x_TD,
        residual_ptr=residual_TD,
        weight_ptr=weight_D,
        bias_ptr=bias_D,
        out_ptr=out_TD,
        scales_ptr=scales_T1,
        **row_strides(x=x_TD, residual=residual_TD, out=out_TD),
        multiplier=multiplier,
        eps=eps,
        weight_offset=weight_offset,
        D=D,
        BLOCK_D=block,
        HAS_RESIDUAL=residual_TD is not None,
        IS_QUANTIZED=scales_T1 is not None,
        num_warps=min(max(block // 512, 1), 16),
    )
