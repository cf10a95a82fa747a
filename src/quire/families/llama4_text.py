"""Llama 4, text: attention in chunks, but to all tokens in layers without rope; experts with a weighted input."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

from quire.families.smollm3 import has_rope
from quire.hf_config.family import Family, LayerFacts, decoder_layer
from quire.hf_config.feed_forward import ExpertsForm, gated_mlp
from quire.hf_config.fields import Fields
from quire.layer_spec.attention import Chunked, Full
from quire.layer_spec.feed_forward import FeedForward
from quire.layer_spec.layer import LayerSpec


def _has_experts(fields: Fields, layer: int) -> bool:
    """Whether `moe_layers` of the file has the layer; without this list, every `interleave_moe_layer_step`-th has."""
    layers = fields.sequence("moe_layers", int)
    return (layer + 1) % fields.integer("interleave_moe_layer_step") == 0 if layers is None else layer in layers


def _is_chunked(fields: Fields, layer: int) -> bool:
    """Whether `layer_types` of the file gives the layer chunks. Without this list, layers with rope have them."""
    layer_types = fields.sequence("layer_types", str, fields.integer("num_hidden_layers"))
    is_wanted = has_rope(fields, layer) if layer_types is None else layer_types[layer] == "chunked_attention"
    return is_wanted and fields.has("attention_chunk_size")


def _routing(fields: Fields) -> dict[str, Any]:
    return {"weighs_input": True}


def _shared_width(fields: Fields) -> int:
    return fields.integer("intermediate_size")


_EXPERTS = ExpertsForm(
    count=("num_local_experts",),
    width="intermediate_size",
    has_experts=_has_experts,
    prefix="feed_forward.",
    router="router",
    stacked_form="columns",
    scoring="sigmoid",
    routing=_routing,
    shared="shared_expert",
    shared_width=_shared_width,
)


def _layer(facts: LayerFacts, layer: int) -> LayerSpec:
    spec = decoder_layer(facts, layer)
    assert isinstance(spec.attention, Full)
    return replace(spec, attention=_attention(facts, layer, spec.attention), feed_forward=_feed_forward(facts, layer))


def _attention(facts: LayerFacts, layer: int, attention: Full) -> Full:
    fields, rotates = facts.fields, has_rope(facts.fields, layer)
    # Rows of q and k are in pairs also where nothing rotates. There the order of both does not matter.
    attention = replace(
        attention,
        qk_norm="unit" if rotates and fields.flag("use_qk_norm", True) else "none",
        qkv=replace(attention.qkv, paired_heads=(facts.num_q_heads, facts.num_kv_heads, 0)),
        temperature=0.0 if rotates or not fields.get("attn_temperature_tuning") else fields.number("attn_scale"),
        temperature_floor=fields.number("floor_scale", minimum=1.0),
    )
    if not _is_chunked(fields, layer):
        return attention
    common = {field.name: getattr(attention, field.name) for field in fields_of(attention)}
    return Chunked(size=fields.integer("attention_chunk_size"), **common)


def _feed_forward(facts: LayerFacts, layer: int) -> FeedForward:
    prefix, width = f"model.layers.{layer}.", facts.fields.integer("intermediate_size_mlp")
    if _has_experts(facts.fields, layer):
        return _EXPERTS.experts(facts.fields, prefix, facts.hidden_size, facts.activation)
    return gated_mlp(f"{prefix}feed_forward.", facts.hidden_size, width, facts.activation)


FAMILY = Family(
    model_type="llama4_text",
    # The second architecture has a vision tower. We run its text part; its config is nested and lacks more fields.
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    defaults={
        "vocab_size": 202_048,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size_mlp": 16_384,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    has_rope=has_rope,
    # The checkpoints with a vision tower nest the text model, in the way of transformers 4 or of 5.
    renamed_prefixes=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ),
    ignored_prefixes=("vision_model.", "multi_modal_projector.", "model.vision_model.", "model.multi_modal_projector."),
    layer=_layer,
)
