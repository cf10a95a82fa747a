"""Random weights of every form that `GroupedWeight` has."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.formats.weight_format import MXFP4, GroupedFormat
from quire.kernels.grouped_weight import GroupedWeight

# The forms of `--quantization`. Groups of one AMX step (64), of half a step (32), of several (128), a whole row.
PLAIN_FORMATS = [
    GroupedFormat(8, None),
    GroupedFormat(8, 128),
    GroupedFormat(8, 32),
    GroupedFormat(4, 128),
    GroupedFormat(4, 64),
    GroupedFormat(4, 32),
]
# The forms of checkpoints; a comment names the best-known format.
FORMATS = [
    *PLAIN_FORMATS,
    GroupedFormat(4, 32, "float16"),  # GGUF's Q4_0
    GroupedFormat(8, 32, "float16"),  # Q8_0
    GroupedFormat(4, 32, "float16", "float16"),  # Q4_1
    GroupedFormat(4, 32, "int8", "int8", super_size=8),  # Q4_K
    GroupedFormat(5, 32, "int8", "int8", super_size=8),  # Q5_K
    GroupedFormat(2, 16, "int8", "int8", super_size=16),  # Q2_K
    GroupedFormat(3, 16, "int8", super_size=16),  # Q3_K
    GroupedFormat(6, 16, "int8", super_size=16),  # Q6_K
    GroupedFormat(5, 32, "float16"),  # Q5_0
    MXFP4,
    GroupedFormat(4, 128, "float16", "uint8"),  # AWQ
    GroupedFormat(8, 64, "float16", "uint8", is_ordered=True),  # GPTQ with act-order
    GroupedFormat(8, None, "float32", "uint8"),
    # large: parts of a group take turns; not of whole AMX tiles
    GroupedFormat(4, None),
    GroupedFormat(2, 592, "float16", "float16"),
    GroupedFormat(3, None),
    GroupedFormat(4, 16, "int8", "int8", super_size=16, is_ordered=True),
    GroupedFormat(5, None, "float32", "uint8"),
    GroupedFormat(6, None),
    GroupedFormat(8, 592, "float16"),
    GroupedFormat(6, 592, "float16", "uint8"),
    GroupedFormat(4, 48, "float32", "float32", is_ordered=True),
]


def random_weight(weight_format: GroupedFormat, N: int, K: int) -> GroupedWeight:
    """Elements of the order of 1 / sqrt(K)."""
    bits, group_size, offsets = weight_format.bits, weight_format.group_size_of(K), weight_format.offsets
    G = -(-K // group_size)
    S = -(-G // weight_format.super_size)
    generator = torch.Generator().manual_seed(N * 7919 + K)

    def numbers(name: str, largest: float) -> tuple[Tensor, Tensor | None]:
        """Per group and, for factors, per super-group."""
        if name == "int8":
            super_NS = (torch.rand(N, S, generator=generator) * (largest / 127)).half()
            return torch.randint(-128, 128, (N, G), dtype=torch.int8, generator=generator), super_NS
        if name == "e8m0":  # the mean of squares of the values is about 8
            highest = 127 - round(math.log2(K) / 2)
            return torch.randint(highest - 4, highest, (N, G), dtype=torch.uint8, generator=generator), None
        return (torch.randn(N, G, generator=generator) * largest).to(getattr(torch, name)), None

    scales_NG, super_scales_NS = numbers(weight_format.scales, 2.0**-bits / K**0.5)
    zeros_NG = minima_NG = super_minima_NS = None
    if offsets == "uint8":
        zeros_NG = torch.randint(0, 1 << bits, (N, G), dtype=torch.uint8, generator=generator)
    elif offsets is not None:
        minima_NG, super_minima_NS = numbers(offsets, 1 / K**0.5)
    return GroupedWeight(
        codes_NK=torch.randint(0, 1 << bits, (N, K), dtype=torch.uint8, generator=generator),
        bits=bits,
        group_size=group_size,
        scales_NG=scales_NG,
        zeros_NG=zeros_NG,
        minima_NG=minima_NG,
        super_scales_NS=super_scales_NS,
        super_minima_NS=super_minima_NS,
        super_size=weight_format.super_size,
        order_K=torch.randperm(K, generator=generator) if weight_format.is_ordered else None,
    )
