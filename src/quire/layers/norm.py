"""RMS norm, alone or with the addition to the residual before it.

Dimensions: T tokens, D normalised width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.ops import add_rms_norm, rms_norm
from quire.layers.weight_slot import WeightSlot, WeightSlots


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (weight + offset), in float32 inside. Gemma stores weights around 0: offset 1."""

    held = ("weight_D",)

    def __init__(self, size: int, eps: float, offset: float, dtype: torch.dtype) -> None:
        self.eps = eps
        self.offset = offset
        self.weight_D = torch.empty(size, dtype=dtype)

    def __call__(self, x_TD: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows of x may be strided; `out` may be x."""
        return rms_norm(x_TD, self.weight_D, self.eps, self.offset, out)

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """residual += x in place, and the norm of the sum."""
        return add_rms_norm(x_TD, residual_TD, self.weight_D, self.eps, self.offset)

    def slots(self) -> WeightSlots:
        yield "weight", WeightSlot(tuple(self.weight_D.shape), self._load)

    def _load(self, weight_D: Tensor) -> None:
        self.weight_D = weight_D.to(self.weight_D.dtype, copy=True)

    def weight_bytes(self) -> int:
        return self.weight_D.nbytes
