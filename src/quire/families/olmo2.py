"""OLMo 2: norms after attention and MLP instead of before them; the norms of q and k cover all heads at once."""

from quire.hf_config.family import POST_NORM, Family, GgufForm

FAMILY = Family(
    model_type="olmo2",
    architectures=("Olmo2ForCausalLM",),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50_279},
    qk_norm="full",
    norms=POST_NORM,
    gguf=GgufForm("olmo2"),
)
