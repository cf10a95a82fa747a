"""compressed-tensors' integer layouts: pack-quantized with 4 or 8 bits, and int-quantized.

pack-quantized: weight_packed [N, K/P] int32, weight_scale [N, G]; optional: weight_zero_point [N/P, G] int32, packed
along N, and weight_g_idx [K]. Codes and zero points have no sign: the middle is added.
int-quantized: weight [N, K] int8, weight_scale [N, 1] or [1].
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

_INTEGERS = (torch.int32, torch.int64)


class PackQuantized:
    """The Layout pack-quantized."""

    def create_weights(self, layer: LinearLayer, source: LayerFormat, group_size: int) -> None:
        K, P = layer.in_features, 32 // source.bits
        G = -(-K // group_size)
        sizes = [size for _, size in layer.shards]
        layer.tensors["weight_packed"] = ShardedTensor([(size, -(-K // P)) for size in sizes], torch.int32, 0, INT32)
        layer.tensors["weight_scale"] = ShardedTensor([(size, G) for size in sizes], torch.float32)
        if source.has_zeros:
            zeros = [(size // P, G) for size in sizes]
            layer.tensors["weight_zero_point"] = ShardedTensor(zeros, torch.int32, 0, INT32)
        add_order(layer, "weight_g_idx", source, group_size, _INTEGERS)
        problem = partial(_problem_of_shape, sizes=sizes, K=K)
        layer.checked_tensors["weight_shape"] = CheckedTensor(tuple((2,) for _ in sizes), _INTEGERS, problem)

    def unpack(self, layer: LinearLayer, source: LayerFormat, group_size: int) -> GroupedWeight:
        codes_NK = unpack(layer.tensors["weight_packed"].whole, source.bits)[:, : layer.in_features]
        zeros_NG = None
        if source.has_zeros:
            zeros_NG = unpack(layer.tensors["weight_zero_point"].whole.T, source.bits).T
        codes_NK, order_K = ordered(codes_NK, layer.tensors.get("weight_g_idx"), group_size)
        return GroupedWeight(
            codes_NK=codes_NK,
            bits=source.bits,
            group_size=group_size,
            scales_NG=layer.tensors["weight_scale"].whole,
            zeros_NG=zeros_NG,
            order_K=order_K,
        )


class Int8:
    """The Layout int-quantized. While it runs, the layer quantizes activations to 8 bits per row, as W8A8 demands."""

    def create_weights(self, layer: LinearLayer, source: LayerFormat, group_size: int) -> None:
        sizes = [size for _, size in layer.shards]
        weights = [(size, layer.in_features) for size in sizes]
        layer.tensors["weight"] = ShardedTensor(weights, torch.int8, 0, (torch.int8,))
        scales = [(1,) if source.scales == "tensor" else (size, 1) for size in sizes]
        layer.tensors["weight_scale"] = ShardedTensor(scales, torch.float32)

    def unpack(self, layer: LinearLayer, source: LayerFormat, group_size: int) -> GroupedWeight:
        scales_N1 = layer.tensors["weight_scale"].whole
        if source.scales == "tensor":
            sizes = torch.tensor([size for _, size in layer.shards], device=scales_N1.device)
            scales_N1 = scales_N1.repeat_interleave(sizes).unsqueeze(1)
        return GroupedWeight(
            codes_NK=layer.tensors["weight"].whole.view(torch.uint8) ^ 128,
            bits=8,
            group_size=group_size,
            scales_NG=scales_N1,
        )


def _problem_of_shape(shape: Tensor, sizes: list[int], K: int) -> str | None:
    N = shape[0].item()
    return None if N in sizes and shape[1].item() == K else f"says [{N}, {shape[1].item()}]"


def pack_quantized_tensors(weight: GroupedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """The reverse: the tensors of a symmetric weight, by the last part of their names."""
    assert weight.zeros_NG is None and weight.order_K is None
    return {
        "weight_packed": pack(weight.codes_NK, weight.bits),
        "weight_scale": weight.scales_NG.to(scale_dtype),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def int8_tensors(weight: GroupedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """The reverse: the tensors of a symmetric 8-bit weight with a scale per out-feature."""
    assert weight.bits == 8 and weight.zeros_NG is None and weight.scales_NG.shape[1] == 1
    codes_NK = (weight.codes_NK.to(torch.int16) - 128).to(torch.int8)
    return {"weight": codes_NK, "weight_scale": weight.scales_NG.to(scale_dtype)}
