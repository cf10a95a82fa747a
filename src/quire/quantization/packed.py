"""Codes in 32-bit words, and the order of in-features by their groups, for several integer formats.

Dimensions: N out-features, K in-features, W words.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.errors import WeightsError
from quire.hf_config.layer_format import LayerFormat
from quire.quantization.scheme import CheckedTensor, LinearLayer, ShardedTensor

INT32 = (torch.int32,)


def unpack(words_W: Tensor, bits: int) -> Tensor:
    """int32 [..., W] -> uint8 [..., W * 32 / bits], a copy: codes of 4 or 8 bits, a word's lowest first."""
    assert words_W.dtype == torch.int32 and bits in (4, 8)
    codes = words_W.reshape(-1).view(torch.uint8).view(*words_W.shape[:-1], -1)  # one word may have any strides
    return codes.clone() if bits == 8 else unpack_bytes(codes)


def unpack_bytes(bytes_B: Tensor) -> Tensor:
    """uint8 [..., B] -> uint8 [..., 2 B], a copy: codes of 4 bits. The code in the low half of a byte comes first."""
    return torch.stack([bytes_B & 15, bytes_B >> 4], dim=-1).flatten(-2)


def pack(codes: Tensor, bits: int) -> Tensor:
    """The reverse: codes [..., W * 32 / bits] below 2^bits -> int32 [..., W]."""
    places = codes.reshape(*codes.shape[:-1], -1, 32 // bits).to(torch.int64)
    words_W = (places << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words_W >= 1 << 31, words_W - (1 << 32), words_W).to(torch.int32)


def add_order(
    layer: LinearLayer, name: str, source: LayerFormat, group_size: int, accepts: tuple[torch.dtype, ...]
) -> None:
    """Expect g_idx [K] as `layer.tensors[name]`. Without an order, only check that a stored g_idx has none."""
    K = layer.in_features
    if source.has_order:
        layer.tensors[name] = ShardedTensor([(K,)], torch.int32, accepts=accepts)
    else:
        problem = partial(_problem_of_order, group_size=group_size)
        layer.checked_tensors[name] = CheckedTensor(tuple((K,) for _ in layer.shards), accepts, problem)


def ordered(codes_NK: Tensor, groups: ShardedTensor | None, group_size: int) -> tuple[Tensor, Tensor | None]:
    """Codes with their columns sorted by group, and this order as int64.

    Raises WeightsError unless every group has `group_size` columns.
    """
    if groups is None:
        return codes_NK, None
    groups_K = groups.whole
    order_K = groups_K.argsort(stable=True)
    if not torch.equal(groups_K[order_K].long(), _side_by_side(groups_K, group_size)):
        raise WeightsError(f"g_idx does not give each group {group_size} in-features")
    return codes_NK[:, order_K], order_K


def _problem_of_order(groups_K: Tensor, group_size: int) -> str | None:
    """The problem of a g_idx that should be 0, 0, ..., 1, 1, ...; None: it has none. -1 means unset."""
    if torch.equal(groups_K.long(), _side_by_side(groups_K, group_size)) or (groups_K == -1).all():
        return None
    return "orders the in-features, and the config says that they are not ordered"


def _side_by_side(groups_K: Tensor, group_size: int) -> Tensor:
    """The groups of in-features of a weight without act-order: 0, 0, ..., 1, 1, ..."""
    return torch.arange(len(groups_K), device=groups_K.device) // group_size
