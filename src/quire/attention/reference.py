"""Attention in plain torch: for one sequence after the other it gathers the blocks and computes a dense softmax.

Sums and softmax are float32. See kernels/reference.py.
"""

from __future__ import annotations

from quire.attention.paged import PagedAttention
from quire.kernels.reference import paged_attention


class ReferenceAttention(PagedAttention):
    """PagedAttention in plain torch. It runs on any device and for any spec."""

    name = "reference"
    attend = staticmethod(paged_attention)
