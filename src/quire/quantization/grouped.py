"""Integer weights in groups along K: made while loading from a checkpoint in floating point.

Dimensions: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import ops
from quire.quantization.scheme import LinearLayer, ShardedTensor
from quire.weight_format import GroupedFormat


class QuantizedOnLoad:
    """Weights arrive in floating point and are rounded to the nearest codes of the format."""

    def __init__(self, weight_format: GroupedFormat) -> None:
        self._format = weight_format

    def create_weights(self, layer: LinearLayer) -> None:
        layer.tensors["weight"] = ShardedTensor((layer.out_features, layer.in_features), layer.dtype)

    def finalize(self, layer: LinearLayer) -> None:
        weight_NK = layer.tensors.pop("weight").data
        assert weight_NK is not None
        bits, group_size = self._format.bits, self._format.group_size_of(layer.in_features)
        layer.weight = ops.pack_grouped(*ops.quantize_grouped(weight_NK, bits, group_size), bits, group_size)

    def apply(self, layer: LinearLayer, x_TK: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return ops.grouped_linear(x_TK, layer.weight, layer.bias, out_dtype)

    def rows(self, layer: LinearLayer, rows_T: Tensor) -> Tensor:
        return ops.grouped_rows(layer.weight, rows_T, layer.dtype)

    def weight_bytes(self, layer: LinearLayer) -> int:
        return int(layer.weight.nbytes)
