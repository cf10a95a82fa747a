"""Granite 3: Llama with factors on embeddings, attention, residual additions and logits."""

from quire.hf_config.family import Family, GgufForm

FAMILY = Family(
    model_type="granite",
    architectures=("GraniteForCausalLM",),
    defaults={"max_position_embeddings": 2048, "attention_multiplier": 1.0},
    reads=("mlp_bias", "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    gguf=GgufForm("granite", is_interleaved=True),
)
