"""DeepSeek-V3 and R1, Kimi-K2, Moonlight: latent attention, experts that are chosen by groups with a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.families import deepseek_v2
from quire.hf_config.family import Family, LayerFacts, decoder_layer
from quire.hf_config.feed_forward import group_routing, group_routing_of_gguf
from quire.hf_config.fields import Fields
from quire.hf_config.gguf_metadata import GgufMetadata
from quire.hf_config.latent import DEFAULTS, latent_attention, latent_of_gguf
from quire.layer_spec.layer import LayerSpec


def _routing(fields: Fields) -> dict[str, Any]:
    fields.text("topk_method", ("noaux_tc",), "noaux_tc")
    return group_routing(fields) | {
        "has_bias_for_choice": True,
        "group_score": "top2",
        "normalizes": fields.flag("norm_topk_prob", True),
        "scale": fields.number("routed_scaling_factor", 1.0),
    }


def _layer(facts: LayerFacts, layer: int) -> LayerSpec:
    is_interleaved = facts.fields.flag("rope_interleave", True)
    attention = latent_attention(facts, f"model.layers.{layer}.self_attn.", is_interleaved)
    return replace(decoder_layer(facts, layer), attention=attention)


def _gguf_fields(metadata: GgufMetadata, sizes: Fields) -> dict[str, Any]:
    """A key that is missing means nothing, and not the default of the family."""
    missing = {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    return latent_of_gguf(metadata, sizes) | missing | group_routing_of_gguf(metadata)


FAMILY = Family(
    model_type="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "eos_token_id": 1,
        "num_nextn_predict_layers": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    head_dim_field="qk_rope_head_dim",
    experts=replace(deepseek_v2.EXPERTS, scoring="sigmoid", routing=_routing),
    layer=_layer,
    gguf=replace(deepseek_v2.GGUF, fields=_gguf_fields, fits=deepseek_v2.chooses_by_sigmoid),
)
