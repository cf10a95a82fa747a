"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and one more for every token, whose result a gate weakens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.families import qwen2
from quire.hf_config.family import Family, GgufForm, LayerFacts, by_layer_types, decoder_layer
from quire.hf_config.feed_forward import ExpertsForm
from quire.hf_config.fields import Fields
from quire.layer_spec.attention import Full
from quire.layer_spec.layer import LayerSpec


def has_experts(fields: Fields, layer: int) -> bool:
    """Every `decoder_sparse_step`-th layer, without `mlp_only_layers`."""
    dense_layers = fields.sequence("mlp_only_layers", int) or []
    is_step = (layer + 1) % fields.integer("decoder_sparse_step", 1) == 0
    return is_step and layer not in dense_layers and EXPERTS.num_experts(fields) > 0


def routing(fields: Fields) -> dict[str, Any]:
    return {"normalizes": fields.flag("norm_topk_prob", False)}


def _first_layers(fields: Fields, layer: int) -> bool:
    return (layer + 1) % 2 != 0 and layer < fields.integer("max_window_layers", minimum=0)


def _shared_width(fields: Fields) -> int:
    return fields.integer("shared_expert_intermediate_size", minimum=0)


def _layer(facts: LayerFacts, layer: int) -> LayerSpec:
    spec = decoder_layer(facts, layer)
    assert isinstance(spec.attention, Full)
    qkv = replace(spec.attention.qkv, bias=facts.fields.flag("qkv_bias", True))
    return replace(spec, attention=replace(spec.attention, qkv=qkv))


EXPERTS = ExpertsForm(has_experts=has_experts, routing=routing)
DEFAULTS = {"decoder_sparse_step": 1, "norm_topk_prob": False}

FAMILY = Family(
    model_type="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    defaults={
        **qwen2.DEFAULTS,
        **DEFAULTS,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    has_window=by_layer_types(_first_layers),
    qkv_bias=True,
    reads=("use_sliding_window",),
    experts=replace(EXPERTS, shared="shared_expert", shared_width=_shared_width, shared_gate="shared_expert_gate"),
    layer=_layer,
    gguf=GgufForm("qwen2moe", qwen2.gguf_fields),
)
