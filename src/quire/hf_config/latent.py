"""Multi-head latent attention from config.json, in the names of DeepSeek-V2's modelling code. No torch."""

from __future__ import annotations

import math
from typing import Any

from quire.hf_config.family import LayerFacts
from quire.hf_config.fields import Fields
from quire.hf_config.gguf_metadata import GgufMetadata
from quire.layer_spec.attention import Latent
from quire.layer_spec.cuts import Cut
from quire.layer_spec.shapes import HeadMatrices, LinearShape, NormShape

# Fields of config.json with their defaults in DeepSeek's config classes.
DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
NORM_EPS = 1e-6  # their norms inside attention have the default of the class, whatever rms_norm_eps is


# Names inside a layer. The keys are llama.cpp's names.
GGUF_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}


def latent_of_gguf(metadata: GgufMetadata, sizes: Fields) -> dict[str, Any]:
    """Fields of latent attention from llama.cpp's keys, which describe one KV head with rows of the cache as keys.

    Older files have the sizes of keys and values of the heads at that place.
    """
    keys = metadata.fields(
        key="attention.key_length_mla" if metadata.get("attention.key_length_mla") else "attention.key_length",
        value="attention.value_length_mla" if metadata.get("attention.value_length_mla") else "attention.value_length",
        rank="attention.kv_lora_rank",
        rope="rope.dimension_count",
        dense="leading_dense_block_count",
        drafting="nextn_predict_layers",
    )
    rope_dim, drafting = keys.integer("rope"), keys.integer("drafting", 0, minimum=0)
    return {
        "num_key_value_heads": sizes.integer("num_attention_heads"),
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.integer("rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": keys.integer("key", minimum=rope_dim + 1) - rope_dim,
        "v_head_dim": keys.integer("value"),
        "partial_rotary_factor": 1.0,
        "first_k_dense_replace": keys.integer("dense", 0, minimum=0),
        "num_nextn_predict_layers": drafting,
        "num_hidden_layers": sizes.integer("num_hidden_layers", minimum=drafting + 1) - drafting,
    }


def yarn_of_gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """Fields of YaRN from llama.cpp's keys.

    Its converter writes a tenth of mscale_all_dim, and assumes that mscale is equal.
    """
    tenth = metadata.fields(tenth="rope.scaling.yarn_log_multiplier").number("tenth", 0.0)
    return {"mscale": 10 * tenth, "mscale_all_dim": 10 * tenth} if tenth else {}


def latent_attention(facts: LayerFacts, prefix: str, is_interleaved: bool) -> Latent:
    """Latent attention of one layer.

    Args:
        prefix: the prefix of the names of its modules.
    """
    fields, hidden, heads = facts.fields, facts.hidden_size, facts.num_q_heads
    if facts.num_kv_heads != heads:
        raise fields.illegal("num_key_value_heads", f"num_attention_heads = {heads}, for latent attention")
    nope_dim, value_dim = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
    rank, rope_dim = fields.integer("kv_lora_rank"), facts.rope.rotary_dim
    has_low_rank, has_bias = fields.has("q_lora_rank"), fields.flag("attention_bias", False)
    if has_bias and not has_low_rank:
        raise fields.illegal("attention_bias", "false where q_lora_rank is null")
    q_width, query = heads * (nope_dim + rope_dim), None
    name, width, rows = "q_proj", q_width, Cut("rows")
    if has_low_rank:
        name, width = "q_a_proj", fields.integer("q_lora_rank")
        query = LinearShape(prefix=prefix, shards=(("q_b_proj", q_width),), in_features=width, cut=rows)
    return Latent(
        num_heads=heads,
        rank=rank,
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=value_dim,
        scale=_scale(fields, nope_dim + rope_dim, facts.rope.type),
        rope=facts.rope,
        is_interleaved=is_interleaved,
        input=LinearShape(
            prefix=prefix,
            shards=((name, width), ("kv_a_proj_with_mqa", rank + rope_dim)),
            in_features=hidden,
            bias=has_bias,
        ),
        query=query,
        up=LinearShape(
            prefix=prefix,
            shards=(("kv_b_proj", heads * (nope_dim + value_dim)),),
            in_features=rank,
            cut=Cut("rows"),
            matrices=(
                HeadMatrices("k_b_proj", heads, rank, nope_dim, num_rows=nope_dim),
                HeadMatrices("v_b_proj", heads, value_dim, rank, num_rows=value_dim),
            ),
        ),
        output=LinearShape(
            prefix=prefix,
            shards=(("o_proj", hidden),),
            in_features=heads * value_dim,
            bias=has_bias,
            cut=Cut("joined"),
        ),
        query_norm=NormShape(f"{prefix}q_a_layernorm", width) if has_low_rank else None,
        row_norm=NormShape(f"{prefix}kv_a_layernorm", rank),
        norm_eps=NORM_EPS,
    )


def _scale(fields: Fields, head_dim: int, rope_type: str) -> float:
    """The factor on q.k. Scaled ropes raise it by YaRN's factor for `mscale_all_dim`."""
    scaling = fields.object("rope_parameters") if fields.has("rope_parameters") else fields.object("rope_scaling")
    weight = 0.0 if rope_type == "default" else scaling.number("mscale_all_dim", 0.0, 0.0, 1e6)
    factor = scaling.number("factor", 1.0, 1e-6, 1e6)
    mscale = 1.0 if not weight or factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
    return mscale * mscale / math.sqrt(head_dim)
