"""Attention over some of the pages of a sequence, and the join of such results. Each page holds one range of keys.

GPUs have Triton kernels. Other tensors use plain torch.

Dimensions: T tokens, H query heads, E head dim, V value dim, S sequences, M blocks per sequence, N owners of pages.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels import gpu, reference
from quire.kernels.layer_rules import AttentionRule


class Partials(NamedTuple):
    """Attention over some keys, float32. A row that sees none of them has the maximum -inf, and zeros.

    Attributes:
        values_THV: the sums of values, not divided by the sums of weights.
        maxima_TH: the largest score, times log2(e).
        sums_TH: the sums of weights, relative to the maximum.
    """

    values_THV: Tensor
    maxima_TH: Tensor
    sums_TH: Tensor


def partial_attention(
    q_THE: Tensor,
    cache: LayerCache,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    cu_seqlens_q_S1: Tensor,
    rule: AttentionRule,
    num_owners: int,
    owner: int,
) -> Partials:
    """Causal attention over the pages of one of several owners. Ranges are joined in their order.

    Args:
        cache: the pages of this owner: page p of the tables is its page p // num_owners, if p % num_owners is `owner`.

    The other arguments are those of ops.paged_attention. Tokens after the last sequence have no result.
    """
    arguments = (q_THE, cache, block_tables_SM, seq_lens_S, cu_seqlens_q_S1, rule)
    if not gpu.takes(q_THE):
        return Partials(*reference.partial_attention(*arguments, num_owners, owner))
    (T, H, E), V = q_THE.shape, cache.v_BGPE.shape[3]
    found = Partials(
        torch.empty((T, H, V), dtype=torch.float32, device=q_THE.device),
        *torch.empty((2, T, H), dtype=torch.float32, device=q_THE.device),
    )
    kernels = gpu.kernels()
    attend = kernels.partial_attention if V == E else kernels.partial_latent_attention
    attend(*arguments, found, num_owners, owner)
    return found


def join_partials(partials: Partials, sinks_H: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Join the results of all owners, in their order: [T, H, V] of `dtype`.

    Args:
        partials: with N owners as the first dimension of each tensor.
        sinks_H: see ops.paged_attention.
    """
    maximum_TH, sinks = partials.maxima_TH.amax(0), None
    if sinks_H is not None:
        sinks = sinks_H.float() * math.log2(math.e)
        maximum_TH = torch.maximum(maximum_TH, sinks)
    weights_NTH = torch.exp2(partials.maxima_TH - maximum_TH)
    total_TH = (weights_NTH * partials.sums_TH).sum(0)
    if sinks is not None:
        total_TH = total_TH + torch.exp2(sinks - maximum_TH)
    values_THV = (weights_NTH[..., None] * partials.values_THV).sum(0)
    return (values_THV / total_TH[..., None]).to(dtype)
