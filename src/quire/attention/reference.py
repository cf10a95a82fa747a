"""Attention in plain torch, one sequence after the other: gather its blocks, dense softmax in float32."""

from __future__ import annotations

from quire.attention.paged import PagedAttention
from quire.kernels.reference import paged_attention


class ReferenceAttention(PagedAttention):
    """Runs on any device and for any spec."""

    name = "reference"
    attend = staticmethod(paged_attention)
