"""The contract of an attention backend.

Dimensions: T tokens, H query heads, E head dim, V elements of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.forward_batch import ForwardBatch, HostStep, LayerCache


@dataclass(frozen=True)
class AttentionSpec:
    """The needs of one layer. The cache's shape gives the block size: [blocks, kv heads, block size, head dim]."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # a factor of q.k
    sliding_window: int  # a token sees the positions > its own - window; 0: it sees all positions before it
    soft_cap: float  # cap * tanh(score / cap); 0 = none
    dtype: torch.dtype
    chunk: int = 0  # a token sees the positions of its own chunk of this size; 0: there are no chunks
    has_sinks: bool = False  # each head has a score without a value: see ops.paged_attention
    cache_dtype: torch.dtype | None = None  # the dtype of the KV cache; None: the same as `dtype`
    value_dim: int | None = None  # latent attention: the first value_dim elements of a key are its value; else None


class AttentionBackend(Protocol):
    """Causal attention of new tokens over the cache, for the layers of one AttentionSpec and one block table."""

    name: str

    def prepare(self, step: HostStep, cache: LayerCache) -> None:
        """Do the host's work for one step on a GPU, before the layers run. The backend keeps the result.

        Args:
            step: the lengths and block tables of the step, as numpy arrays on the host.
            cache: the KV cache of any layer that the backend serves.
        """
        ...

    def forward(self, q_THE: Tensor, cache: LayerCache, batch: ForwardBatch, sinks_H: Tensor | None = None) -> Tensor:
        """Compute causal attention of the step's tokens. The keys and values of these tokens are in the cache already.

        Args:
            q_THE: queries after the rotation (RoPE), in the spec's dtype.
            cache: the KV cache of the layer.
            batch: block tables and lengths of the step.
            sinks_H: the sink of each head, in q's dtype. It is given if and only if the spec has sinks.

        Returns:
            [T, H, V] in q's dtype, contiguous.
        """
        ...

    @staticmethod
    def unsupported(spec: AttentionSpec, device: torch.device) -> str | None:
        """The reason why this backend cannot serve such layers here, or None."""
        ...
