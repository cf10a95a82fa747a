"""llama.cpp's names of tensors and Hugging Face's. Source: tensor_mapping and MODEL_TENSORS of gguf-py."""

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
# Names with their endings, for tensors whose name in Hugging Face's form has no ending or another one.
_TENSORS = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
# Tensors that hold numbers of the configuration, or numbers that follow from it.
CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_DERIVED = re.compile(r"blk\.\d+\.(attn_rot_embd|rope_freqs|rope_factors_(long|short))\.weight")
_DRAFT = re.compile(r"blk\.\d+\.nextn\..+")  # names of layers that predict tokens further ahead
_BLOCK_NAME = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")


def is_weight(name: str) -> bool:
    """Whether the tensor is a weight of the model, and not a part of its configuration or of a drafter."""
    return name not in CONFIG_TENSORS and not _DERIVED.fullmatch(name) and not _DRAFT.fullmatch(name)


def hf_name(name: str, own: Mapping[str, str]) -> str:
    """The name in a Hugging Face checkpoint. An unknown name is not changed; the loader reports it.

    `own`: the family's own names inside a layer; the keys are llama.cpp's names.
    """
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, suffix = match.groups()
    ours = own.get(part, _BLOCK.get(part))
    tensor = _TENSORS.get(f"{part}.{suffix}", ours and f"{ours}.{suffix}")
    return name if tensor is None else f"model.layers.{int(layer)}.{tensor}"
