"""Rotary position encoding in config.json: its kind, its numbers, and the context length that it allows."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.hf_config.fields import Fields
from quire.layer_spec.rope_config import RopeConfig

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_PHI3_LONGROPE = ("su", "yarn")  # the first Phi-3 files have these names for it
_FACTORS = 1e-6, 1e6  # no model is near these limits, and between them every table is finite


def parse_rope(fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The rope of the model, and the own rope of its sliding-window layers, if they have one (Gemma 3).

    `fields` is the whole file with defaults, in one of two styles: rope_theta with rope_scaling, or the rope_parameters
    of transformers 5.
    """
    parameters = fields.object("rope_parameters")
    scaling = fields.object("rope_scaling")
    if fields.has("rope_local_base_freq"):
        full = Fields({**scaling.values, **parameters.object("full_attention").values}, fields.path)
        local = parameters.object("sliding_attention").with_defaults({"rope_theta": fields.get("rope_local_base_freq")})
        ropes = _parse_one(full, fields, head_dim), _parse_one(local, fields, head_dim)
        if any(rope.short_factor != rope.long_factor for rope in ropes):  # a sequence has one offset for all tables
            kind = Fields({"rope_type": "longrope"}, fields.path)
            raise kind.illegal("rope_type", "another one, since layers with a window have a rope of their own")
        return ropes
    return _parse_one(parameters if parameters.values else scaling, fields, head_dim), None


def _parse_one(given: Fields, fields: Fields, head_dim: int) -> RopeConfig:
    """One rope from its object. theta and the partial factor may also be at the top of the file."""
    name = given.get("rope_type") or given.get("type") or "default"
    if fields.get("model_type") == "phi3" and name in _PHI3_LONGROPE:
        name = "longrope"
    kind = Fields({"rope_type": name}, given.path).text("rope_type", ROPE_TYPES)
    top = {"rope_theta": fields.get("rope_theta"), "partial_rotary_factor": fields.get("partial_rotary_factor")}
    given = given.with_defaults(top)
    rotary_dim = int(head_dim * given.number("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise given.illegal("partial_rotary_factor", f"a factor that leaves an even part of head_dim = {head_dim}")
    theta = given.number("rope_theta", None, 1.001, 1e30)
    if kind == "dynamic" and rotary_dim == 2:  # its formula has the power rotary_dim / (rotary_dim - 2)
        raise given.illegal("partial_rotary_factor", "at least 4 rotating dimensions for a dynamic rope")
    max_position = fields.integer("max_position_embeddings")
    if kind == "default":
        return RopeConfig(rotary_dim, theta, max_position=max_position)

    # The top of the file wins, as in transformers (Phi-3 has it there).
    where = fields if fields.has("original_max_position_embeddings") else given
    original = where.integer("original_max_position_embeddings", default=max_position)
    may_derive = kind in ("yarn", "longrope")
    factor = given.number("factor", max_position / original if may_derive else None, *_FACTORS)
    rope = RopeConfig(rotary_dim, theta, kind, factor, max_position, original)
    if kind == "llama3":
        return replace(
            rope,
            low_freq_factor=given.number("low_freq_factor", None, *_FACTORS),
            high_freq_factor=given.number("high_freq_factor", None, *_FACTORS),
        )
    if kind == "yarn":
        return replace(
            rope,
            beta_fast=given.number("beta_fast", 32.0, *_FACTORS),
            beta_slow=given.number("beta_slow", 1.0, *_FACTORS),
            truncate=given.flag("truncate", True),
            attention_factor=given.number("attention_factor", _yarn_attention_factor(given, factor), *_FACTORS),
        )
    return _longrope(rope, given) if kind == "longrope" else rope


def _longrope(rope: RopeConfig, given: Fields) -> RopeConfig:
    """LongRoPE (arXiv 2402.13753), as in transformers' modeling_rope_utils."""
    scale = 1.0
    if rope.factor > 1.0:
        scale = math.sqrt(1 + math.log(rope.factor) / math.log(max(rope.original_max_position, 2)))
    short, long = (given.numbers(f"{kind}_factor", rope.rotary_dim // 2, *_FACTORS) for kind in ("short", "long"))
    attention_factor = given.number("attention_factor", scale, *_FACTORS)
    if given.has("short_mscale"):  # Phi-3.5-MoE's own factors
        attention_factor = given.number("short_mscale", None, *_FACTORS)
        if given.number("long_mscale", None) != attention_factor:
            raise given.illegal("long_mscale", f"short_mscale = {attention_factor:g}, as in the published models")
    return replace(rope, short_factor=short, long_factor=long, attention_factor=attention_factor)


def _yarn_attention_factor(given: Fields, factor: float) -> float:
    """YaRN's factor on cos and sin (arXiv 2309.00071, section 3.4). DeepSeek's files give mscale values."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = (given.number(name, 0.0, 0.0, _FACTORS[1]) for name in ("mscale", "mscale_all_dim"))
    return scale(numerator) / scale(denominator) if numerator and denominator else scale(1.0)


def max_model_len(fields: Fields, rope: RopeConfig) -> int:
    """The context that the model allows, by vLLM's rule: linear, dynamic and yarn stretch the file's position limit.

    The limits of the other types, and of Gemma 3, include the factor already.
    """
    limit = fields.integer("max_position_embeddings")
    if rope.type == "yarn":
        return int(rope.original_max_position * rope.factor)
    if rope.type in ("linear", "dynamic") and not fields.has("rope_local_base_freq"):
        return int(limit * rope.factor)
    return limit
