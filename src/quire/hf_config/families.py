"""What config.json leaves out, per model_type: defaults of transformers' config classes, constants of its models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.hf_config.family import POST_NORM, SANDWICH, HfFamily, LayerRule, always
from quire.hf_config.fields import Fields


def _by_layer_types(default: LayerRule) -> LayerRule:
    """`layer_types` decides where the file has it, else `default`."""

    def has_window(fields: Fields, layer: int) -> bool:
        layer_types = fields.sequence("layer_types", str, fields.integer("num_hidden_layers"))
        return default(fields, layer) if layer_types is None else layer_types[layer] == "sliding_attention"

    return has_window


def _qwen_window(fields: Fields, layer: int) -> bool:
    return layer >= fields.integer("max_window_layers", minimum=0)


def _gemma2_window(fields: Fields, layer: int) -> bool:
    return layer % 2 == 0


def _gemma3_window(fields: Fields, layer: int) -> bool:
    return (layer + 1) % fields.integer("sliding_window_pattern") != 0


def _smollm3_rope(fields: Fields, layer: int) -> bool:
    """`no_rope_layers` holds 1 where a layer does use rope."""
    flags = fields.sequence("no_rope_layers", int, fields.integer("num_hidden_layers"))
    return (layer + 1) % fields.integer("no_rope_layer_interval") != 0 if flags is None else bool(flags[layer])


def _smollm3_window(fields: Fields, layer: int) -> bool:
    return not _smollm3_rope(fields, layer)


_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "eos_token_id": None,
}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
}

_GEMMA_READS = ("query_pre_attn_scalar", "final_logit_softcapping", "hidden_activation")

FAMILIES: dict[str, HfFamily] = {
    "llama": HfFamily(("LlamaForCausalLM",), {"max_position_embeddings": 2048}, reads=("mlp_bias",)),
    "mistral": HfFamily(
        ("MistralForCausalLM",),
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072},
        has_window=always,
        qkv_bias=False,
    ),
    "qwen2": HfFamily(
        ("Qwen2ForCausalLM",),
        _QWEN,
        has_window=_by_layer_types(_qwen_window),
        qkv_bias=True,
        reads=("use_sliding_window",),
    ),
    "qwen3": HfFamily(
        ("Qwen3ForCausalLM",),
        {**_QWEN, "head_dim": 128},
        has_window=_by_layer_types(_qwen_window),
        qk_norm="head",
        reads=("use_sliding_window",),
    ),
    "gemma2": HfFamily(
        ("Gemma2ForCausalLM",),
        {**_GEMMA, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        has_window=_by_layer_types(_gemma2_window),
        norms=SANDWICH,
        reads=(*_GEMMA_READS, "attn_logit_softcapping"),
        scales_embeddings=True,
    ),
    "gemma3_text": HfFamily(
        # The second has a vision tower; we run its text part, whose config is nested and leaves out more than others.
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        {
            **_GEMMA,
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        has_window=_by_layer_types(_gemma3_window),
        qk_norm="head",
        norms=SANDWICH,
        reads=(*_GEMMA_READS, "rope_local_base_freq"),
        scales_embeddings=True,
    ),
    "phi3": HfFamily(
        ("Phi3ForCausalLM",),
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32_000,
            "original_max_position_embeddings": 4096,
        },
        has_window=always,
        qkv_bias=False,
        has_fused_checkpoint=True,
        reads=("partial_rotary_factor",),
    ),
    "smollm3": HfFamily(
        ("SmolLM3ForCausalLM",),
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
            "eos_token_id": 128_001,
        },
        has_window=_by_layer_types(_smollm3_window),
        has_rope=_smollm3_rope,
        reads=("mlp_bias", "use_sliding_window"),
    ),
    "olmo2": HfFamily(
        ("Olmo2ForCausalLM",),
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50_279},
        qk_norm="full",
        norms=POST_NORM,
    ),
    "granite": HfFamily(
        ("GraniteForCausalLM",),
        {"max_position_embeddings": 2048, "attention_multiplier": 1.0},
        reads=("mlp_bias", "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    ),
}

# What changes the arithmetic of some families only, with the value that changes nothing.
OPTIONAL_FIELDS: Mapping[str, Any] = {
    "partial_rotary_factor": 1.0,
    "rope_local_base_freq": None,
    "use_sliding_window": True,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "hidden_activation": None,
    "mlp_bias": False,
}

COMMON_DEFAULTS: Mapping[str, Any] = {
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "eos_token_id": 2,
}

# For architectures that only the transformers backend runs; older ones call the same things otherwise.
UNKNOWN = HfFamily((), {"eos_token_id": None})
ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "max_position_embeddings": (
        *("n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length", "model_max_length"),
    ),
}

NATIVE_ARCHITECTURES: tuple[str, ...] = tuple(name for family in FAMILIES.values() for name in family.architectures)
