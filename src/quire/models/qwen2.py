"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v."""

from quire.models.family import Family

FAMILY = Family(architectures=("Qwen2ForCausalLM",))
