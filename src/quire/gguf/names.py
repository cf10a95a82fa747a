"""llama.cpp's names of tensors, and Hugging Face's for the same. Source: gguf-py's tensor_mapping and MODEL_TENSORS."""

from __future__ import annotations

import re
from collections.abc import Mapping

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Numbers of the configuration that are stored as tensors, or follow from it.
CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_DERIVED = re.compile(r"blk\.\d+\.(attn_rot_embd|rope_freqs|rope_factors_(long|short))\.weight")
_BLOCK_NAME = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")


def is_weight(name: str) -> bool:
    """Whether a model loads the tensor, rather than its configuration."""
    return name not in CONFIG_TENSORS and not _DERIVED.fullmatch(name)


def hf_name(name: str, own: Mapping[str, str]) -> str:
    """The name in a Hugging Face checkpoint; an unknown one stays as it is, for the loader to report.

    `own`: names in a layer that differ between families, by llama.cpp's.
    """
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, suffix = match.groups()
    ours = own.get(part, _BLOCK.get(part))
    return name if ours is None else f"model.layers.{int(layer)}.{ours}.{suffix}"
