"""Gated activations: the first half of the columns activated, times the second half. [T, 2I] -> [T, I]."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.kernels import ops

_GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": ops.silu_and_mul,
    "gelu": ops.gelu_and_mul,
    "gelu_tanh": ops.gelu_tanh_and_mul,
}


def gated_activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function for ModelConfig.hidden_act."""
    return _GATED[name]
