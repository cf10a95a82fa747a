"""All GPU kernels under one name, for `kernels.ops`."""

from __future__ import annotations

from quire.kernels.triton.activation import gated_activation
from quire.kernels.triton.attention import paged_attention
from quire.kernels.triton.grouped import grouped_linear
from quire.kernels.triton.norm import rms_norm
from quire.kernels.triton.rope_cache import rope_and_cache
from quire.kernels.triton.sampling import greedy, sample

__all__ = ["gated_activation", "greedy", "grouped_linear", "paged_attention", "rms_norm", "rope_and_cache", "sample"]
