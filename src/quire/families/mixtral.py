"""Mixtral 8x7B and 8x22B: Mistral with experts."""

from typing import Any

from quire.hf_config.family import Family, GgufForm, always
from quire.hf_config.feed_forward import ExpertsForm
from quire.hf_config.fields import Fields


def _routing(fields: Fields) -> dict[str, Any]:
    return {"normalizes": True}


EXPERTS = ExpertsForm(
    count=("num_experts", "num_local_experts"),
    width="intermediate_size",
    prefix="block_sparse_moe.",
    names=("w1", "w3", "w2"),
    routing=_routing,
)

FAMILY = Family(
    model_type="mixtral",
    architectures=("MixtralForCausalLM",),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    has_window=always,
    renamed_in_layers=(("mlp.", EXPERTS.prefix),),  # as transformers holds it
    experts=EXPERTS,
    gguf=GgufForm("llama", is_interleaved=True),
)
