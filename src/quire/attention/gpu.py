"""Attention by the Triton kernel."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from quire.attention.backend import AttentionSpec
from quire.attention.paged import PagedAttention
from quire.kernels import gpu
from quire.kernels.ops import paged_attention


class TritonAttention(PagedAttention):
    """The kernels of kernels/triton/attention.py."""

    name = "triton"
    attend = staticmethod(paged_attention)

    @staticmethod
    def unsupported(spec: AttentionSpec, device: torch.device) -> str | None:
        if not gpu.serves(device):
            return f"it runs on CUDA, not on {device.type}"
        return None if find_spec("triton") else "Triton is not installed"
