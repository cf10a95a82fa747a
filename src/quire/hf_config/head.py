"""The fields of ModelConfig for heads that draft from the hidden states of a target: EAGLE-3 and layers of the target.

vLLM has the same names and meanings: llama_eagle3.py, mimo_mtp.py, and the configs of the speculators library. In
deepseek_mtp.py the layer's own hidden state goes on before its last norm; here, as in SGLang's deepseek_nextn.py, it
goes on after this norm, like the hidden state of the target.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from quire.errors import ModelConfigError
from quire.hf_config.family import Family, LayerFacts, decoder_layer
from quire.hf_config.fields import Fields
from quire.hf_config.layer_format import Rule
from quire.hf_config.translate import merge, translate
from quire.layer_spec.attention import Full
from quire.layer_spec.draft_head import DraftHead
from quire.layer_spec.layer import LayerSpec, Norms
from quire.layer_spec.shapes import LinearShape, NormShape

_LAYER = "model.layers.0."
MTP_PREFIX = "model.mtp_layers."
# Families whose checkpoints number the layers for multi-token prediction on behind the others.
_NUMBERED_ON = ("deepseek_v3", "glm4_moe")


class Target(NamedTuple):
    """The facts about its target that a head needs."""

    num_layers: int
    hidden_size: int
    vocab_size: int


def _eagle3_layer(facts: LayerFacts, layer: int) -> LayerSpec:
    """The first layer's attention reads two rows side by side, and their norms belong to the head."""
    spec = decoder_layer(facts, layer)
    if layer > 0:
        return spec
    assert isinstance(spec.attention, Full)
    qkv = replace(spec.attention.qkv, in_features=2 * facts.hidden_size)
    return replace(spec, attention=replace(spec.attention, qkv=qkv), attention_norms=Norms())


EAGLE3 = Family(
    model_type="eagle3",
    architectures=("LlamaForCausalLMEagle3",),
    defaults={"max_position_embeddings": 2048, "num_hidden_layers": 1},
    reads=("mlp_bias",),
    renamed_prefixes=(
        ("midlayer.", _LAYER),
        ("layers.", "model.layers."),
        ("norm.", "model.norm."),
        ("embed_tokens.", "model.embed_tokens."),
    ),
    ignored_prefixes=("t2d", "verifier_"),
    layer=_eagle3_layer,
)


def _with_queries_apart(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """The layers, with the queries of the last one stored apart: what a head only reads needs none of them."""
    last = layers[-1]
    if not isinstance(last.attention, Full) or len(last.attention.qkv.shards) != 3:
        return layers
    qkv = replace(last.attention.qkv, is_first_apart=True)
    return *layers[:-1], replace(last, attention=replace(last.attention, qkv=qkv))


def eagle3(raw: Mapping[str, Any], path: str, target: Target, names: Collection[str]) -> dict[str, Any]:
    """Keyword arguments for ModelConfig, all but the folder.

    Args:
        raw: config.json of the head, or of the speculators library.
        names: the names of the tensors of its checkpoint; empty: nobody has looked, so it has what such heads mostly
            have.

    Raises ModelConfigError: the head does not fit the target, or it is of a kind that is not in this version.
    """
    outer = Fields(raw, path)
    inner = merge(raw, outer.object("transformer_layer_config").values)
    if raw.get("transformer_layer_config") is not None and outer.get("norm_before_residual") is None:
        raise ModelConfigError(f"{path} lacks norm_before_residual", fix="Use the config.json of the checkpoint")
    facts = translate(
        {**inner, "architectures": list(EAGLE3.architectures)}, path, {"eagle3": EAGLE3}, any_architecture=False
    )
    fields, of_eagle = Fields(inner, path), outer.object("eagle_config")
    if not of_eagle.flag("use_aux_hidden_state", True):
        raise of_eagle.illegal("use_aux_hidden_state", "true: heads on the last hidden state are not in this version")
    hidden_size = facts["hidden_size"]
    _check_same(path, "vocab_size", facts["vocab_size"], "vocab_size", target.vocab_size)
    stream_size = outer.integer("target_hidden_size", default=target.hidden_size)
    _check_same(path, "target_hidden_size", stream_size, "hidden_size", target.hidden_size)
    num_drafted = fields.integer("draft_vocab_size", default=target.vocab_size, maximum=target.vocab_size)
    owns_embeddings, owns_output = "embed_tokens.weight" in names, not names or "lm_head.weight" in names
    if not owns_embeddings:
        _check_same(path, "hidden_size", hidden_size, "hidden_size", target.hidden_size, "embed_tokens.weight")
    if not owns_output:
        _check_same(path, "draft_vocab_size", num_drafted, "vocab_size", target.vocab_size, "lm_head.weight")
    streams = _streams(outer, of_eagle, target)
    width = len(streams) * stream_size
    shards = (("fc", hidden_size),)
    return facts | {
        "head": DraftHead(
            kind="eagle3",
            streams=streams,
            stream_size=stream_size,
            input=LinearShape(prefix="", shards=shards, in_features=width, bias="fc.bias" in names),
            norms=(
                NormShape(_LAYER + "input_layernorm", hidden_size),
                NormShape(_LAYER + "hidden_norm", hidden_size),
            ),
            norm_before_residual=outer.flag("norm_before_residual", False),
            num_tokens=num_drafted,
            maps_tokens="d2t" in names or num_drafted < target.vocab_size,
            owns_embeddings=owns_embeddings,
            owns_output=owns_output,
        ),
        "layers": _with_queries_apart(facts["layers"]),
        "tie_word_embeddings": False,
        "logits_scaling": 1.0 / fields.number("logit_scale", 1.0, minimum=1e-6),
    }


def _streams(outer: Fields, of_eagle: Fields, target: Target) -> tuple[int, ...]:
    """The layers before which the target's residual stream is read; vLLM's choice where the file says nothing."""
    name, last = "eagle_aux_hidden_state_layer_ids", target.num_layers
    found = outer if outer.has(name) else of_eagle
    streams = tuple(found.sequence(name, int) or (2, last // 2, last - 3))
    for layer in streams:
        if not 0 <= layer <= last:
            raise ModelConfigError(
                f"{outer.path}: the head reads the model before a layer that the model does not have",
                value=f"layer {layer} of {name} = {list(streams)}",
                expected=f"0 to {last}: the model has {last} layers",
                fix="Use a head that was trained for this model",
            )
    return streams


def mtp(
    raw: Mapping[str, Any], path: str, families: Mapping[str, Family], target: Target, names: Collection[str]
) -> dict[str, Any]:
    """Keyword arguments for ModelConfig, all but the folder: the target's first layer for multi-token prediction.

    Args:
        raw: config.json of the target.
        names: the names, as for eagle3.

    Raises ModelConfigError: the model has no such layer.
    """
    fields = Fields(raw, path)
    kind, count = fields.get("model_type"), fields.integer("num_nextn_predict_layers", default=0, minimum=0)
    if kind not in ("mimo", *_NUMBERED_ON) or not count:
        raise ModelConfigError(
            f"{path}: the model has no layers for multi-token prediction that are in this version",
            value=f"model_type = {kind}, num_nextn_predict_layers = {fields.get('num_nextn_predict_layers')}",
            expected=f"model_type = mimo, {' or '.join(_NUMBERED_ON)}, and num_nextn_predict_layers = 1 or more",
            fix="Use another method",
        )
    if kind in _NUMBERED_ON:
        return _numbered_on(raw, path, families, target, names)
    alone = {name: value for name, value in raw.items() if name != "layer_types"} | {"num_hidden_layers": 1}
    facts = translate(alone, path, families, any_architecture=False)
    hidden_size, first = target.hidden_size, f"{MTP_PREFIX}0."
    others = {f"{MTP_PREFIX}{name.removeprefix(MTP_PREFIX).split('.')[0]}." for name in names if MTP_PREFIX in name}
    return facts | {
        "head": DraftHead(
            kind="mtp",
            streams=(target.num_layers,),
            stream_size=hidden_size,
            input=LinearShape(prefix=_LAYER, shards=(("input_proj", hidden_size),), in_features=2 * hidden_size),
            norms=(
                NormShape(_LAYER + "token_layernorm", hidden_size),
                NormShape(_LAYER + "hidden_layernorm", hidden_size),
            ),
            num_tokens=target.vocab_size,
        ),
        "layers": _with_queries_apart(facts["layers"]),
        "tie_word_embeddings": False,
        "renamed_prefixes": ((f"{first}final_layernorm.", "model.norm."), (first, _LAYER)),
        "ignored_prefixes": (
            *("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."),
            *sorted(others - {first}),
        ),
    }


def _numbered_on(
    raw: Mapping[str, Any], path: str, families: Mapping[str, Family], target: Target, names: Collection[str]
) -> dict[str, Any]:
    """See mtp: the layer behind the last one, as DeepSeek-V3 has it. It uses the target's embeddings and output.

    Checkpoints hold these a second time, in the layer.
    """
    number, hidden_size = target.num_layers, target.hidden_size
    layer = f"model.layers.{number}."
    if names and not any(name.startswith(layer) for name in names):
        raise ModelConfigError(
            f"{path}: the checkpoint lacks the layer for multi-token prediction that its config names",
            value=f"no tensor of {layer}*",
            fix="Use the model's own checkpoint, or another method: tools that quantize leave this layer out",
        )
    facts = translate(dict(raw) | {"num_hidden_layers": number + 1}, path, families, any_architecture=False)
    join = LinearShape(prefix=layer, shards=(("eh_proj", hidden_size),), in_features=2 * hidden_size)
    quantized, of_join = facts["quantized"], [name for name in names if name.startswith(f"{join.names[0]}.")]
    if quantized is not None and all(name.endswith(("eh_proj.weight", ".bias")) for name in of_join):
        # It is in floating point, although no field of the config says so.
        rule = Rule(format=None, reason="it joins two hidden states", names=join.names)
        quantized = replace(quantized, rules=(rule, *quantized.rules))
    return facts | {
        "head": DraftHead(
            kind="mtp",
            streams=(number,),
            stream_size=hidden_size,
            input=join,
            norms=(NormShape(f"{layer}enorm", hidden_size), NormShape(f"{layer}hnorm", hidden_size)),
            token_first=True,
            reads_normed=True,
            num_tokens=target.vocab_size,
        ),
        "layers": _with_queries_apart(facts["layers"][number:]),
        "quantized": quantized,
        "tie_word_embeddings": False,
        "renamed_prefixes": ((f"{layer}shared_head.norm.", "model.norm."), *facts["renamed_prefixes"]),
        "ignored_prefixes": (
            *facts["ignored_prefixes"],
            *(f"model.layers.{index}." for index in range(number)),
            *(f"{layer}embed_tokens.", f"{layer}shared_head.head."),
            *("model.embed_tokens.", "model.norm.", "lm_head."),
        ),
    }


def _check_same(path: str, name: str, value: int, of_target: str, expected: int, lacks: str = "") -> None:
    if value != expected:
        raise ModelConfigError(
            f"{path}: the head does not fit the model" + (f", and has no {lacks} of its own" if lacks else ""),
            value=f"{name} = {value}",
            expected=f"{expected}, the model's {of_target}",
            fix="Use a head that was trained for this model",
        )
