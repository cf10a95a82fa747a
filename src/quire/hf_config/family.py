"""What one family declares, and how its layers follow from that and from config.json. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.hf_config.fields import Fields
from quire.layer_spec import Cut, Dense, Full, LayerSpec, LinearShape, Norms, NormShape, QkNorm, RopeConfig, Window

LayerRule = Callable[[Fields, int], bool]  # (file with defaults, layer) -> does it hold for this layer?


class NormNames(NamedTuple):
    """The norms of a layer by their names in the checkpoint; None: there is none at this place."""

    before_attention: str | None
    after_attention: str | None
    before_feed_forward: str | None
    after_feed_forward: str | None


PRE_NORM = NormNames("input_layernorm", None, "post_attention_layernorm", None)
SANDWICH = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
POST_NORM = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def never(fields: Fields, layer: int) -> bool:
    return False


def always(fields: Fields, layer: int) -> bool:
    return True


@dataclass(frozen=True)
class HfFamily:
    """One model_type. `has_window` is asked only if the file sets a sliding_window."""

    architectures: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_window: LayerRule = never
    has_rope: LayerRule = always
    qk_norm: QkNorm = "none"
    norms: NormNames = PRE_NORM
    qkv_bias: bool | None = (
        None  # None: attention_bias of the file decides for q, k, v and o; else fixed, and o has none
    )
    reads: tuple[str, ...] = ()  # of OPTIONAL_FIELDS; the others change nothing, as in its own modelling code
    scales_embeddings: bool = False  # by sqrt(hidden_size)
    has_fused_checkpoint: bool = False  # it holds qkv_proj and gate_up_proj


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What the layers of a model have in common.

    Attributes:
        local_rope: of layers with a window.
        window: tokens; 0: no layer has one.
    """

    fields: Fields
    family: HfFamily
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    local_rope: RopeConfig
    window: int
    attention_scale: float
    activation: str


def decoder_layer(facts: LayerFacts, layer: int) -> LayerSpec:
    """The layer that nearly all families have: attention of heads, and a gated MLP."""
    names, prefix = facts.family.norms, f"model.layers.{layer}."

    def norms(before: str | None, after: str | None) -> Norms:
        shapes = (None if name is None else NormShape(prefix + name, facts.hidden_size) for name in (before, after))
        return Norms(*shapes)

    return LayerSpec(
        attention=_attention(facts, layer, prefix + "self_attn."),
        feed_forward=_feed_forward(facts, prefix + "mlp."),
        attention_norms=norms(names.before_attention, names.after_attention),
        feed_forward_norms=norms(names.before_feed_forward, names.after_feed_forward),
        residual_multiplier=facts.fields.number("residual_multiplier", 1.0),
    )


def _attention(facts: LayerFacts, layer: int, prefix: str) -> Full:
    fields, family, hidden = facts.fields, facts.family, facts.hidden_size
    q_width, kv_width = facts.num_q_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    shards: tuple[tuple[str, int], ...] = (("q_proj", q_width), ("k_proj", kv_width), ("v_proj", kv_width))
    if family.has_fused_checkpoint:
        shards = (("qkv_proj", q_width + 2 * kv_width),)
    has_bias = fields.flag("attention_bias", False)
    qkv_bias, output_bias = (has_bias, has_bias) if family.qkv_bias is None else (family.qkv_bias, False)
    is_local = bool(facts.window) and family.has_window(fields, layer)
    rope = facts.local_rope if is_local else facts.rope
    rows = Cut("rows", facts.head_dim, (q_width, kv_width, kv_width) if len(shards) == 1 else (), may_repeat=True)
    columns = Cut("columns", facts.head_dim)
    common: dict[str, Any] = {
        "num_q_heads": facts.num_q_heads,
        "num_kv_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "scale": facts.attention_scale,
        "soft_cap": fields.number("attn_logit_softcapping", 0.0, minimum=0.0),
        "rope": rope if family.has_rope(fields, layer) else None,
        "qk_norm": family.qk_norm,
        "qkv": LinearShape(prefix=prefix, shards=shards, in_features=hidden, bias=qkv_bias, cut=rows),
        "output": LinearShape(
            prefix=prefix, shards=(("o_proj", hidden),), in_features=q_width, bias=output_bias, cut=columns
        ),
    }
    return Window(size=facts.window, **common) if is_local else Full(**common)


def _feed_forward(facts: LayerFacts, prefix: str) -> Dense:
    hidden, inner, bias = facts.hidden_size, facts.intermediate_size, facts.fields.flag("mlp_bias", False)
    shards: tuple[tuple[str, int], ...] = (("gate_proj", inner), ("up_proj", inner))
    if facts.family.has_fused_checkpoint:
        shards = (("gate_up_proj", 2 * inner),)
    rows = Cut("rows", sections=(inner, inner) if len(shards) == 1 else ())
    return Dense(
        gate_up=LinearShape(prefix=prefix, shards=shards, in_features=hidden, bias=bias, cut=rows),
        down=LinearShape(
            prefix=prefix, shards=(("down_proj", hidden),), in_features=inner, bias=bias, cut=Cut("columns")
        ),
        activation=facts.activation,
    )
