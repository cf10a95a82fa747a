"""Gated activations: f(first half of a row) * second half.

Dimensions: T tokens, I inner.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import ceil_div

_BLOCK = 1024


@triton.jit
def _gated_activation_kernel(x_ptr, out_ptr, x_stride, out_stride, inner, NAME: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < inner
    gate = tl.load(x_ptr + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + inner + columns, mask=is_inside, other=0.0).to(tl.float32)
    if NAME == "silu":
        gate = gate * tl.sigmoid(gate)
    elif NAME == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))  # sqrt(1/2)
    else:  # gelu_tanh; tanh(u) = 2 * sigmoid(2 * u) - 1, and 0.7978845608 = sqrt(2 / pi)
        gate = gate * tl.sigmoid(2.0 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out_ptr + row * out_stride + columns, (gate * up).to(out_ptr.dtype.element_ty), mask=is_inside)


def gated_activation(name: str, x_T2I: Tensor, out_TI: Tensor) -> None:
    """See ops.silu_and_mul; `name` is silu, gelu or gelu_tanh."""
    T, inner = out_TI.shape
    _gated_activation_kernel[(T, ceil_div(inner, _BLOCK))](
        x_T2I, out_TI, x_T2I.stride(0), out_TI.stride(0), inner, NAME=name, BLOCK=_BLOCK, num_warps=4
    )
