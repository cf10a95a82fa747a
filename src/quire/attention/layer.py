"""Attention of one decoder layer: rotate q and k, write k and v to the paged cache, attend.

Dimensions: T tokens, H query heads, G kv heads, E head dim, L positions, R rotary dims.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.forward_batch import ForwardBatch, LayerCache
from quire.kernels.layer_rules import HeadRotation
from quire.kernels.ops import rope_and_cache
from quire.layer_spec.cuts import Share
from quire.layers.norm import RMSNorm
from quire.layers.weight_slot import WeightSlot, WeightSlots


class Sinks:
    """The attention sinks of a layer: each query head has one learned score that joins its softmax without a value.

    `scores_H` has the dtype of the activations. The source is gpt-oss; see ops.paged_attention.

    Args:
        num_heads: the number of query heads of this rank.
        share: the rank's share of the heads; None: it has all heads.
    """

    held = ("scores_H",)

    def __init__(self, num_heads: int, dtype: torch.dtype, share: Share | None = None) -> None:
        self.scores_H = torch.empty(num_heads, dtype=dtype)
        total_heads, self._own = (
            (num_heads, range(num_heads)) if share is None else (share.tensor_rows[0], share.own_rows(0))
        )
        self._shape = (total_heads,)

    def slots(self) -> WeightSlots:
        """The checkpoint's tensor `sinks` [all query heads]."""
        yield "sinks", WeightSlot(self._shape, self._load)

    def _load(self, scores_H: Tensor) -> None:
        self.scores_H = scores_H[self._own.start : self._own.stop].to(self.scores_H.dtype, copy=True)

    def weight_bytes(self) -> int:
        """Bytes of the scores of this rank."""
        return self.scores_H.nbytes


class Attention:
    """The part of a layer between its projections: norms of heads, rotation, the write to the cache, attention.

    Args:
        layer: the index of the layer's cache in ForwardBatch.caches.
        backend: the backend for the AttentionSpec of this layer.
        cos_sin_LR: the rotary table, float32; None: the layer has no position encoding.
        q_norm, k_norm: norms of single heads (their weights have E elements). They come before the rotation.
        sinks: the sinks of the heads; None: the heads have none.
        temperature, temperature_floor: they scale the queries by position; see HeadRotation.
    """

    def __init__(
        self,
        layer: int,
        backend: AttentionBackend,
        cos_sin_LR: Tensor | None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        *,
        sinks: Sinks | None = None,
        temperature: float = 0.0,
        temperature_floor: float = 1.0,
    ) -> None:
        assert (q_norm is None) == (k_norm is None)
        self._layer = layer
        self._attend = backend.forward
        self._q_norm, self._k_norm, self._sinks = q_norm, k_norm, sinks
        self._rotation = HeadRotation(cos_sin_LR, temperature=temperature, temperature_floor=temperature_floor)

    def __call__(self, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, batch: ForwardBatch) -> Tensor:
        """The result of attention, [T, H, E], contiguous, in q's dtype.

        q, k and v may be views of one fused tensor. q and k may change in place.
        """
        cache = self.write(q_THE, k_TGE, v_TGE, batch)
        if self._sinks is None:
            return self._attend(q_THE, cache, batch)
        return self._attend(q_THE, cache, batch, self._sinks.scores_H)

    def write(self, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, batch: ForwardBatch) -> LayerCache:
        """Rotate q and k, and write k and v to the cache of the layer, which is returned."""
        cache = batch.caches[self._layer]
        slots_T = batch.tables[cache.table].slot_mapping_T
        rope_and_cache(q_THE, k_TGE, v_TGE, batch.positions_T, slots_T, cache, self._head_rotation())
        return cache

    def _head_rotation(self) -> HeadRotation:
        """The rotation with the present weights of the norms. It is made again when the norms have other tensors."""
        q_norm, k_norm, made = self._q_norm, self._k_norm, self._rotation
        if q_norm is None or k_norm is None:
            return made
        if made.q_norm_weight_E is not q_norm.weight_D or made.k_norm_weight_E is not k_norm.weight_D:
            made = self._rotation = replace(
                made,
                q_norm_weight_E=q_norm.weight_D,
                k_norm_weight_E=k_norm.weight_D,
                norm_eps=q_norm.eps,
                norm_weight_offset=q_norm.offset,
            )
        return made
