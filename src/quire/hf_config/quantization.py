"""Reads descriptions of quantized checkpoints: AWQ, GPTQ, compressed-tensors, FP8 of three tools, MXFP4. No torch.

Each method describes the whole model in its own fields. Here they become rules that give each layer a format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from quire.errors import ModelConfigError
from quire.formats.weight_format import MAX_GROUP_SIZE
from quire.hf_config.fields import Fields
from quire.hf_config.layer_format import LayerFormat, Layout, QuantizedCheckpoint, Rule, Scales

# AutoGPTQ, AutoAWQ and ModelOpt wrote these files before config.json held the description.
SEPARATE_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
OUTPUT = "lm_head"
# Names of a method for `--quantization`. They are vLLM's; there, some of them choose kernels.
QUANTIZATION_NAMES = {
    "awq": "awq",
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fbgemm_fp8",
    "modelopt": "modelopt",
    "mxfp4": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4",
    "gguf": "gguf",
}

_GROUP_UNIT = 32
_MAX_NAMES = 65_536
_MAX_PATTERNS = 64
_MAX_PATTERN_CHARS = 256
# A pattern comes with the model, and matching tries every way through it, so the number of ways must be small. A
# repetition has up to L ways in a name of L characters; it counts as _REPETITION_WAYS. Repeated groups are refused.
_REPETITION_WAYS = 16
_MAX_WAYS = 65_536
_MAX_WAYS_TOGETHER = 8 * _MAX_WAYS
_FIX = "Use a checkpoint in a format that is read, or the unquantized one with --quantization int8, int4 or fp8"


def parse_quantization(fields: Fields) -> QuantizedCheckpoint | None:
    """The description in the object of a config.json; None if it has none.

    Raises ModelConfigError if the description is malformed or of a kind that is not read.
    """
    for holder in (fields, fields.object("text_config")):
        for name in ("quantization_config", "compression_config"):
            description = holder.object(name)
            if description.values:
                return parse_description(description)
    return None


def parse_description(fields: Fields, default_method: str = "") -> QuantizedCheckpoint:
    """The description from the object under `quantization_config`, or from a file of SEPARATE_FILES."""
    method = fields.get("quant_method") or fields.get("method") or default_method
    if not method and fields.has("config_groups"):
        method = "compressed-tensors"
    method = str(method).lower()
    parse = _PARSERS.get(method)
    if parse is None:
        raise _unread(fields, "quantized by a method", method or dict(fields.values), ", ".join(_PARSERS))
    rules = tuple(parse(fields))
    if sum(_ways(pattern) for rule in rules for pattern in rule.patterns) > _MAX_WAYS_TOGETHER:
        raise ModelConfigError(
            f"{fields.path} has patterns that together could take very long to match",
            value=[pattern for rule in rules for pattern in rule.patterns],
            expected="fewer of them, or fewer of * + { ? | in them",
        )
    return QuantizedCheckpoint(method, rules)


def _awq(fields: Fields) -> Iterable[Rule]:
    version = str(fields.get("version") or fields.get("checkpoint_format") or fields.get("format") or "gemm").lower()
    if version != "gemm":
        raise _unread(fields, "in a version of AWQ's layout", version, "gemm")
    yield _left_out(fields, "modules_to_not_convert")
    yield _output_left_out("AWQ leaves the output projection")
    bits = _bits(fields, "bits" if fields.has("bits") else "w_bit", (4,))
    scales, group_size = _groups(fields, "group_size" if fields.has("group_size") else "q_group_size")
    layer_format = LayerFormat(layout="awq", bits=bits, scales=scales, group_size=group_size, has_zeros=True)
    yield Rule(format=layer_format, reason="quant_method", is_rest=True)


def _gptq(fields: Fields) -> Iterable[Rule]:
    yield _left_out(fields, "modules_to_not_convert")
    if not fields.flag("lm_head", False):
        yield _output_left_out("lm_head is not set")
    dynamic = fields.object("dynamic")
    _limit(fields, "dynamic", len(dynamic.values), _MAX_PATTERNS)
    for key in dynamic.values:  # by GPTQModel: `-:` before a pattern leaves modules out, else it gives other settings
        patterns = (_pattern(fields, "dynamic", re.sub("^[+-]:", "", key)),)
        own = Fields({**fields.values, **dynamic.object(key).values}, fields.path)
        layer_format = None if key.startswith("-:") else _gptq_format(own)
        yield Rule(format=layer_format, reason="dynamic", patterns=patterns)
    layer_format = _gptq_format(fields)
    if only := _flat(fields, "modules_in_block_to_quantize"):
        yield Rule(format=layer_format, reason="modules_in_block_to_quantize", parts=tuple(only))
    else:
        yield Rule(format=layer_format, reason="quant_method", is_rest=True)


def _gptq_format(fields: Fields) -> LayerFormat:
    version = str(fields.get("checkpoint_format") or fields.get("format") or "gptq").lower()
    if version not in ("gptq", "gptq_v2") or fields.flag("is_marlin_format", False):
        raise _unread(fields, "in a layout of GPTQ", version, "gptq or gptq_v2")
    if fields.get("pack_dtype") not in (None, "int32"):
        raise _unread(fields, "packed into words", fields.get("pack_dtype"), "int32")
    scales, group_size = _groups(fields, "group_size")
    is_symmetric = fields.flag("sym", True)
    is_ordered = fields.flag("desc_act", False) and not fields.flag("static_groups", False)
    return LayerFormat(
        layout="gptq",
        bits=_bits(fields, "bits", (4, 8)),
        scales=scales,
        group_size=group_size,
        has_zeros=not is_symmetric,
        has_order=is_ordered and group_size is not None,
        zero_offset=1 if version == "gptq" else 0,
    )


def _compressed_tensors(fields: Fields) -> Iterable[Rule]:
    sparsity = fields.object("sparsity_config")
    if sparsity.get("format") not in (None, "dense"):
        raise _unread(fields, "sparse", sparsity.get("format"), "dense weights")
    if fields.object("transform_config").values:
        raise _unread(fields, "rotated", "transform_config", "weights without transforms")
    yield _named(fields, "ignore", None)
    groups = fields.object("config_groups")
    for name in groups.values:
        group = groups.object(name)
        layout = str(group.get("format") or fields.get("format") or "dense")
        yield _named(group, "targets", None if layout == "dense" else _compressed_format(group, layout))


# The format, the type and the bits of weights in compressed-tensors: our layout, and the scales that it may have.
_COMPRESSED: dict[tuple[str, str, int], tuple[Layout, tuple[Scales, ...]]] = {
    ("pack-quantized", "int", 4): ("packed", ("channel", "group")),
    ("pack-quantized", "int", 8): ("packed", ("channel", "group")),
    ("int-quantized", "int", 8): ("int8", ("channel", "tensor")),
    ("naive-quantized", "int", 8): ("int8", ("channel", "tensor")),
    ("float-quantized", "float", 8): ("fp8", ("tensor", "channel", "block")),
    ("naive-quantized", "float", 8): ("fp8", ("tensor", "channel", "block")),
}


def _compressed_format(group: Fields, written: str) -> LayerFormat | None:
    weights = group.object("weights")
    if not weights.values:
        return None
    kind = weights.text("type", ("int", "float"), "int")
    bits = weights.integer("num_bits", 8, maximum=64)
    strategy = weights.text(
        "strategy",
        ("tensor", "channel", "group", "block", "tensor_group"),
        "group" if weights.has("group_size") and weights.get("group_size") != -1 else "tensor",
    )
    layout, scales_of_layout = _COMPRESSED.get((written, kind, bits), (None, ()))
    scales = next((each for each in scales_of_layout if each == strategy), None)
    if layout is None or scales is None:
        raise _unread(
            group,
            "in a scheme of compressed-tensors",
            f"{written}, {kind}{bits}, scales per {strategy}",
            "pack-quantized int4 or int8 (channel, group), int-quantized int8 (channel, tensor), "
            "float-quantized fp8 (tensor, channel, block)",
        )
    is_symmetric = weights.flag("symmetric", True)
    if not is_symmetric and layout != "packed":
        raise _unread(group, "with zero points in a scheme", written, "pack-quantized, or symmetric weights")
    order = weights.get("actorder")
    if order not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise weights.illegal("actorder", "group, weight, static, dynamic, true, false or null")
    group_size = _groups(weights, "group_size")[1] if strategy == "group" else None
    if strategy == "group" and group_size is None:
        raise weights.illegal("group_size", "the number of inputs that share a scale, since scales are per group")
    block = weights.sequence("block_structure", int) if strategy == "block" else None
    if strategy == "block" and (block is None or len(block) != 2):
        raise weights.illegal("block_structure", "[rows, columns] of a block")
    return LayerFormat(
        layout=layout,
        bits=bits,
        scales=scales,
        group_size=group_size,
        block=None if block is None else _block(weights, "block_structure"),
        scale_name="weight_scale",
        has_zeros=not is_symmetric,
        has_order=strategy == "group" and order in (True, "group", "dynamic"),
        has_input_scale=_has_input_scale(group, layout),
    )


def _has_input_scale(group: Fields, layout: str) -> bool:
    """Whether a scale for activations is stored. Only FP8 may have one, because integer layers compute their scales."""
    if group.object("output_activations").values:
        raise _unread(group, "with quantized outputs", "output_activations", "null")
    activations = group.object("input_activations")
    if not activations.values:
        return False
    is_static = activations.get("dynamic") in (None, False)
    if layout == "fp8":
        return is_static
    if is_static or not activations.flag("symmetric", True) or activations.get("num_bits") != 8:
        raise _unread(
            group,
            "with activations",
            {name: activations.get(name) for name in ("num_bits", "symmetric", "dynamic")},
            "8 bits, symmetric and dynamic, or none",
        )
    return False


def _fp8(fields: Fields) -> Iterable[Rule]:
    if fields.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise _unread(fields, "in the FP8 format", fields.get("fmt"), "e4m3")
    yield _left_out(fields, "modules_to_not_convert")
    yield _left_out(fields, "ignored_layers")
    yield _output_left_out("FP8 checkpoints leave the output projection")
    block = _block(fields, "weight_block_size") if fields.has("weight_block_size") else None
    yield Rule(
        format=LayerFormat(
            layout="fp8",
            bits=8,
            scales="tensor" if block is None else "block",
            block=block,
            scale_name="weight_scale" if block is None else "weight_scale_inv",
            has_input_scale=fields.text("activation_scheme", ("static", "dynamic"), "dynamic") == "static",
        ),
        reason="quant_method",
        is_rest=True,
    )


def _fbgemm_fp8(fields: Fields) -> Iterable[Rule]:
    """The format of Meta's Llama 4 and Llama 3.1 405B. `activation_scale_ub` is not used: activations stay floats."""
    yield _left_out(fields, "modules_to_not_convert")
    yield _output_left_out("FP8 checkpoints leave the output projection")
    layer_format = LayerFormat(layout="fp8", bits=8, scales="channel", scale_name="weight_scale")
    yield Rule(format=layer_format, reason="quant_method", is_rest=True)


def _modelopt(fields: Fields) -> Iterable[Rule]:
    """The format of NVIDIA's Model Optimizer. Its own file has an object `quantization`; config.json has its fields."""
    is_own_file = fields.has("quantization")
    own = fields.object("quantization") if is_own_file else fields
    algorithm = str(own.get("quant_algo")).upper()
    scales_of: dict[str, Scales] = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel"}
    scales = scales_of.get(algorithm)
    if scales is None:
        raise _unread(own, "by an algorithm of ModelOpt", own.get("quant_algo"), "FP8 or FP8_PER_CHANNEL_PER_TOKEN")
    yield _trees(own, "exclude_modules" if is_own_file else "ignore")
    layer_format = LayerFormat(
        layout="fp8",
        bits=8,
        scales=scales,
        scale_name="weight_scale",
        has_input_scale=scales == "tensor",
    )
    yield Rule(format=layer_format, reason="quant_algo", is_rest=True)


def _mxfp4(fields: Fields) -> Iterable[Rule]:
    """gpt-oss: only experts. transformers quantizes no other modules with this method."""
    yield _left_out(fields, "modules_to_not_convert")
    layer_format = LayerFormat(layout="mxfp4", bits=4, scales="group", group_size=32)
    yield Rule(format=layer_format, reason="quant_method", parts=("experts",))


_PARSERS: dict[str, Callable[[Fields], Iterable[Rule]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}


def _bits(fields: Fields, name: str, choices: tuple[int, ...]) -> int:
    bits = fields.integer(name, maximum=64)
    if bits not in choices:
        raise _unread(fields, "with bits per weight", bits, " or ".join(map(str, choices)))
    return bits


def _groups(fields: Fields, name: str) -> tuple[Scales, int | None]:
    """The kind of scales, and the group size; None: the whole row is a group, which is -1 in the file."""
    size = fields.integer(name, -1, minimum=-1)
    if size == -1:
        return "channel", None
    if size % _GROUP_UNIT or not 0 < size <= MAX_GROUP_SIZE:
        raise fields.illegal(name, f"-1, or a multiple of {_GROUP_UNIT} up to {MAX_GROUP_SIZE:,}")
    return "group", size


def _block(fields: Fields, name: str) -> tuple[int, int]:
    rows, columns = (int(size) for size in fields.numbers(name, 2, 1, MAX_GROUP_SIZE))
    return rows, columns


def _output_left_out(reason: str) -> Rule:
    return Rule(format=None, reason=reason, names=(OUTPUT,))


def _left_out(fields: Fields, name: str) -> Rule:
    """Modules to leave out, by consecutive parts of their names."""
    return Rule(format=None, reason=name, parts=tuple(part.strip(".") for part in _names(fields, name)))


def _trees(fields: Fields, name: str) -> Rule:
    """Modules to leave out with all that is in them. ModelOpt writes `module*` for these; `*` is any text."""
    trees = [text.rstrip("*").rstrip(".") for text in _names(fields, name)]
    patterns = [tree for tree in trees if "*" in tree]
    _limit(fields, name, len(patterns), _MAX_PATTERNS)
    return Rule(
        format=None,
        reason=name,
        parts=tuple(tree for tree in trees if "*" not in tree),
        patterns=tuple(
            _pattern(fields, name, ".*".join(map(re.escape, pattern.split("*"))) + r"(\.|\Z)") for pattern in patterns
        ),
    )


def _named(fields: Fields, name: str, layer_format: LayerFormat | None) -> Rule:
    """A rule in the form of compressed-tensors: whole names, `re:` and a pattern, or the class `Linear`."""
    names = _names(fields, name)
    patterns = [text.removeprefix("re:") for text in names if text.startswith("re:")]
    _limit(fields, name, len(patterns), _MAX_PATTERNS)
    return Rule(
        format=layer_format,
        reason=name,
        names=tuple(names),
        patterns=tuple(_pattern(fields, name, text) for text in patterns),
        is_rest="Linear" in names,
    )


def _names(fields: Fields, name: str) -> list[str]:
    names = fields.sequence(name, str) or []
    _limit(fields, name, len(names), _MAX_NAMES)
    return names


def _flat(fields: Fields, name: str) -> list[str]:
    """A list of names or of lists of names."""
    value = fields.get(name) or []
    if not isinstance(value, list):
        raise fields.illegal(name, "a list of names")
    names = [inner for entry in value for inner in (entry if isinstance(entry, list) else [entry])]
    if not all(isinstance(inner, str) for inner in names):
        raise fields.illegal(name, "a list of names")
    _limit(fields, name, len(names), _MAX_NAMES)
    return names


def _limit(fields: Fields, name: str, count: int, limit: int) -> None:
    if count > limit:
        raise ModelConfigError(
            f"{fields.path} lists too many modules in {name}", value=count, expected=f"at most {limit}"
        )


def _pattern(fields: Fields, name: str, text: str) -> str:
    """A regular expression, checked."""
    if len(text) > _MAX_PATTERN_CHARS or _ways(text) > _MAX_WAYS:
        raise ModelConfigError(
            f"{fields.path} has a pattern in {name} that could take very long to match",
            value=text,
            expected=f"at most {_MAX_PATTERN_CHARS} characters and 4 of * + {{, none after a group, "
            "and few of ? and | beside them",
        )
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelConfigError(f"{fields.path} has an illegal pattern in {name}: {error}", value=text) from None
    return text


def _ways(pattern: str) -> int:
    """The most ways in which a name can be tried against a pattern, counted as for _MAX_WAYS."""
    plain = re.sub(r"\\.", "_", pattern, flags=re.DOTALL)
    if re.search(r"\)[*+{]|\(\?[a-zA-Z-]*x", plain):  # x (verbose): blanks may hide the repetition of a group
        return _MAX_WAYS + 1
    repetitions = sum(plain.count(sign) for sign in "*+{")
    optionals = len(re.findall(r"(?<!\()\?", plain))
    # Pieces between brackets are groups or parts of groups, so this product is not below the one over whole groups.
    alternatives = math.prod(piece.count("|") + 1 for piece in re.split("[()]", plain))
    return int(_REPETITION_WAYS**repetitions * 2**optionals * alternatives)


def _unread(fields: Fields, what: str, value: Any, expected: str) -> ModelConfigError:
    return ModelConfigError(
        f"{fields.path} describes a quantized checkpoint {what} that is not read",
        value=value,
        expected=expected,
        fix=_FIX,
    )
