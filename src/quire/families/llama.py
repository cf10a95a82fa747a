"""Llama 1 to 3.3 and models with its config: the plain decoder. GGUF files of Mistral's models say llama too."""

from quire.hf_config.family import Family, GgufForm

FAMILY = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    defaults={"max_position_embeddings": 2048},
    reads=("mlp_bias",),
    gguf=GgufForm("llama", is_interleaved=True),
)
