"""DeepSeek-V2 and V2-Lite: latent attention, experts that are chosen by groups, experts for every token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.hf_config.family import Family, GgufForm, LayerFacts, decoder_layer
from quire.hf_config.feed_forward import SIGMOID_OF_GGUF, ExpertsForm, group_routing, group_routing_of_gguf
from quire.hf_config.fields import Fields
from quire.hf_config.gguf_metadata import GgufMetadata
from quire.hf_config.latent import DEFAULTS, GGUF_NAMES, latent_attention, latent_of_gguf, yarn_of_gguf
from quire.layer_spec.layer import LayerSpec


def has_experts(fields: Fields, layer: int) -> bool:
    return layer >= fields.integer("first_k_dense_replace", minimum=0)


def shared_width(fields: Fields) -> int:
    return fields.integer("n_shared_experts", 0, minimum=0) * fields.integer("moe_intermediate_size")


def _routing(fields: Fields) -> dict[str, Any]:
    """Weights are not normalised, whatever norm_topk_prob says. transformers does the same."""
    method = fields.text("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    groups = {} if method == "greedy" else group_routing(fields) | {"group_score": "max"}
    return groups | {"scale": fields.number("routed_scaling_factor", 1.0)}


def _layer(facts: LayerFacts, layer: int) -> LayerSpec:
    attention = latent_attention(facts, f"model.layers.{layer}.self_attn.", is_interleaved=True)
    return replace(decoder_layer(facts, layer), attention=attention)


def chooses_by_sigmoid(metadata: GgufMetadata) -> bool:
    """Whether a file of llama.cpp's architecture is of DeepSeek-V3; else it is of V2."""
    return bool(metadata.get("expert_gating_func") == SIGMOID_OF_GGUF)


def _gguf_fields(metadata: GgufMetadata, sizes: Fields) -> dict[str, Any]:
    fields = latent_of_gguf(metadata, sizes) | group_routing_of_gguf(metadata)
    return fields | {"topk_method": "group_limited_greedy" if fields.get("n_group", 1) > 1 else "greedy"}


GGUF = GgufForm("deepseek2", names=GGUF_NAMES, yarn=yarn_of_gguf)
EXPERTS = ExpertsForm(
    count=("num_local_experts", "n_routed_experts"),
    has_experts=has_experts,
    routing=_routing,
    shared="shared_experts",
    shared_width=shared_width,
)

FAMILY = Family(
    model_type="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    head_dim_field="qk_rope_head_dim",
    reads=("mlp_bias",),
    experts=EXPERTS,
    layer=_layer,
    gguf=replace(GGUF, fields=_gguf_fields, fits=lambda metadata: not chooses_by_sigmoid(metadata)),
)
