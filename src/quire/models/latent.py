"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with absorbed matrices.

Queries are brought into the space of the latent rows, and attention runs over the cached rows themselves. Prompts and
decodes use the same arithmetic, so a token's bits do not depend on the step that computes it.

Dimensions: T tokens, D hidden, H heads, L latents and rotating elements of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.forward_batch import ForwardBatch
from quire.kernels.fp8 import Rows
from quire.kernels.layer_rules import LatentRotation
from quire.kernels.ops import latent_rope_and_cache
from quire.layer_spec.attention import Latent
from quire.layers.joined import JoinedLinear
from quire.layers.linear import Projection
from quire.layers.norm import RMSNorm
from quire.layers.up_projection import UpProjection


class LatentAttention:
    """Latent attention with its projections. Input [T, D], output [T, D].

    Args:
        layer: the index of the layer's cache in ForwardBatch.caches.
        reader: the layer that reads the input. It gives latent rows [T, L] and the queries, or the input of `query`.
        row_norm: the norm of the latents of a row; the rotating elements have none.
        up: maps queries to latents, and latents to values.
        query, query_norm: the second layer for queries, and the norm before it; None: `reader` gives the queries.
    """

    def __init__(
        self,
        spec: Latent,
        layer: int,
        backend: AttentionBackend,
        rotation: LatentRotation,
        *,
        reader: Projection,
        row_norm: RMSNorm,
        up: UpProjection,
        output: Projection | JoinedLinear,
        query: Projection | None,
        query_norm: RMSNorm | None,
    ) -> None:
        self._layer, self._attend, self._rotation = layer, backend.forward, rotation
        self.reader, self._row_norm, self._up, self._output = reader, row_norm, up, output
        self._query, self._query_norm = query, query_norm
        self._num_heads, self._head_dims = spec.num_heads, (spec.nope_dim, spec.rope_dim)
        self._row = (spec.rank, spec.rope_dim)
        self._widths = (spec.input.out_features - sum(self._row), sum(self._row))

    def __call__(self, x_TD: Rows, batch: ForwardBatch) -> Tensor:
        values = self._up.to_values(self._attend(self._queries(x_TD, batch), batch.caches[self._layer], batch))
        values_TW = values.view(values.shape[0], values.shape[1] * values.shape[2])
        return self._output(values_TW, adapter_slots_T=batch.adapter_slots_T)

    def write(self, x_TD: Rows, batch: ForwardBatch) -> None:
        """Write the rows to the cache, and do not attend."""
        self._queries(x_TD, batch)

    def _queries(self, x_TD: Rows, batch: ForwardBatch) -> Tensor:
        """Write the rows to the cache. The result is the queries in the space of the rows, [T, H, L]."""
        slots_T = batch.adapter_slots_T
        q, rows_TL = self.reader(x_TD, adapter_slots_T=slots_T).split_with_sizes(self._widths, 1)
        if self._query is not None and self._query_norm is not None:
            q = self._query(self._query_norm(q), adapter_slots_T=slots_T)
        T, (rank, rope_dim) = q.shape[0], self._row
        latents = rows_TL.narrow(1, 0, rank)
        self._row_norm(latents, out=latents)
        q_nope, q_rope = q.view(T, self._num_heads, sum(self._head_dims)).split_with_sizes(self._head_dims, 2)
        absorbed_THL = torch.empty((T, self._num_heads, rank + rope_dim), dtype=q.dtype, device=q.device)
        to_latents, to_rope = absorbed_THL.split_with_sizes(self._row, 2)
        self._up.to_latents(q_nope, to_latents)
        cache = batch.caches[self._layer]
        cache_slots_T = batch.tables[cache.table].slot_mapping_T
        latent_rope_and_cache(q_rope, rows_TL, batch.positions_T, cache_slots_T, cache, self._rotation, to_rope)
        return absorbed_THL
