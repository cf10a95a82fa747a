"""Phi-3, Phi-3.5 and Phi-4: Llama with fused checkpoints and longrope; Phi-4-mini rotates a part of each head."""

from __future__ import annotations

from typing import Any

from quire.hf_config.family import Family, GgufForm, always
from quire.hf_config.fields import Fields
from quire.hf_config.gguf_metadata import GgufMetadata


def _gguf_fields(metadata: GgufMetadata, sizes: Fields) -> dict[str, Any]:
    return {}  # the file's own window is enough


FAMILY = Family(
    model_type="phi3",
    architectures=("Phi3ForCausalLM",),
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32_000,
        "original_max_position_embeddings": 4096,
    },
    has_window=always,
    qkv_bias=False,
    has_fused_checkpoint=True,
    reads=("partial_rotary_factor",),
    gguf=GgufForm("phi3", _gguf_fields),
)
