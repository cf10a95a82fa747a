"""A model's configuration from GGUF metadata, in the names of Hugging Face's config.json.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; how llama.cpp reads them: its llama-model.cpp.
"""

from __future__ import annotations

import array
import math
import struct
from collections import Counter
from typing import Any

from quire.errors import ModelConfigError
from quire.gguf.file import GgufFile
from quire.gguf.types import FLOAT_TYPES
from quire.hf_config.fields import Fields

MODEL_TYPES = {
    "llama": "llama",  # Mistral's models too
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
}
# Their heads rotate neighbouring dimensions in llama.cpp: converters reorder the rows of q and k for it.
INTERLEAVED_ROPE = ("llama", "granite", "smollm3")
# Norms of these are stored with the one added that their checkpoints leave out.
NORMS_PLUS_ONE = ("gemma2", "gemma3")

# config.json's field: GGUF's key behind the architecture.
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
# Tokens that end a turn, where a file names only the end of a text.
_ENDS_OF_TURN = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>"})
_MAX_ROPE_FACTORS = 4096
_LARGE_FLOAT = 1e38  # below it, whatever a number is rounded to is a float32
CONTROL = 3  # of tokenizer.ggml.token_type


def to_hf_config(file: GgufFile) -> dict[str, Any]:
    """The object of a config.json. Raises ModelConfigError for an architecture or a value that is not read here."""
    metadata, tensors = file.metadata, file.tensors
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in MODEL_TYPES:
        raise ModelConfigError(
            f"{file.path.name} is of an architecture that is not read from GGUF files",
            value=architecture,
            expected="one of " + ", ".join(MODEL_TYPES),
            fix="Name the model's safetensors",
        )
    if metadata.get(f"{architecture}.expert_count"):
        raise ModelConfigError(f"{file.path.name} is a mixture of experts, which is not in this version")
    if "token_embd.weight" not in tensors:
        raise ModelConfigError(
            f"{file.path.name} has no token embeddings",
            expected="a whole model; adapters, vision parts and vocabularies are files of their own",
        )
    own = _Own(metadata, architecture, str(file.path))
    config = {field: value for field, key in _FIELDS.items() if (value := own.get(key)) is not None}
    config |= {
        "model_type": MODEL_TYPES[architecture],
        "dtype": _dtype(file, architecture),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "eos_token_id": _end_tokens(metadata),
    }
    sizes = Fields(config, str(file.path))
    width = sizes.integer("hidden_size") // sizes.integer("num_attention_heads")  # of a head, unless head_dim says else
    head_dim = sizes.integer("head_dim", width)
    return config | _rope(own, file, head_dim) | _special(own, sizes, width)


class _Own:
    """The values of one architecture: one number where the file may have one for each layer, in shortest decimals."""

    def __init__(self, metadata: dict[str, Any], architecture: str, path: str) -> None:
        self.architecture = architecture
        self._metadata, self._path = metadata, path

    def get(self, key: str) -> Any:
        """None if it is absent. Raises ModelConfigError for layers that differ."""
        value = self._metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, array.array):
            if len(set(value)) != 1:
                raise ModelConfigError(f"Layers that differ in {key} are not in this version", value=list(value[:8]))
            value = value[0]
        return _shortest(value)

    def per_layer(self, key: str) -> list[Any] | None:
        """One for each layer; None where the file has no such list."""
        value = self._metadata.get(f"{self.architecture}.{key}")
        return list(value) if isinstance(value, array.array) else None

    def fields(self, **keys: str) -> Fields:
        """Values under names of their own, for checked access."""
        return Fields({name: self.get(key) for name, key in keys.items()}, self._path)


def _dtype(file: GgufFile, architecture: str) -> str:
    """What the weights were, or are computed in: for quantized ones the dtype with the fastest products.

    Float16 stays float16, as bfloat16 would cost bits; but for Gemma, whose activations are beyond its range.
    """
    elements: Counter[str] = Counter()
    for info in file.tensors.values():
        if len(info.shape) > 1:
            elements[info.type.name] += math.prod(info.shape)
    names = [name for name, _ in elements.most_common()]
    dtype = FLOAT_TYPES.get(names[0], "bfloat16") if names else "float32"
    return "bfloat16" if dtype == "float16" and architecture in NORMS_PLUS_ONE else dtype


def _shortest(value: Any) -> Any:
    """A float32 as the shortest decimal that means it: 1e-6, where the file could only hold 9.99999997e-07."""
    if not isinstance(value, float) or not abs(value) < _LARGE_FLOAT:
        return value
    for digits in range(1, 9):
        shorter = float(f"{value:.{digits}g}")
        if struct.pack("<f", shorter) == struct.pack("<f", value):
            return shorter
    return value


def _end_tokens(metadata: dict[str, Any]) -> list[int]:
    """Whatever ends an answer."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = [metadata[key] for key in keys if isinstance(metadata.get(key), int)]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, array.array):
        pairs = enumerate(zip(tokens, kinds, strict=False))
        ends += [index for index, (token, kind) in pairs if kind == CONTROL and token in _ENDS_OF_TURN]
    return list(dict.fromkeys(ends))


def _rope(own: _Own, file: GgufFile, head_dim: int) -> dict[str, Any]:
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
        if kind == "yarn" and attention_factor != 1.0:
            scaling["attention_factor"] = attention_factor * (0.1 * math.log(factor) + 1.0)
    if scaling and given.has("original"):
        scaling["original_max_position_embeddings"] = given.get("original")
    return {"partial_rotary_factor": rotary_dim / head_dim, "rope_scaling": scaling}


def _factors(file: GgufFile, name: str, rotary_dim: int) -> list[float]:
    """One per pair of rotating dimensions."""
    info, count = file.tensors[name], rotary_dim // 2
    if info.type.name != "F32" or info.shape != (count,) or count > _MAX_ROPE_FACTORS:
        raise ModelConfigError(
            f"The file's {info.name} does not fit its position encoding",
            value=[info.type.name, *info.shape],
            expected=f"F32, {count} numbers",
        )
    return list(struct.unpack(f"<{count}f", file.read(info)))


def _special(own: _Own, sizes: Fields, width: int) -> dict[str, Any]:
    """What llama.cpp knows of an architecture without a key for it."""
    architecture = own.architecture
    if architecture in NORMS_PLUS_ONE:
        # The largest of each generation scales its scores by the width of a head, the others by head_dim.
        is_largest = sizes.get("num_hidden_layers") == {"gemma2": 46, "gemma3": 62}[architecture]
        special: dict[str, Any] = {"query_pre_attn_scalar": width if is_largest else sizes.get("head_dim")}
        if (local := own.get("rope.freq_base_swa")) is not None:
            special["rope_local_base_freq"] = local
        if (windows := own.per_layer("attention.sliding_window_pattern")) is not None:
            special["layer_types"] = ["sliding_attention" if is_local else "full_attention" for is_local in windows]
        elif (pattern := own.get("attention.sliding_window_pattern")) is not None:
            special["sliding_window_pattern"] = pattern
        return special
    if architecture != "phi3" and sizes.has("sliding_window"):
        raise ModelConfigError(
            f"Sliding windows of {architecture} models are not read from GGUF files", value=sizes.get("sliding_window")
        )
    return {"use_sliding_window": False} if architecture in ("qwen2", "qwen3") else {}
