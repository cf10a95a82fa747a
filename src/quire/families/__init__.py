"""One file per family of models: facts that config.json leaves out, and the parts of its layers. No torch."""

from quire.families import (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    glm4_moe,
    gpt_oss,
    granite,
    granitemoe,
    llama,
    llama4_text,
    mimo,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)
from quire.hf_config.family import Family

_MODULES = (
    *(llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3, smollm3, olmo2, granite, mimo),
    *(mixtral, qwen2_moe, qwen3_moe, olmoe, granitemoe, phimoe),
    *(glm4_moe, gpt_oss, llama4_text, deepseek_v2, deepseek_v3),
)

FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
