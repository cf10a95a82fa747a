"""Mistral 7B, Nemo and Small: Llama with a sliding window if the config sets one."""

from quire.hf_config.family import Family, always

FAMILY = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM",),
    defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072},
    has_window=always,
    qkv_bias=False,
)
