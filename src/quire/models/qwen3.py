"""Qwen3 dense: Llama with an RMS norm on every q and k head."""

from quire.models.family import Family

FAMILY = Family(architectures=("Qwen3ForCausalLM",))
