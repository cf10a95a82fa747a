"""Gated activations: f(first half of a row) * second half, also with the result quantized to FP8.

Dimensions: T tokens, I inner.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton import codes
from quire.kernels.triton.launch import ceil_div, next_power_of_2, row_strides

_BLOCK = 1024


@triton.jit
def _gated(gate, up, NAME: tl.constexpr):
    if NAME == "silu":
        gate = gate * tl.sigmoid(gate)
    elif NAME == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))  # sqrt(1/2)
    elif NAME == "clamped_swiglu":  # the activation of gpt-oss; NaN stays NaN
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        gate = gate * tl.sigmoid(1.702 * gate)
        up = tl.minimum(up, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
    else:  # gelu_tanh; tanh(u) = 2 * sigmoid(2 * u) - 1, and 0.7978845608 = sqrt(2 / pi)
        gate = gate * tl.sigmoid(2.0 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
    return gate * up


@triton.jit
def _gated_activation_kernel(
    x_ptr,
    out_ptr,
    factors_ptr,
    order_ptr,
    begins_ptr,
    x_stride,
    out_stride,
    inner,
    last,
    NAME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`last`: the index of the last number of `begins`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < inner
    if begins_ptr is not None:
        is_inside = is_inside & (row >= tl.load(begins_ptr)) & (row < tl.load(begins_ptr + last))
    gate = tl.load(x_ptr + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + inner + columns, mask=is_inside, other=0.0).to(tl.float32)
    if factors_ptr is not None:
        factor = tl.load(factors_ptr + tl.load(order_ptr + row))
        gate, up = gate * factor, up * factor
    y = _gated(gate, up, NAME)
    tl.store(out_ptr + row * out_stride + columns, y.to(out_ptr.dtype.element_ty), mask=is_inside)


def gated_activation(
    name: str,
    x_T2I: Tensor,
    out_TI: Tensor,
    factors_F: Tensor | None = None,
    order_T: Tensor | None = None,
    begins: Tensor | None = None,
) -> None:
    """See ops.gated_activation. Numbers in `order` are not checked, because the host would wait for the device."""
    T, inner = out_TI.shape
    _gated_activation_kernel[(T, ceil_div(inner, _BLOCK))](
        x_ptr=x_T2I,
        out_ptr=out_TI,
        factors_ptr=factors_F,
        order_ptr=order_T,
        begins_ptr=begins,
        **row_strides(x=x_T2I, out=out_TI),
        inner=inner,
        last=0 if begins is None else len(begins) - 1,
        NAME=name,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _quantized_activation_kernel(
    x_ptr, codes_ptr, scales_ptr, x_stride, inner, NAME: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute and quantize a whole row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < inner
    gate = tl.load(x_ptr + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + inner + columns, mask=is_inside, other=0.0).to(tl.float32)
    y = _gated(gate, up, NAME).to(x_ptr.dtype.element_ty).to(tl.float32)  # gated_activation rounds here too
    codes.store_row(codes_ptr + row * inner, scales_ptr + row, y, columns, is_inside)


def gated_activation_to_fp8(name: str, x_T2I: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [T, I] in e4m3 and scales [T, 1], with the bits of `gated_activation` in x's dtype and quantize_rows."""
    T, inner = x_T2I.shape[0], x_T2I.shape[1] // 2
    codes_TI = torch.empty((T, inner), dtype=torch.int8, device=x_T2I.device)
    scales_T1 = torch.empty((T, 1), dtype=torch.float32, device=x_T2I.device)
    block = next_power_of_2(inner)
    _quantized_activation_kernel[(T,)](
        x_ptr=x_T2I,
        codes_ptr=codes_TI,
        scales_ptr=scales_T1,
        **row_strides(x=x_T2I),
        inner=inner,
        NAME=name,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return codes_TI.view(torch.float8_e4m3fn), scales_T1
