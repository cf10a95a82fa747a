"""The fields of ModelConfig from the object in config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from quire.errors import ModelConfigError
from quire.hf_config.family import Family, LayerFacts
from quire.hf_config.fields import Fields
from quire.hf_config.quantization import parse_quantization
from quire.hf_config.refusal import refusal
from quire.hf_config.rope import max_model_len, parse_rope
from quire.layer_spec.rope_config import RopeConfig
from quire.layer_spec.shapes import NormShape

# Fields that change the arithmetic of some families only, with the value that changes nothing.
OPTIONAL_FIELDS: Mapping[str, Any] = {
    "partial_rotary_factor": 1.0,
    "rope_local_base_freq": None,
    "use_sliding_window": True,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "hidden_activation": None,
    "mlp_bias": False,
    "lm_head_bias": False,
    "short_mscale": None,
    "long_mscale": None,
}

COMMON_DEFAULTS: Mapping[str, Any] = {
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "eos_token_id": 2,
}

# For architectures that only the transformers backend runs. Older ones have other names for the same fields.
UNKNOWN = Family(model_type="", architectures=(), defaults={"eos_token_id": None})
ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "max_position_embeddings": (
        *("n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length", "model_max_length"),
    ),
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_MAX_LAYERS = 4096
_ROPE_OBJECTS = ("rope_parameters", "rope_scaling", "full_attention", "sliding_attention")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_DTYPES = ("bfloat16", "float16", "float32")
# If a foreign config.json has one of these, layers keep a state instead of keys and values.
_STATE_FIELDS = ("state_size", "ssm_state_size", "mamba_d_state", "lru_width")


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`; objects in both are merged."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


def translate(
    raw: Mapping[str, Any], path: str, families: Mapping[str, Family], any_architecture: bool
) -> dict[str, Any]:
    """Keyword arguments for ModelConfig, all but the folder and the overrides.

    Args:
        raw: the object of config.json.
        path: the file, for errors.
        families: the native ones, by model_type.
        any_architecture: accept an architecture or an activation without native implementation.
    """
    outer = Fields(raw, path)
    architecture, family = _find_family(outer, families, any_architecture)
    fields = Fields(merge(raw, outer.object("text_config").values), path)
    _refuse_unsupported(fields)
    values, ignored = _split_off_ignored(fields.values, family)
    if any_architecture and _has_foreign_activation(Fields(values, path).with_defaults(family.defaults)):
        family = UNKNOWN
    is_native = family is not UNKNOWN
    fields = Fields(values if is_native else _resolve_aliases(fields.values), path)
    fields = fields.with_defaults({**COMMON_DEFAULTS, **family.defaults})
    missing = [name for name in _REQUIRED if not fields.has(name)]
    if missing and not is_native:
        raise _foreign_refusal(architecture, fields, missing)
    if missing:
        raise ModelConfigError(
            f"{path} lacks {', '.join(missing)}", fix="Use the config.json that belongs to the checkpoint"
        )
    return {
        **_facts(fields, family, is_native),
        "architecture": architecture,
        "is_native": is_native,
        "model_type": str(outer.get("model_type") or ""),
        "dtype": _dtype(fields),
        "quantized": parse_quantization(fields),
        "eos_token_ids": fields.token_ids("eos_token_id"),
        "ignored_fields": ignored if is_native else (),
    }


def _find_family(fields: Fields, families: Mapping[str, Family], any_architecture: bool) -> tuple[str, Family]:
    native = {architecture: family for family in families.values() for architecture in family.architectures}
    named = tuple(fields.sequence("architectures", str) or ())
    if not named and fields.get("model_type") in tuple(families):
        named = families[fields.get("model_type")].architectures[:1]
    for architecture in named:
        if architecture in native:
            return architecture, native[architecture]
    if named and any_architecture:
        return named[0], UNKNOWN
    raise ModelConfigError(
        f"{fields.path} names " + ("an architecture that has no native implementation" if named else "no architecture"),
        value=", ".join(named) or fields.get("model_type"),
        expected="one of " + ", ".join(native),
        fix="Use --model-impl transformers to run it through transformers' modelling code",
    )


def _refuse_unsupported(fields: Fields) -> None:
    if fields.get("is_encoder_decoder") or fields.get("use_bidirectional_attention"):
        raise ModelConfigError(
            f"{fields.path} describes a model that is not a causal decoder", fix="Use a text generation model"
        )


def _split_off_ignored(values: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`values` without the optional fields that the family does not read; and the ignored names that matter."""
    kept: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in values.items():
        if name not in OPTIONAL_FIELDS or name in family.reads:
            kept[name] = value
            if name in _ROPE_OBJECTS and isinstance(value, Mapping):
                kept[name], inside = _split_off_ignored(value, family)
                ignored += inside
        elif value is not None and value != OPTIONAL_FIELDS[name]:
            ignored.append(name)
    return kept, tuple(dict.fromkeys(ignored))


def _foreign_refusal(architecture: str, fields: Fields, missing: list[str]) -> ModelConfigError:
    """The error for a config.json without fields that every model with a KV cache in all layers has."""
    lacks = f"its config.json gives no {', '.join(missing)}"
    if state := next((name for name in _STATE_FIELDS if fields.has(name)), None):
        return refusal(architecture, f"it keeps other state than keys and values ({state})")
    if fields.has("text_config"):
        return refusal(architecture, f"it reads more than text, and {lacks}")
    if "num_attention_heads" in missing:
        return refusal(architecture, f"it has no attention heads ({lacks})")
    fix = f"; if config.json has it under another name, give it with --hf-overrides '{{\"{missing[0]}\": ...}}'"
    return refusal(architecture, f"{lacks}, so its attention is of another kind", fix)


def _resolve_aliases(values: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for name, aliases in ALIASES.items():
        for alias in aliases:
            if result.get(name) is None and result.get(alias) is not None:
                result[name] = result[alias]
    if result.get("intermediate_size") is None and isinstance(result.get("hidden_size"), int):
        result["intermediate_size"] = 4 * result["hidden_size"]
    if (sizes := result.get("intermediate_size")) and isinstance(sizes, list) and all(type(n) is int for n in sizes):
        result["intermediate_size"] = max(sizes)  # Gemma 3n has one size for each layer
    if result.get("num_key_value_heads") is None and result.get("multi_query"):  # GPT-BigCode
        result["num_key_value_heads"] = 1
    return result


def _facts(fields: Fields, family: Family, is_native: bool) -> dict[str, Any]:
    hidden_size, num_q_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_q_heads)
    if num_q_heads % num_kv_heads:
        raise fields.illegal("num_key_value_heads", f"a divisor of num_attention_heads = {num_q_heads}")
    head_dim = fields.integer(family.head_dim_field, default=hidden_size // num_q_heads)
    if head_dim % 2:
        raise fields.illegal(family.head_dim_field, f"an even number (hidden_size / num_attention_heads is {head_dim})")
    rope, local_rope = parse_rope(fields, head_dim) if is_native else (RopeConfig(head_dim), None)
    facts = LayerFacts(
        fields=fields,
        family=family,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        local_rope=local_rope or rope,
        window=fields.integer("sliding_window", default=0, minimum=0) if fields.flag("use_sliding_window", True) else 0,
        attention_scale=_attention_scale(fields, head_dim),
        activation=_activation(fields, is_native),
    )
    num_layers = fields.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "layers": tuple(family.layer(facts, layer) for layer in range(num_layers)),
        "max_model_len": max_model_len(fields, rope),
        "rope": rope,
        "logits_soft_cap": fields.number("final_logit_softcapping", 0.0, minimum=0.0),
        "norm_offset": family.norm_offset,
        "final_norm": NormShape("model.norm", hidden_size, family.has_layer_norms),
        "output_bias": _output_bias(fields),
        "renamed_prefixes": family.renamed_prefixes + tuple(_renamed_in_layers(family, num_layers)),
        "ignored_prefixes": family.ignored_prefixes + tuple(_drafting_layers(fields, num_layers)),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6, minimum=0.0),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "embedding_multiplier": (
            math.sqrt(hidden_size) if family.scales_embeddings else fields.number("embedding_multiplier", 1.0)
        ),
        "logits_scaling": fields.number("logits_scaling", 1.0, minimum=1e-6),
    }


def _renamed_in_layers(family: Family, num_layers: int) -> Iterator[tuple[str, str]]:
    for theirs, ours in family.renamed_in_layers:
        for prefix in (f"model.layers.{layer}." for layer in range(num_layers)):
            yield prefix + theirs, prefix + ours


def _output_bias(fields: Fields) -> bool:
    has_bias = fields.flag("lm_head_bias", False)
    if has_bias and fields.flag("tie_word_embeddings", False):
        raise fields.illegal("lm_head_bias", "false where tie_word_embeddings is true")
    return has_bias


def _drafting_layers(fields: Fields, num_layers: int) -> Iterator[str]:
    """Prefixes of the layers for multi-token prediction that checkpoints number on behind the others."""
    for layer in range(fields.integer("num_nextn_predict_layers", 0, minimum=0, maximum=_MAX_LAYERS)):
        yield f"model.layers.{num_layers + layer}."


def _attention_scale(fields: Fields, head_dim: int) -> float:
    if fields.has("attention_multiplier"):  # Granite gives the factor itself
        return fields.number("attention_multiplier", minimum=1e-6)
    return 1.0 / math.sqrt(fields.number("query_pre_attn_scalar", float(head_dim), minimum=1e-6))


def _activation_field(fields: Fields) -> str:
    """The field with the activation. Gemma's files hold both, and hidden_activation counts."""
    return "hidden_activation" if fields.has("hidden_activation") else "hidden_act"


def _has_foreign_activation(fields: Fields) -> bool:
    name = fields.get(_activation_field(fields))
    return isinstance(name, str) and name not in _ACTIVATIONS


def _activation(fields: Fields, is_native: bool) -> str:
    return _ACTIVATIONS[fields.text(_activation_field(fields), tuple(_ACTIVATIONS))] if is_native else "silu"


def _dtype(fields: Fields) -> str:
    name = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    return Fields({"dtype": str(name).removeprefix("torch.")}, fields.path).text("dtype", _DTYPES)
