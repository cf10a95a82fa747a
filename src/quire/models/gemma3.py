"""Gemma 3 text: Gemma 2's block with q and k norms, and a rope of its own for the layers with a window."""

from quire.models.family import Family
from quire.models.gemma2 import SandwichBlock

FAMILY = Family(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    block=SandwichBlock,
    norm_offset=1.0,
    # The checkpoints with a vision tower nest the text model, in the order of transformers 4 or of 5.
    renamed_prefixes=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ),
    ignored_prefixes=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
