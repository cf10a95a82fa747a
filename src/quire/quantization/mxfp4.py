"""Experts of gpt-oss's checkpoints in MXFP4 (OCP Microscaling Formats 1.0).

Dimensions: K in-features, N out-features, G blocks of 32 along K, B bytes of a block.
"""

from __future__ import annotations

import torch

from quire.formats.weight_format import MXFP4
from quire.kernels.grouped import pack_grouped
from quire.kernels.grouped_weight import GroupedWeight
from quire.quantization.grouped import Grouped
from quire.quantization.packed import unpack_bytes
from quire.quantization.scheme import LinearLayer, ShardedTensor, check_finite


class Mxfp4(Grouped):
    """Weights arrive as `blocks`, uint8 [N, G, B]: two codes a byte, the first in the low half; and `scales` [N, G]."""

    def create_weights(self, layer: LinearLayer) -> None:
        block = MXFP4.group_size_of(layer.in_features)
        shapes = [(num_outputs, layer.in_features // block) for _, num_outputs in layer.shards]
        pieces = [(*shape, block // 2) for shape in shapes]
        layer.tensors["blocks"] = ShardedTensor(pieces, torch.uint8, accepts=(torch.uint8,))
        layer.tensors["scales"] = ShardedTensor(shapes, torch.uint8, accepts=(torch.uint8,))

    def finalize(self, layer: LinearLayer) -> None:
        blocks, scales = layer.tensors.pop("blocks"), layer.tensors.pop("scales")
        codes_NK = unpack_bytes(blocks.whole).flatten(1)
        weight = GroupedWeight(codes_NK=codes_NK, bits=4, group_size=32, scales_NG=scales.owned)
        check_finite(weight.float_scales)
        layer.weight = pack_grouped(weight, layer.weight_memory)
