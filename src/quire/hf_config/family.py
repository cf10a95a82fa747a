"""A family's declaration. With config.json it gives the specs of the layers. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.hf_config.feed_forward import ExpertsForm, gated_mlp
from quire.hf_config.fields import Fields
from quire.hf_config.gguf_metadata import GgufMetadata
from quire.layer_spec.attention import Full, QkNorm, Window
from quire.layer_spec.cuts import Cut
from quire.layer_spec.feed_forward import FeedForward
from quire.layer_spec.layer import LayerSpec, Norms
from quire.layer_spec.rope_config import RopeConfig
from quire.layer_spec.shapes import LinearShape, NormShape

LayerRule = Callable[[Fields, int], bool]  # (file with defaults, layer) -> whether the rule holds for this layer


class NormNames(NamedTuple):
    """Names in the checkpoint of a layer's norms; None: the layer has no norm at this place."""

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


def by_layer_types(default: LayerRule) -> LayerRule:
    """The rule that follows `layer_types` if the file has this field, else the rule `default`."""

    def has_window(fields: Fields, layer: int) -> bool:
        layer_types = fields.sequence("layer_types", str, fields.integer("num_hidden_layers"))
        return default(fields, layer) if layer_types is None else layer_types[layer] == "sliding_attention"

    return has_window


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """Facts that the layers of a model have in common.

    Attributes:
        local_rope: the rope of layers with a window.
        window: tokens; 0: no layer has a window.
    """

    fields: Fields
    family: Family
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
    """The layer of nearly all families: attention of heads, and a gated MLP or experts."""
    names, prefix = facts.family.norms, f"model.layers.{layer}."

    def norms(before: str | None, after: str | None) -> Norms:
        form = (facts.hidden_size, facts.family.has_layer_norms)
        return Norms(*(None if name is None else NormShape(prefix + name, *form) for name in (before, after)))

    return LayerSpec(
        attention=_attention(facts, layer, prefix + "self_attn."),
        feed_forward=_feed_forward(facts, layer, prefix),
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
    rows = Cut("rows", (q_width, kv_width, kv_width) if len(shards) == 1 else ())
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
            prefix=prefix, shards=(("o_proj", hidden),), in_features=q_width, bias=output_bias, cut=Cut("joined")
        ),
    }
    return Window(size=facts.window, **common) if is_local else Full(**common)


def _feed_forward(facts: LayerFacts, layer: int, prefix: str) -> FeedForward:
    form, fields = facts.family.experts, facts.fields
    if form is not None and form.has_experts(fields, layer):
        return form.experts(fields, prefix, facts.hidden_size, facts.activation)
    return gated_mlp(
        f"{prefix}mlp.",
        facts.hidden_size,
        facts.intermediate_size,
        facts.activation,
        bias=fields.flag("mlp_bias", False),
        is_fused=facts.family.has_fused_checkpoint,
    )


def _no_windows(metadata: GgufMetadata, sizes: Fields) -> dict[str, Any]:
    metadata.refuse_windows(sizes)
    return {}


def _nothing(metadata: GgufMetadata) -> dict[str, Any]:
    return {}


def _any_file(metadata: GgufMetadata) -> bool:
    return True


@dataclass(frozen=True)
class GgufForm:
    """The form of a family in llama.cpp's files.

    Attributes:
        architecture: the files' name for it.
        fields: makes fields of config.json that have no key of their own, from the metadata and the other fields.
        is_interleaved: heads in these files rotate neighbouring dimensions; converters reorder the rows of q and k.
        fits_float16: whether activations fit into float16.
        names: the names of modules in a layer, by these files' names, where they are the family's own.
        yarn: fields of a YaRN scaling that have no key in files of other families.
        fits: whether a file of the architecture is of the family; other families may have the same architecture.
    """

    architecture: str
    fields: Callable[[GgufMetadata, Fields], dict[str, Any]] = _no_windows
    is_interleaved: bool = False
    fits_float16: bool = True
    names: Mapping[str, str] = field(default_factory=dict)
    yarn: Callable[[GgufMetadata], dict[str, Any]] = _nothing
    fits: Callable[[GgufMetadata], bool] = _any_file


@dataclass(frozen=True, kw_only=True)
class Family:
    """The declaration of one model_type: facts that config.json leaves out, and the parts of its layers.

    Attributes:
        defaults: the defaults of transformers' config class.
        has_window: used only if the file sets a sliding_window.
        head_dim_field: the field with the size of a head, or of its part that rotates.
        qkv_bias: None: attention_bias of the file decides for q, k, v and o; else it is fixed, and o has no bias.
        norm_offset: added to every norm weight. GGUF files hold the sum.
        has_layer_norms: the norms around attention and MLP, and the last one, take the mean away and have a bias.
        reads: the OPTIONAL_FIELDS that matter. The others change nothing, as in the family's own modelling code.
        scales_embeddings: multiplies embeddings by sqrt(hidden_size).
        has_fused_checkpoint: the checkpoint holds qkv_proj and gate_up_proj.
        renamed_prefixes: pairs (prefix in the checkpoint, our prefix); the first that fits is used. Our names are
            Llama's: `model.embed_tokens`, `model.layers.<i>.self_attn.q_proj`, ..., `model.norm`, `lm_head`.
        renamed_in_layers: such pairs behind `model.layers.<i>.`, of another form of the checkpoint.
        ignored_prefixes: parts of the checkpoint that we do not run.
        experts: the experts of layers that have some; None: all layers have a gated MLP.
        layer: makes the spec of one layer.
    """

    model_type: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_window: LayerRule = never
    has_rope: LayerRule = always
    qk_norm: QkNorm = "none"
    norms: NormNames = PRE_NORM
    norm_offset: float = 0.0
    has_layer_norms: bool = False
    head_dim_field: str = "head_dim"
    qkv_bias: bool | None = None
    reads: tuple[str, ...] = ()
    scales_embeddings: bool = False
    has_fused_checkpoint: bool = False
    renamed_prefixes: tuple[tuple[str, str], ...] = ()
    renamed_in_layers: tuple[tuple[str, str], ...] = ()
    ignored_prefixes: tuple[str, ...] = ()
    experts: ExpertsForm | None = None
    layer: Callable[[LayerFacts, int], LayerSpec] = decoder_layer
    gguf: GgufForm | None = None  # None: the family is not read from GGUF files

    def gguf_names(self) -> dict[str, str]:
        """The family's own names of modules in a layer, by llama.cpp's names."""
        keys = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        names = {key: name for key, name in zip(keys, self.norms, strict=True) if name is not None}
        names |= {} if self.experts is None else self.experts.gguf_names()
        names |= {} if self.gguf is None else self.gguf.names
        return names | ({"ffn_up": "mlp.gate_up_proj"} if self.has_fused_checkpoint else {})
