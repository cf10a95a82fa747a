"""OLMoE: Llama with experts; the norms of q and k cover all heads at once."""

from __future__ import annotations

from dataclasses import replace

from quire.families.qwen2_moe import routing
from quire.hf_config.family import Family, GgufForm, LayerFacts, decoder_layer
from quire.hf_config.feed_forward import ExpertsForm
from quire.layer_spec.attention import Full
from quire.layer_spec.layer import LayerSpec

_SMALLEST_CLIP = 1e-6


def _layer(facts: LayerFacts, layer: int) -> LayerSpec:
    spec = decoder_layer(facts, layer)
    assert isinstance(spec.attention, Full)
    clip = facts.fields.number("clip_qkv", minimum=_SMALLEST_CLIP) if facts.fields.has("clip_qkv") else 0.0
    return replace(spec, attention=replace(spec.attention, clip=clip))


FAMILY = Family(
    model_type="olmoe",
    architectures=("OlmoeForCausalLM",),
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50_279,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    qk_norm="full",
    experts=ExpertsForm(width="intermediate_size", routing=routing),
    layer=_layer,
    gguf=GgufForm("olmoe"),
)
