"""Gated activations: the activation of the first half of the columns times the second half. [T, 2I] -> [T, I]."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.kernels import ops
from quire.kernels.fp8 import Rows, gated_activation_to_fp8
from quire.layers.joined import JoinedLinear
from quire.layers.linear import Projection

_NAMES = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")


def gated_activation(name: str, feeds: Projection | JoinedLinear) -> Callable[[Tensor], Rows]:
    """The function for Dense.activation: [T, 2I] -> [T, I] in x's dtype.

    Args:
        feeds: the layer that reads the result. If this layer quantizes rows, the result is quantized already.
    """
    assert name in _NAMES, name

    def activate(x_T2I: Tensor) -> Rows:
        if feeds.quantizes(x_T2I):
            return gated_activation_to_fp8(name, x_T2I)
        return ops.gated_activation(name, x_T2I)

    return activate
