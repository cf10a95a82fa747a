"""gpt-oss: every second layer has a window, heads have sinks, and experts have biases and a clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.hf_config.family import Family, GgufForm, LayerFacts, by_layer_types, decoder_layer
from quire.hf_config.feed_forward import ExpertsForm
from quire.hf_config.fields import Fields
from quire.hf_config.gguf_metadata import GgufMetadata
from quire.layer_spec.attention import Full
from quire.layer_spec.layer import LayerSpec

_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # the parameters of the kernels


def _has_window(fields: Fields, layer: int) -> bool:
    return layer % 2 == 0


def _gguf_fields(metadata: GgufMetadata, sizes: Fields) -> dict[str, Any]:
    return {}  # `_has_window` says which layers have the file's window


def _layer(facts: LayerFacts, layer: int) -> LayerSpec:
    for name, value in _SWIGLU.items():
        if facts.fields.number(name, value) != value:
            raise facts.fields.illegal(name, str(value))
    spec = decoder_layer(replace(facts, activation="clamped_swiglu"), layer)
    assert isinstance(spec.attention, Full)
    return replace(spec, attention=replace(spec.attention, sinks=True))


FAMILY = Family(
    model_type="gpt_oss",
    architectures=("GptOssForCausalLM",),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "eos_token_id": None,
    },
    has_window=by_layer_types(_has_window),
    experts=ExpertsForm(
        count=("num_local_experts",),
        width="intermediate_size",
        router="router",
        stacked_form="turns",
        has_bias=True,
        scoring="softmax_of_chosen",
    ),
    layer=_layer,
    gguf=GgufForm(
        "gpt-oss",
        _gguf_fields,
        names={"post_attention_norm": "post_attention_layernorm"},
        yarn=lambda metadata: {"truncate": False},
    ),
)
