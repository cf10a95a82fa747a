"""SmolLM3: Llama with every fourth layer without position encoding."""

from quire.models.family import Family

FAMILY = Family(architectures=("SmolLM3ForCausalLM",))
