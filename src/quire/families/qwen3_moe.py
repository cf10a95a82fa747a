"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3 with experts, in all layers or in some."""

from __future__ import annotations

from typing import Any

from quire.families import qwen2, qwen2_moe
from quire.hf_config.family import Family, GgufForm, always
from quire.hf_config.fields import Fields
from quire.hf_config.gguf_metadata import GgufMetadata


def _gguf_fields(metadata: GgufMetadata, sizes: Fields) -> dict[str, Any]:
    return {**qwen2.gguf_fields(metadata, sizes), "norm_topk_prob": True}  # as in llama.cpp


FAMILY = Family(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    defaults={
        **qwen2.DEFAULTS,
        **qwen2_moe.DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    has_window=always,
    qk_norm="head",
    reads=("use_sliding_window",),
    experts=qwen2_moe.EXPERTS,
    gguf=GgufForm("qwen3moe", _gguf_fields),
)
