"""Attention by Quire's own kernels. They read the tensors of the batch and the cache directly.

Dimensions: T tokens, H query heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor

from quire.attention.backend import AttentionSpec
from quire.forward_batch import ForwardBatch, HostStep, LayerCache
from quire.kernels import cpu, gpu
from quire.kernels.layer_rules import AttentionRule
from quire.kernels.ops import paged_attention


class PagedAttention:
    """One call serves any mix of prompts and decodes. The op uses the kernels of the device, else plain torch."""

    name = "auto"
    attend: ClassVar[Callable[..., Tensor]] = staticmethod(paged_attention)

    def __init__(self, spec: AttentionSpec) -> None:
        self._rule = AttentionRule(spec.scale, spec.sliding_window, spec.soft_cap, spec.chunk)

    @staticmethod
    def unsupported(spec: AttentionSpec, device: torch.device) -> str | None:
        return None

    def prepare(self, step: HostStep, cache: LayerCache) -> None:
        """There is nothing to prepare."""

    def forward(self, q_THE: Tensor, cache: LayerCache, batch: ForwardBatch, sinks_H: Tensor | None = None) -> Tensor:
        tables_SM = batch.tables[cache.table].block_tables_SM
        return self.attend(
            q_THE, cache, tables_SM, batch.seq_lens_S, batch.cu_seqlens_q_S1, self._rule, sinks_H=sinks_H
        )


class CpuAttention(PagedAttention):
    """PagedAttention that insists on the compiled CPU kernels (csrc/kernels/attention*)."""

    name = "CPU_ATTN"

    @staticmethod
    def unsupported(spec: AttentionSpec, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it runs on CPU, not on {device.type}"
        if not cpu.available():
            return "the compiled kernels are not in use"
        if spec.head_dim > cpu.MAX_HEAD_DIM:
            return f"its kernel takes heads of up to {cpu.MAX_HEAD_DIM} dimensions, not {spec.head_dim}"
        return None


class TritonAttention(PagedAttention):
    """PagedAttention that insists on the Triton kernels (kernels/triton/attention.py)."""

    name = "TRITON_ATTN"

    @staticmethod
    def unsupported(spec: AttentionSpec, device: torch.device) -> str | None:
        if not gpu.serves(device):
            return f"it runs on CUDA, not on {device.type}"
        return None if find_spec("triton") else "Triton is not installed"
