"""SmolLM3: Llama with every fourth layer without position encoding."""

from __future__ import annotations

from quire.hf_config.family import Family, GgufForm, by_layer_types
from quire.hf_config.fields import Fields


def has_rope(fields: Fields, layer: int) -> bool:
    """`no_rope_layers` holds 1 for a layer that uses rope."""
    flags = fields.sequence("no_rope_layers", int, fields.integer("num_hidden_layers"))
    return (layer + 1) % fields.integer("no_rope_layer_interval") != 0 if flags is None else bool(flags[layer])


def _has_window(fields: Fields, layer: int) -> bool:
    return not has_rope(fields, layer)


FAMILY = Family(
    model_type="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "eos_token_id": 128_001,
    },
    has_window=by_layer_types(_has_window),
    has_rope=has_rope,
    reads=("mlp_bias", "use_sliding_window"),
    gguf=GgufForm("smollm3", is_interleaved=True),
)
