"""DeepSeek-V3 and R1, Kimi-K2, Moonlight: latent attention, experts in groups with a bias for the choice."""

from __future__ import annotations

from dataclasses import replace

from quire.hf_config.family import Family, LayerFacts, decoder_layer
from quire.hf_config.latent import DEFAULTS, latent_attention
from quire.layer_spec import LayerSpec


def _layer(facts: LayerFacts, layer: int) -> LayerSpec:
    fields = facts.fields
    if layer >= fields.integer("first_k_dense_replace", minimum=0):
        raise fields.illegal("first_k_dense_replace", "the number of layers: experts are not built yet")
    is_interleaved = fields.flag("rope_interleave", True)
    attention = latent_attention(facts, f"model.layers.{layer}.self_attn.", is_interleaved)
    return replace(decoder_layer(facts, layer), attention=attention)


FAMILY = Family(
    model_type="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "eos_token_id": 1,
        "num_nextn_predict_layers": 1,
    },
    head_dim_field="qk_rope_head_dim",
    layer=_layer,
)
