"""All GPU kernels under one name, for `kernels.ops`."""

from __future__ import annotations

from quire.kernels.triton.activation import gated_activation, gated_activation_to_fp8
from quire.kernels.triton.attention import paged_attention, partial_attention
from quire.kernels.triton.dense import linear
from quire.kernels.triton.experts import combine, route
from quire.kernels.triton.fp8 import fp8_linear, quantize_rows
from quire.kernels.triton.grouped import grouped_linear
from quire.kernels.triton.latent import latent_attention, latent_rope_and_cache, partial_latent_attention
from quire.kernels.triton.lora import add_lora
from quire.kernels.triton.norm import norm, rms_norm_to_fp8
from quire.kernels.triton.parts import ExpertRows
from quire.kernels.triton.rope_cache import rope_and_cache
from quire.kernels.triton.sampling import forbid_tokens, greedy, sample

__all__ = [
    "ExpertRows",
    "add_lora",
    "combine",
    "forbid_tokens",
    "fp8_linear",
    "gated_activation",
    "gated_activation_to_fp8",
    "greedy",
    "grouped_linear",
    "latent_attention",
    "latent_rope_and_cache",
    "linear",
    "norm",
    "paged_attention",
    "partial_attention",
    "partial_latent_attention",
    "quantize_rows",
    "rms_norm_to_fp8",
    "rope_and_cache",
    "route",
    "sample",
]
