"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v."""

from __future__ import annotations

from typing import Any

from quire.hf_config.family import Family, GgufForm, by_layer_types
from quire.hf_config.fields import Fields
from quire.hf_config.gguf_metadata import GgufMetadata

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "eos_token_id": None,
}


def _last_layers(fields: Fields, layer: int) -> bool:
    return layer >= fields.integer("max_window_layers", minimum=0)


def gguf_fields(metadata: GgufMetadata, sizes: Fields) -> dict[str, Any]:
    metadata.refuse_windows(sizes)
    return {"use_sliding_window": False}


has_window = by_layer_types(_last_layers)

FAMILY = Family(
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM",),
    defaults=DEFAULTS,
    has_window=has_window,
    qkv_bias=True,
    reads=("use_sliding_window",),
    gguf=GgufForm("qwen2", gguf_fields),
)
