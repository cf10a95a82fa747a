"""Mistral 7B, Nemo and Small: Llama with a sliding window where the config sets one."""

from quire.models.family import Family

FAMILY = Family(architectures=("MistralForCausalLM",))
