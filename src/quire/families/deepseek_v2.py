"""DeepSeek-V2 and V2-Lite: latent attention, experts in groups."""

from __future__ import annotations

from dataclasses import replace

from quire.hf_config.family import Family, LayerFacts, decoder_layer
from quire.hf_config.latent import DEFAULTS, latent_attention
from quire.layer_spec import LayerSpec


def _layer(facts: LayerFacts, layer: int) -> LayerSpec:
    if layer >= facts.fields.integer("first_k_dense_replace", minimum=0):
        raise facts.fields.illegal("first_k_dense_replace", "the number of layers: experts are not built yet")
    attention = latent_attention(facts, f"model.layers.{layer}.self_attn.", is_interleaved=True)
    return replace(decoder_layer(facts, layer), attention=attention)


FAMILY = Family(
    model_type="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    defaults={**DEFAULTS, "max_position_embeddings": 2048, "first_k_dense_replace": 0},
    head_dim_field="qk_rope_head_dim",
    reads=("mlp_bias",),
    layer=_layer,
)
