"""The formats of linear layers in a quantized checkpoint. The name of a layer chooses its format. No torch.

Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Layout = Literal["awq", "gptq", "packed", "int8", "fp8", "mxfp4"]
Scales = Literal["tensor", "channel", "group", "block"]


@dataclass(frozen=True, kw_only=True)
class LayerFormat:
    """The tensors that stand for one linear weight.

    Attributes:
        layout: the tensors of AutoAWQ's gemm, of GPTQ, of compressed-tensors' pack-quantized (packed) or int-quantized
            (int8), a weight in float8_e4m3fn with its scales (fp8), or gpt-oss's blocks with their scales (mxfp4).
        bits: the bits of a weight.
        scales: one scale is for the whole tensor, an output channel, a group along K, or a block of N x K.
        group_size: elements along K, for groups.
        block: (rows, columns), for blocks.
        scale_name: the name of the tensor with the scales.
        has_zeros: zero points are stored.
        has_order: the group of each in-feature is stored (act-order).
        zero_offset: added to stored zero points (the first version of GPTQ's files).
        has_input_scale: a scale for activations is stored too.
    """

    layout: Layout
    bits: int
    scales: Scales
    group_size: int | None = None
    block: tuple[int, int] | None = None
    scale_name: str = "scales"
    has_zeros: bool = False
    has_order: bool = False
    zero_offset: int = 0
    has_input_scale: bool = False

    def __post_init__(self) -> None:
        assert (self.scales == "group") == (self.group_size is not None)
        assert (self.scales == "block") == (self.block is not None)

    def describe(self) -> str:
        """Text for people, for example `4-bit, groups of 128, zero points`."""
        shared = {
            "tensor": "one scale",
            "channel": "a scale per output channel",
            "group": f"groups of {self.group_size}",
            "block": "blocks of {}x{}".format(*self.block or (0, 0)),
        }[self.scales]
        names = {"fp8": "FP8", "mxfp4": "MXFP4"}
        parts = [f"{names.get(self.layout, f'{self.bits}-bit')}, {shared}"]
        if self.has_zeros:
            parts.append("zero points")
        if self.has_order:
            parts.append("act-order")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The format of some layers, chosen by name; None: they stay in floating point.

    The repr of a rule is part of the key of kept weights. So no field is a set: its order changes between starts.

    Attributes:
        reason: the field of the config with this rule.
        names: whole names.
        parts: parts of a name between dots, for example `self_attn` or `layers.0` in `layers.0.self_attn`.
        patterns: regular expressions that match from the start. They are checked: each compiles and matches fast.
        is_rest: the rule covers every layer.
    """

    format: LayerFormat | None
    reason: str
    names: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    is_rest: bool = False

    @cached_property
    def _name_set(self) -> frozenset[str]:
        return frozenset(self.names)

    @cached_property
    def _part_set(self) -> frozenset[str]:
        return frozenset(self.parts)

    def covers(self, name: str) -> bool:
        if self.is_rest or name in self._name_set:
            return True
        if self.parts and any(part in self._part_set for part in _parts(name)):
            return True
        return any(re.match(pattern, name) for pattern in self.patterns)


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """The description of the weights in config.json. The first rule that covers a layer's name decides.

    Args:
        method: awq, gptq, compressed-tensors, fp8, fbgemm_fp8, modelopt or mxfp4.
    """

    method: str
    rules: tuple[Rule, ...]

    def rule_for(self, name: str) -> Rule | None:
        """The rule of a layer. None: the config has no rule for it, and it is in floating point."""
        return next((rule for rule in self.rules if rule.covers(name)), None)

    def format_of(self, name: str) -> LayerFormat | None:
        """The format of a layer such as `model.layers.0.mlp.down_proj` or `lm_head`; None: floating point."""
        rule = self.rule_for(name)
        return None if rule is None else rule.format

    @cached_property
    def _formats_of_experts(self) -> dict[tuple[str, int], tuple[LayerFormat | None, ...]]:
        return {}

    def formats_of(self, name: str, num_experts: int) -> tuple[LayerFormat | None, ...]:
        """The formats of a layer's experts. In its name, `{}` stands for the expert. 0 experts: an ordinary layer."""
        if num_experts == 0:
            return (self.format_of(name),)
        known, key = self._formats_of_experts, (name, num_experts)
        if key not in known:
            known[key] = tuple(self.format_of(name.format(expert)) for expert in range(num_experts))
        return known[key]

    def describe(self) -> str:
        formats = dict.fromkeys(rule.format.describe() for rule in self.rules if rule.format is not None)
        return "; ".join(formats) or "no layer is quantized"


def _parts(name: str) -> Iterator[str]:
    words = name.split(".")
    for begin in range(len(words)):
        for end in range(begin + 1, len(words) + 1):
            yield ".".join(words[begin:end])
