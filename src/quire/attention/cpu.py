"""Attention by the compiled CPU kernel."""

from __future__ import annotations

import torch

from quire.attention.backend import AttentionSpec
from quire.attention.paged import PagedAttention
from quire.kernels import cpu
from quire.kernels.ops import paged_attention


class CpuAttention(PagedAttention):
    """The kernels of csrc/kernels/attention*."""

    name = "cpu"
    attend = staticmethod(paged_attention)

    @staticmethod
    def unsupported(spec: AttentionSpec, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it runs on CPU, not on {device.type}"
        if not cpu.available():
            return "the compiled kernels are not in use"
        if spec.head_dim > cpu.MAX_HEAD_DIM:
            return f"its kernel takes heads of up to {cpu.MAX_HEAD_DIM} dimensions, not {spec.head_dim}"
        return None
