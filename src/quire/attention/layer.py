"""Attention of one decoder layer: rotate q and k, write k and v to the paged cache, attend.

Dimensions: T tokens, H query heads, G kv heads, E head dim, L positions, R rotary dims.
"""

from __future__ import annotations

from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.forward_batch import ForwardBatch
from quire.kernels.layer_rules import HeadRotation
from quire.kernels.ops import rope_and_cache
from quire.layers.norm import RMSNorm


class Attention:
    """Everything between the projections of one layer.

    Args:
        layer: index of the layer's cache in ForwardBatch.caches.
        backend: for the AttentionSpec of this layer.
        cos_sin_LR: rotary table, float32; None for a layer without position encoding.
        q_norm, k_norm: norms of single heads (weights of E), applied before the rotation.
    """

    def __init__(
        self,
        layer: int,
        backend: AttentionBackend,
        cos_sin_LR: Tensor | None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        assert (q_norm is None) == (k_norm is None)
        self._layer = layer
        self._attend = backend.forward
        self._q_norm, self._k_norm = q_norm, k_norm
        self._rotation = HeadRotation(cos_sin_LR)

    def __call__(self, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, H, E], contiguous. q, k, v may be views of one fused tensor; q and k may change in place."""
        cache = batch.caches[self._layer]
        slots_T = batch.tables[cache.table].slot_mapping_T
        rope_and_cache(q_THE, k_TGE, v_TGE, batch.positions_T, slots_T, cache, self._head_rotation())
        return self._attend(q_THE, cache, batch)

    def _head_rotation(self) -> HeadRotation:
        """The rotation. It is made again after the norms got other weights."""
        q_norm, k_norm, made = self._q_norm, self._k_norm, self._rotation
        if q_norm is None or k_norm is None:
            return made
        if made.q_norm_weight_E is not q_norm.weight_D or made.k_norm_weight_E is not k_norm.weight_D:
            weights = (q_norm.weight_D, k_norm.weight_D)
            made = self._rotation = HeadRotation(made.cos_sin_PR, *weights, q_norm.eps, q_norm.offset)
        return made
