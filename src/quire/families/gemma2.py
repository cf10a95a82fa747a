"""Gemma 2: norms on both sides of attention and MLP, with weights around zero; scaled embeddings; windows."""

from __future__ import annotations

from typing import Any

from quire.hf_config.family import SANDWICH, Family, GgufForm, by_layer_types
from quire.hf_config.fields import Fields
from quire.hf_config.gguf_metadata import GgufMetadata

DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
READS = ("query_pre_attn_scalar", "final_logit_softcapping", "hidden_activation")


def _every_other(fields: Fields, layer: int) -> bool:
    return layer % 2 == 0


def gguf_form(architecture: str, layers_of_the_largest: int) -> GgufForm:
    """The largest model of each generation scales its scores by hidden size / heads, the others by head_dim."""

    def fields(metadata: GgufMetadata, sizes: Fields) -> dict[str, Any]:
        is_largest = sizes.get("num_hidden_layers") == layers_of_the_largest
        width = sizes.integer("hidden_size") // sizes.integer("num_attention_heads")
        special: dict[str, Any] = {"query_pre_attn_scalar": width if is_largest else sizes.get("head_dim")}
        if (local := metadata.get("rope.freq_base_swa")) is not None:
            special["rope_local_base_freq"] = local
        if (windows := metadata.per_layer("attention.sliding_window_pattern")) is not None:
            special["layer_types"] = ["sliding_attention" if is_local else "full_attention" for is_local in windows]
        elif (pattern := metadata.get("attention.sliding_window_pattern")) is not None:
            special["sliding_window_pattern"] = pattern
        return special

    return GgufForm(architecture, fields, fits_float16=False)


FAMILY = Family(
    model_type="gemma2",
    architectures=("Gemma2ForCausalLM",),
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    has_window=by_layer_types(_every_other),
    norms=SANDWICH,
    norm_offset=1.0,
    reads=(*READS, "attn_logit_softcapping"),
    scales_embeddings=True,
    gguf=gguf_form("gemma2", 46),
)
