"""What the backends share whose kernel reads the batch's tensors and the cache as they are.

Dimensions: T tokens, H query heads, G kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from quire.attention.backend import AttentionSpec
from quire.forward_batch import ForwardBatch, HostStep, LayerCache


class PagedAttention:
    """One call for any mix of prompts and decodes."""

    attend: ClassVar[Callable[..., Tensor]]  # with the arguments of ops.paged_attention

    def __init__(self, spec: AttentionSpec) -> None:
        self._scale, self._window, self._soft_cap = spec.scale, spec.sliding_window, spec.soft_cap

    def prepare(self, step: HostStep, cache: LayerCache) -> None:
        """There is nothing to prepare."""

    def forward(self, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        return self.attend(
            q_THE,
            cache.k_BGPE,
            cache.v_BGPE,
            batch.tables[cache.table].block_tables_SM,
            batch.seq_lens_S,
            batch.cu_seqlens_q_S1,
            self._scale,
            self._window,
            self._soft_cap,
            k_scales_BGP=cache.k_scales_BGP,
            v_scales_BGP=cache.v_scales_BGP,
        )
