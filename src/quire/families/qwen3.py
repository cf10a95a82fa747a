"""Qwen3 dense: Llama with an RMS norm on every q and k head."""

from quire.families.qwen2 import DEFAULTS, gguf_fields, has_window
from quire.hf_config.family import Family, GgufForm

FAMILY = Family(
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    defaults={**DEFAULTS, "head_dim": 128},
    has_window=has_window,
    qk_norm="head",
    reads=("use_sliding_window",),
    gguf=GgufForm("qwen3", gguf_fields),
)
