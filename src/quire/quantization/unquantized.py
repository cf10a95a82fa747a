"""Weights in bfloat16, float16 or float32, packed for the matrix product.

Dimensions: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.dense import linear, pack_linear, pack_linear_bands, packed_rows, packs
from quire.kernels.lora import RowAdapters
from quire.quantization.scheme import LinearLayer, plain_weight


class Unquantized:
    """The scheme of a checkpoint without quantization."""

    def create_weights(self, layer: LinearLayer) -> None:
        layer.tensors["weight"] = plain_weight(layer)

    def finalize(self, layer: LinearLayer) -> None:
        tensor = layer.tensors.pop("weight")
        if packs(tensor.device):
            layer.weight = pack_linear_bands(tensor.row_bands(), layer.out_features, layer.weight_memory)
        else:
            layer.weight = pack_linear(tensor.owned)

    def apply(
        self,
        layer: LinearLayer,
        x_TK: Tensor,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        return linear(x_TK, layer.weight, layer.bias, out, out_dtype, adapters)

    def rows(self, layer: LinearLayer, rows_T: Tensor) -> Tensor:
        return packed_rows(layer.weight, rows_T)

    def weight_bytes(self, layer: LinearLayer) -> int:
        return int(layer.weight.nbytes)
