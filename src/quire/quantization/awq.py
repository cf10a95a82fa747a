"""AutoAWQ's gemm layout: 4-bit codes with zero points, packed along the out-features.

qweight [K, N/8] and qzeros [G, N/8] are int32, scales [G, N]; weight = scale * (code - zero).
Dimensions: N out-features, K in-features, G groups along K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.hf_config.layer_format import LayerFormat
from quire.kernels.grouped_weight import GroupedWeight
from quire.quantization.packed import INT32, pack
from quire.quantization.scheme import LinearLayer, ShardedTensor

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the out-features in a word of eight codes, from the lowest code


class AWQ:
    """The Layout of AutoAWQ's tensors."""

    def create_weights(self, layer: LinearLayer, source: LayerFormat, group_size: int) -> None:
        K, sizes = layer.in_features, [size for _, size in layer.shards]
        G = -(-K // group_size)
        layer.tensors["qweight"] = ShardedTensor([(K, size // 8) for size in sizes], torch.int32, 1, INT32)
        layer.tensors["qzeros"] = ShardedTensor([(G, size // 8) for size in sizes], torch.int32, 1, INT32)
        layer.tensors["scales"] = ShardedTensor([(G, size) for size in sizes], torch.float32, 1)

    def unpack(self, layer: LinearLayer, source: LayerFormat, group_size: int) -> GroupedWeight:
        return GroupedWeight(
            codes_NK=_by_output(layer.tensors["qweight"].whole),
            bits=4,
            group_size=group_size,
            scales_NG=layer.tensors["scales"].whole.T,
            zeros_NG=_by_output(layer.tensors["qzeros"].whole),
        )


def _by_output(words: Tensor) -> Tensor:
    """[rows, N/8] -> [N, rows]. Words are transposed before they are split: there are eight times fewer of them."""
    bytes_of_words = words.T.reshape(-1).view(torch.uint8).view(words.shape[1], words.shape[0], 4)
    codes = torch.empty((words.shape[1], 8, words.shape[0]), dtype=torch.uint8, device=words.device)
    for i in range(4):
        torch.bitwise_and(bytes_of_words[:, :, i], 15, out=codes[:, _ORDER[2 * i]])
        torch.bitwise_right_shift(bytes_of_words[:, :, i], 4, out=codes[:, _ORDER[2 * i + 1]])
    return codes.flatten(0, 1)


def awq_tensors(weight: GroupedWeight) -> dict[str, Tensor]:
    """The reverse of `AWQ.unpack`: the tensors of a 4-bit weight with zero points, by the last part of their names."""
    assert weight.bits == 4 and weight.zeros_NG is not None and weight.order_K is None
    return {
        "qweight": _words(weight.codes_NK.T),
        "qzeros": _words(weight.zeros_NG.T),
        "scales": weight.scales_NG.T.half().contiguous(),
    }


def _words(codes: Tensor) -> Tensor:
    """[rows, N] -> [rows, N/8]."""
    return pack(codes.reshape(len(codes), -1, 8)[:, :, _ORDER].flatten(1), 4)
