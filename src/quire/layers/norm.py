"""RMS norm and layer norm, alone or with the addition to the residual before it.

Dimensions: T tokens, D normalised width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.fp8 import Rows, rms_norm_to_fp8
from quire.kernels.ops import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from quire.layer_spec.shapes import NormShape
from quire.layers.linear import Projection
from quire.layers.weight_slot import WeightSlot, WeightSlots


class RMSNorm:
    """RMS norm: x / sqrt(mean(x^2) + eps) * (weight + offset), computed in float32.

    Gemma stores weights around 0, so its offset is 1. See ops.rms_norm.
    """

    held: tuple[str, ...] = ("weight_D",)

    def __init__(self, size: int, eps: float, offset: float, dtype: torch.dtype) -> None:
        self.eps = eps
        self.offset = offset
        self.weight_D = torch.empty(size, dtype=dtype)
        self.feeds: Projection | None = None  # the only reader of the results of `feed` and `add`

    def __call__(self, x_TD: Tensor, out: Tensor | None = None) -> Tensor:
        """The norm of x [..., D], in x's dtype. Rows of x may be strided, and `out` may be x."""
        return rms_norm(x_TD, self.weight_D, self.eps, self.offset, out)

    def feed(self, x_TD: Tensor) -> Rows:
        """The norm. If its reader quantizes rows, the result is quantized already."""
        if self.feeds is not None and self.feeds.quantizes(x_TD):
            return rms_norm_to_fp8(x_TD, None, 1.0, self.weight_D, self.eps, self.offset)
        return self(x_TD)

    def add(self, x_TD: Tensor, residual_TD: Tensor, multiplier: float = 1.0) -> Rows:
        """Compute residual += multiplier * x in place. The result is the norm of the sum, quantized like `feed`'s."""
        if self.feeds is not None and self.feeds.quantizes(x_TD):
            return rms_norm_to_fp8(x_TD, residual_TD, multiplier, self.weight_D, self.eps, self.offset)
        return add_rms_norm(x_TD, residual_TD, self.weight_D, self.eps, self.offset, multiplier=multiplier)

    @staticmethod
    def without_weights(size: int, eps: float, dtype: torch.dtype, device: torch.device) -> RMSNorm:
        """A norm whose weights are 1 in every model."""
        norm = RMSNorm(size, eps, 0.0, dtype)
        norm.weight_D = torch.ones(size, dtype=dtype, device=device)
        return norm

    def slots(self) -> WeightSlots:
        yield "weight", WeightSlot(tuple(self.weight_D.shape), self._load)

    def _load(self, weight_D: Tensor) -> None:
        self.weight_D = weight_D.to(self.weight_D.dtype, copy=True)

    def weight_bytes(self) -> int:
        return self.weight_D.nbytes


class LayerNorm(RMSNorm):
    """Layer norm: (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, computed in float32. See ops.layer_norm."""

    held = ("weight_D", "bias_D")

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__(size, eps, 0.0, dtype)
        self.bias_D = torch.empty(size, dtype=dtype)

    def __call__(self, x_TD: Tensor, out: Tensor | None = None) -> Tensor:
        """See RMSNorm."""
        return layer_norm(x_TD, self.weight_D, self.bias_D, self.eps, out)

    def feed(self, x_TD: Tensor) -> Rows:
        """The norm. The reader of the result quantizes it, if it quantizes rows."""
        return self(x_TD)

    def add(self, x_TD: Tensor, residual_TD: Tensor, multiplier: float = 1.0) -> Rows:
        """Compute residual += multiplier * x in place. The result is the norm of the sum."""
        return add_layer_norm(x_TD, residual_TD, self.weight_D, self.bias_D, self.eps, multiplier=multiplier)

    def slots(self) -> WeightSlots:
        yield from super().slots()
        yield "bias", WeightSlot(tuple(self.bias_D.shape), self._load_bias)

    def _load_bias(self, bias_D: Tensor) -> None:
        self.bias_D = bias_D.to(self.bias_D.dtype, copy=True)

    def weight_bytes(self) -> int:
        return super().weight_bytes() + self.bias_D.nbytes


def make_norm(shape: NormShape, eps: float, offset: float, dtype: torch.dtype) -> RMSNorm:
    """A norm without its weights. `offset`: the offset of an RMS norm."""
    return LayerNorm(shape.size, eps, dtype) if shape.is_layer_norm else RMSNorm(shape.size, eps, offset, dtype)
