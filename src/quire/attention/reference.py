"""Attention in plain torch, one sequence after the other: gather its blocks, dense softmax in float32.

Dimensions: T tokens, H query heads, G kv heads, E head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.backend import AttentionSpec
from quire.forward_batch import ForwardBatch, LayerCache
from quire.kernels.reference import paged_attention


class ReferenceAttention:
    """Runs on any device and for any spec."""

    name = "reference"

    def __init__(self, spec: AttentionSpec) -> None:
        self._scale, self._window, self._soft_cap = spec.scale, spec.sliding_window, spec.soft_cap

    @staticmethod
    def unsupported(spec: AttentionSpec, device: torch.device) -> str | None:
        return None

    def prepare(self, batch: ForwardBatch) -> None:
        """The batch is read as it is."""

    def forward(self, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        return paged_attention(
            q_THE,
            cache.k_BGPE,
            cache.v_BGPE,
            batch.block_tables_SM,
            batch.seq_lens_S,
            batch.cu_seqlens_q_S1,
            self._scale,
            self._window,
            self._soft_cap,
        )
