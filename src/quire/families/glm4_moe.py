"""GLM-4.5 and GLM-4.6: Llama with a partial rotation and experts in all layers but the first ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.families.deepseek_v2 import has_experts
from quire.hf_config.family import Family, GgufForm, LayerFacts, decoder_layer
from quire.hf_config.feed_forward import ExpertsForm, group_routing, group_routing_of_gguf
from quire.hf_config.fields import Fields
from quire.hf_config.gguf_metadata import GgufMetadata
from quire.layer_spec.attention import Full, QkNorm
from quire.layer_spec.layer import LayerSpec


def _routing(fields: Fields) -> dict[str, Any]:
    return {
        **group_routing(fields),
        "has_bias_for_choice": True,
        "group_score": "top2",
        "normalizes": fields.flag("norm_topk_prob", True),
        "scale": fields.number("routed_scaling_factor", 1.0),
    }


def _shared_width(fields: Fields) -> int:
    return fields.integer("n_shared_experts", 1, minimum=0) * fields.integer("moe_intermediate_size")


def _layer(facts: LayerFacts, layer: int) -> LayerSpec:
    """The output projection of attention has no bias; some models have norms of q and k."""
    spec = decoder_layer(facts, layer)
    assert isinstance(spec.attention, Full)
    output = replace(spec.attention.output, bias=False)
    qk_norm: QkNorm = "head" if facts.fields.flag("use_qk_norm", False) else "none"
    return replace(spec, attention=replace(spec.attention, output=output, qk_norm=qk_norm))


def _gguf_fields(metadata: GgufMetadata, sizes: Fields) -> dict[str, Any]:
    """The files count the layers that predict further tokens with the others."""
    drafting = metadata.fields(count="nextn_predict_layers").integer("count", 0, minimum=0)
    layers = sizes.integer("num_hidden_layers", minimum=drafting + 1)
    own = {"num_nextn_predict_layers": drafting, "num_hidden_layers": layers - drafting}
    return group_routing_of_gguf(metadata) | own


FAMILY = Family(
    model_type="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "eos_token_id": None,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
    reads=("partial_rotary_factor",),
    experts=ExpertsForm(
        count=("num_local_experts", "n_routed_experts"),
        has_experts=has_experts,
        scoring="sigmoid",
        routing=_routing,
        shared="shared_experts",
        shared_width=_shared_width,
    ),
    layer=_layer,
    gguf=GgufForm("glm4moe", _gguf_fields, names={"post_attention_norm": "post_attention_layernorm"}),
)
