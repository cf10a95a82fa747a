"""Phi-3.5-MoE: Mixtral with layer norms, biases also of the logits, sparsemixer's routing and longrope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.families import mixtral
from quire.hf_config.family import Family, always
from quire.hf_config.fields import Fields


def _routing(fields: Fields) -> dict[str, Any]:
    return {"jitter": fields.number("router_jitter_noise", minimum=0.0)}


FAMILY = Family(
    model_type="phimoe",
    architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
    },
    has_window=always,
    has_layer_norms=True,
    renamed_in_layers=(("mlp.router.", f"{mixtral.EXPERTS.prefix}gate."), *mixtral.FAMILY.renamed_in_layers),
    reads=("lm_head_bias", "short_mscale", "long_mscale"),
    experts=replace(mixtral.EXPERTS, scoring="sparsemixer", routing=_routing),
)
