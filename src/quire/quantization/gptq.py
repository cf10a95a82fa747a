"""GPTQ's layout: codes of 4 or 8 bits, packed along the in-features.

qweight [K/P, N] and qzeros [G, N/P] are int32 with P codes in a word, scales [G, N]; g_idx [K] is the group of each
in-feature. weight = scale * (code - zero). The first version stores zero - 1.
Dimensions: N out-features, K in-features, G groups along K, P codes in a word.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.hf_config.layer_format import LayerFormat
from quire.kernels.grouped_weight import GroupedWeight
from quire.quantization.packed import INT32, add_order, ordered, pack, unpack
from quire.quantization.scheme import CheckedTensor, LinearLayer, ShardedTensor


class GPTQ:
    """The Layout of GPTQ's tensors."""

    def create_weights(self, layer: LinearLayer, source: LayerFormat, group_size: int) -> None:
        K, P = layer.in_features, 32 // source.bits
        G = -(-K // group_size)
        sizes = [size for _, size in layer.shards]
        layer.tensors["qweight"] = ShardedTensor([(K // P, size) for size in sizes], torch.int32, 1, INT32)
        layer.tensors["scales"] = ShardedTensor([(G, size) for size in sizes], torch.float32, 1)
        zeros = [(G, size // P) for size in sizes]
        if source.has_zeros:
            layer.tensors["qzeros"] = ShardedTensor(zeros, torch.int32, 1, INT32)
        else:
            problem = partial(_problem_of_zeros, bits=source.bits)
            layer.checked_tensors["qzeros"] = CheckedTensor(tuple(zeros), INT32, problem)
        add_order(layer, "g_idx", source, group_size, INT32)

    def unpack(self, layer: LinearLayer, source: LayerFormat, group_size: int) -> GroupedWeight:
        codes_NK = unpack(layer.tensors["qweight"].whole.T, source.bits)
        zeros_NG = None
        if source.has_zeros:
            largest = (1 << source.bits) - 1  # this code means 0 in files of the first version
            zeros_NG = (unpack(layer.tensors["qzeros"].whole, source.bits) + source.zero_offset & largest).T
        codes_NK, order_K = ordered(codes_NK, layer.tensors.get("g_idx"), group_size)
        return GroupedWeight(
            codes_NK=codes_NK,
            bits=source.bits,
            group_size=group_size,
            scales_NG=layer.tensors["scales"].whole.T,
            zeros_NG=zeros_NG,
            order_K=order_K,
        )


def _problem_of_zeros(zeros: Tensor, bits: int) -> str | None:
    """The problem of a symmetric weight's zero points; None: all of them are the middle, or 1 less.

    Both are accepted, because some files give the wrong version.
    """
    middle = 1 << (bits - 1)
    codes = unpack(zeros, bits)
    if (codes == middle).all() or (codes == middle - 1).all():
        return None
    return "holds zero points, and the config says that the weights are symmetric"


def gptq_tensors(weight: GroupedWeight) -> dict[str, Tensor]:
    """The reverse, in the first version: the tensors of a symmetric weight, by the last part of their names."""
    assert weight.zeros_NG is None and weight.order_K is None
    zeros_GN = torch.full(weight.scales_NG.T.shape, (1 << (weight.bits - 1)) - 1)
    return {
        "qweight": pack(weight.codes_NK, weight.bits).T.contiguous(),
        "qzeros": pack(zeros_GN, weight.bits),
        "scales": weight.scales_NG.T.half().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // weight.group_size,
    }
