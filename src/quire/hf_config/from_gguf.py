"""A model's configuration from GGUF metadata, under the names of Hugging Face's config.json.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's llama-model.cpp, which reads them.
"""

from __future__ import annotations

import array
import math
import struct
from collections import Counter
from collections.abc import Iterable
from typing import Any

from quire.errors import ModelConfigError
from quire.gguf.file import GgufFile
from quire.gguf.types import FLOAT_TYPES
from quire.hf_config.family import Family, GgufForm
from quire.hf_config.fields import Fields
from quire.hf_config.gguf_metadata import GgufMetadata

# config.json's field: GGUF's key after the architecture.
_FIELDS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
# Tokens that end a turn. Some files name only the token that ends a text.
_ENDS_OF_TURN = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>"})
_MAX_ROPE_FACTORS = 4096
CONTROL = 3  # the value for control tokens in tokenizer.ggml.token_type


def family_of(file: GgufFile, families: Iterable[Family]) -> tuple[Family, GgufForm]:
    """The family of a file and its form. Raises ModelConfigError for an unknown architecture."""
    architecture = str(file.metadata.get("general.architecture"))
    own = GgufMetadata(file.metadata, architecture, str(file.path))
    has_experts = bool(own.get("expert_count"))
    # Mixtral is a llama with experts.
    forms = [
        (family, family.gguf)
        for family in families
        if family.gguf is not None and (family.experts is not None) == has_experts
    ]
    for family, form in forms:
        if form.architecture == architecture and form.fits(own):
            return family, form
    raise ModelConfigError(
        f"{file.path.name} is of an architecture that is not read from GGUF files",
        value=f"{architecture} with experts" if has_experts else architecture,
        expected="one of " + ", ".join(dict.fromkeys(form.architecture for _, form in forms)),
        fix="Name the model's safetensors",
    )


def to_hf_config(file: GgufFile, family: Family, form: GgufForm) -> dict[str, Any]:
    """The object of a config.json. Raises ModelConfigError for a value that Quire cannot use."""
    metadata, tensors, architecture = file.metadata, file.tensors, form.architecture
    if "token_embd.weight" not in tensors:
        raise ModelConfigError(
            f"{file.path.name} has no token embeddings",
            expected="a whole model; adapters, vision parts and vocabularies are files of their own",
        )
    own = GgufMetadata(metadata, architecture, str(file.path))
    config = {field: value for field, key in _FIELDS.items() if (value := own.get(key)) is not None}
    config |= {} if family.experts is None else family.experts.gguf_fields(own)
    config |= {
        "model_type": family.model_type,
        "dtype": _dtype(file, form),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "eos_token_id": _end_tokens(metadata),
    }
    sizes = Fields(config, str(file.path))
    width = sizes.integer("hidden_size") // sizes.integer("num_attention_heads")  # a head, unless head_dim is given
    head_dim = sizes.integer("head_dim", width)
    return config | _rope(own, file, head_dim, form) | form.fields(own, sizes)


def _dtype(file: GgufFile, form: GgufForm) -> str:
    """The dtype to compute in: the weights' own dtype, or for quantized weights the one with the fastest products.

    Float16 stays float16, because bfloat16 would lose bits, except if the family's activations exceed its range.
    """
    elements: Counter[str] = Counter()
    for info in file.tensors.values():
        if len(info.shape) > 1:
            elements[info.type.name] += math.prod(info.shape)
    names = [name for name, _ in elements.most_common()]
    dtype = FLOAT_TYPES.get(names[0], "bfloat16") if names else "float32"
    return "bfloat16" if dtype == "float16" and not form.fits_float16 else dtype


def _end_tokens(metadata: dict[str, Any]) -> list[int]:
    """The tokens that end an answer."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = [metadata[key] for key in keys if isinstance(metadata.get(key), int)]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, array.array):
        pairs = enumerate(zip(tokens, kinds, strict=False))
        ends += [index for index, (token, kind) in pairs if kind == CONTROL and token in _ENDS_OF_TURN]
    return list(dict.fromkeys(ends))


def _rope(own: GgufMetadata, file: GgufFile, head_dim: int, form: GgufForm) -> dict[str, Any]:
    """Partial rotation and stretched contexts."""
    given = own.fields(
        rotary_dim="rope.dimension_count",
        kind="rope.scaling.type",
        factor="rope.scaling.factor",
        attention_factor="rope.scaling.attn_factor",
        original="rope.scaling.original_context_length",
    )
    rotary_dim = given.integer("rotary_dim", head_dim, maximum=head_dim)
    attention_factor = given.number("attention_factor", 1.0)
    kind = given.text("kind", ("none", "linear", "yarn", "longrope"), "none")
    factor = given.number("factor", 1.0, 1e-6)
    scaling: dict[str, Any] = {}
    # Llama 3's factors do not depend on the length of the context; Phi-3 has two sets.
    for short, long in (("rope_freqs", "rope_freqs"), ("rope_factors_short", "rope_factors_long")):
        if f"{short}.weight" in file.tensors and f"{long}.weight" in file.tensors:
            scaling = {
                "rope_type": "longrope",
                "short_factor": _factors(file, f"{short}.weight", rotary_dim),
                "long_factor": _factors(file, f"{long}.weight", rotary_dim),
                "attention_factor": attention_factor,
            }
    if not scaling and kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            keys = {name: f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")}
            betas = own.fields(**keys).values
            scaling |= form.yarn(own) | {name: value for name, value in betas.items() if value is not None}
        if kind == "yarn" and attention_factor != 1.0:
            scaling["attention_factor"] = attention_factor * (0.1 * math.log(factor) + 1.0)
    if scaling and given.has("original"):
        scaling["original_max_position_embeddings"] = given.get("original")
    return {"partial_rotary_factor": rotary_dim / head_dim, "rope_scaling": scaling}


def _factors(file: GgufFile, name: str, rotary_dim: int) -> list[float]:
    """One factor per pair of rotating dimensions."""
    info, count = file.tensors[name], rotary_dim // 2
    if info.type.name != "F32" or info.shape != (count,) or count > _MAX_ROPE_FACTORS:
        raise ModelConfigError(
            f"The file's {info.name} does not fit its position encoding",
            value=[info.type.name, *info.shape],
            expected=f"F32, {count} numbers",
        )
    return list(struct.unpack(f"<{count}f", file.read(info)))
