"""Linear layers of GGUF files: rows of blocks.

Dimensions: K in-features, N out-features, R bytes of a row.
"""

from __future__ import annotations

import torch

from quire.errors import WeightsError
from quire.gguf.types import TensorType
from quire.kernels.grouped import pack_grouped_bands
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.pages import row_bands
from quire.quantization.gguf_blocks import unpack_blocks
from quire.quantization.grouped import Grouped
from quire.quantization.scheme import LinearLayer, ShardedTensor, check_finite


class GgufBlocks(Grouped):
    """Weights arrive as the bytes of their blocks, [N, R] uint8."""

    def __init__(self, tensor_type: TensorType) -> None:
        self._type = tensor_type

    def create_weights(self, layer: LinearLayer) -> None:
        row_bytes = layer.in_features // self._type.block_size * self._type.block_bytes
        pieces = [(num_outputs, row_bytes) for _, num_outputs in layer.shards]
        layer.tensors["weight"] = ShardedTensor(pieces, torch.uint8, accepts=(torch.uint8,))

    def finalize(self, layer: LinearLayer) -> None:
        # One whole tensor: unpacking and packing take turns, and the waiting threads of one would delay the other.
        raw_NR = layer.tensors.pop("weight").whole
        bands = (self._checked(unpack_blocks(band_NR, self._type), layer) for band_NR in row_bands(raw_NR))
        layer.weight = pack_grouped_bands(bands, layer.out_features, layer.weight_memory)

    def _checked(self, weight: GroupedWeight, layer: LinearLayer) -> GroupedWeight:
        if weight.codes_NK.shape[1] != layer.in_features:
            raise WeightsError(
                f"rows in blocks of {self._type.name} are not as wide as the layer",
                value=weight.codes_NK.shape[1],
                expected=str(layer.in_features),
            )
        numbers = weight.float_scales if weight.super_scales_NS is None else weight.super_scales_NS
        offsets = weight.minima_NG if weight.super_minima_NS is None else weight.super_minima_NS
        check_finite(numbers)
        if offsets is not None:
            check_finite(offsets)
        return weight
