"""Attention by the compiled CPU kernel.

Dimensions: T tokens, H query heads, G kv heads, E head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.backend import AttentionSpec
from quire.forward_batch import ForwardBatch, LayerCache
from quire.kernels import cpu
from quire.kernels.ops import paged_attention


class CpuAttention:
    """One kernel call for any mix of prompts and decodes."""

    name = "cpu"

    def __init__(self, spec: AttentionSpec) -> None:
        self._scale, self._window, self._soft_cap = spec.scale, spec.sliding_window, spec.soft_cap

    @staticmethod
    def unsupported(spec: AttentionSpec, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it runs on CPU, not on {device.type}"
        if not cpu.available():
            return "the compiled kernels are not in use"
        if spec.head_dim > cpu.MAX_HEAD_DIM:
            return f"its kernel takes heads of up to {cpu.MAX_HEAD_DIM} dimensions, not {spec.head_dim}"
        return None

    def prepare(self, batch: ForwardBatch) -> None:
        """The kernel reads the batch's tensors as they are."""

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
