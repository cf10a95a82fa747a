"""MiMo: Qwen2 with layers for multi-token prediction behind it, which draft (hf_config/head.py)."""

from quire.families.qwen2 import DEFAULTS, has_window
from quire.hf_config.family import Family
from quire.hf_config.head import MTP_PREFIX

FAMILY = Family(
    model_type="mimo",
    architectures=("MiMoForCausalLM",),
    defaults=DEFAULTS,
    has_window=has_window,
    qkv_bias=True,
    reads=("use_sliding_window",),
    ignored_prefixes=(MTP_PREFIX,),
)
