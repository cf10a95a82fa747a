"""Phi-3, Phi-3.5 and Phi-4: Llama with fused checkpoints and longrope; Phi-4-mini rotates a part of each head."""

from quire.models.family import Family

FAMILY = Family(architectures=("Phi3ForCausalLM",))
