"""Llama 1 to 3.3 and everything that uses its config: the decoder as it is."""

from quire.models.family import Family

FAMILY = Family(architectures=("LlamaForCausalLM",))
