"""Gemma 3 text: Gemma 2's layers with q and k norms. The layers with a window have their own rope."""

from __future__ import annotations

from quire.families.gemma2 import DEFAULTS, READS, gguf_form
from quire.hf_config.family import SANDWICH, Family, by_layer_types
from quire.hf_config.fields import Fields


def _all_but_every_nth(fields: Fields, layer: int) -> bool:
    return (layer + 1) % fields.integer("sliding_window_pattern") != 0


FAMILY = Family(
    model_type="gemma3_text",
    # The second architecture has a vision tower. We run its text part; its config is nested and lacks more fields.
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    defaults={
        **DEFAULTS,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    has_window=by_layer_types(_all_but_every_nth),
    qk_norm="head",
    norms=SANDWICH,
    norm_offset=1.0,
    reads=(*READS, "rope_local_base_freq"),
    scales_embeddings=True,
    # The checkpoints with a vision tower nest the text model, in the way of transformers 4 or of 5.
    renamed_prefixes=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ),
    ignored_prefixes=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    gguf=gguf_form("gemma3", 62),
)
