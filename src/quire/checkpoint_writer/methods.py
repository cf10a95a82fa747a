"""Each format's conversion of one layer's weights: the tensors to write, and the values that they stand for.

Tensors have their names inside the layer, for example `self_attn.q_proj.weight`.
Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.checkpoint_writer import layouts
from quire.checkpoint_writer.awq import Inputs, round_clipped, search_factors
from quire.checkpoint_writer.gptq import DAMPING, gptq
from quire.checkpoint_writer.layerwise import LayerLinear
from quire.checkpoint_writer.rounding import round_to_nearest
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.reference import dequantize_grouped
from quire.quantization.awq import awq_tensors
from quire.quantization.compressed_tensors import int8_tensors, pack_quantized_tensors
from quire.quantization.gptq import gptq_tensors

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Layer:
    """One decoder layer in floating point.

    Attributes:
        weights: the weights by name.
        linears: the linear layers to quantize.
        norms: names of norms, and the number that is added to their weights.
        inputs: statistics of each linear layer, by the first of its names; empty if the format needs no calibration.
        head_dim: elements of a head in attention's values; 0: the layer has no attention.
    """

    weights: Weights
    linears: list[LayerLinear]
    norms: dict[str, float]
    inputs: Mapping[str, Inputs]
    head_dim: int


@dataclass(frozen=True)
class QuantizedLayer:
    """Tensors to write, and the floating-point weights for a run of the layer."""

    written: Weights
    values: Weights


class Method(Protocol):
    """A format and the way to it. Out- and in-features must be multiples of the two numbers in `needs`."""

    @property
    def needs_calibration(self) -> bool: ...

    @property
    def needs(self) -> tuple[int, int]: ...

    def quantize(self, layer: Layer) -> QuantizedLayer: ...

    def description(self, ignore: list[str]) -> dict[str, Any]:
        """`quantization_config`. `ignore`: linear layers outside the decoder layers."""
        ...


def _converted(
    weights: Weights,
    linears: list[LayerLinear],
    convert: Callable[[LayerLinear, Tensor], tuple[layouts.Tensors, Tensor]],
) -> QuantizedLayer:
    """Convert each weight [N, K] of the linear layers to tensors to write and values; the other weights stay."""
    written, values = dict(weights), dict(weights)
    for linear in linears:
        for name in linear.names:
            weight_NK = written.pop(f"{name}.weight")
            tensors, value_NK = convert(linear, weight_NK)
            written |= {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}
            values[f"{name}.weight"] = value_NK.to(weight_NK.dtype)
    return QuantizedLayer(written, values)


@dataclass(frozen=True)
class RoundToNearest:
    """Each element by itself, without calibration. `convert` turns a weight [N, K] into tensors to write and values."""

    convert: Callable[[Tensor], tuple[layouts.Tensors, Tensor]]
    describe: Callable[[list[str]], dict[str, Any]]
    needs: tuple[int, int]
    needs_calibration: bool = False

    def quantize(self, layer: Layer) -> QuantizedLayer:
        return _converted(layer.weights, layer.linears, lambda _, weight_NK: self.convert(weight_NK))

    def description(self, ignore: list[str]) -> dict[str, Any]:
        return self.describe(ignore)


@dataclass(frozen=True)
class GPTQ:
    group_size: int
    act_order: bool
    needs_calibration: bool = True

    @property
    def needs(self) -> tuple[int, int]:
        return 8, self.group_size

    def quantize(self, layer: Layer) -> QuantizedLayer:
        def convert(linear: LayerLinear, weight_NK: Tensor) -> tuple[layouts.Tensors, Tensor]:
            gram_KK = layer.inputs[linear.names[0]].gram_KK
            grouped = gptq(weight_NK, gram_KK, self.group_size, act_order=self.act_order)
            return gptq_tensors(grouped), dequantize_grouped(grouped)

        return _converted(layer.weights, layer.linears, convert)

    def description(self, ignore: list[str]) -> dict[str, Any]:
        return layouts.gptq_description(self.group_size, self.act_order, DAMPING)


@dataclass(frozen=True)
class AWQ:
    group_size: int
    needs_calibration: bool = True

    @property
    def needs(self) -> tuple[int, int]:
        return 8, self.group_size

    def quantize(self, layer: Layer) -> QuantizedLayer:
        scaled = {name: tensor.clone() for name, tensor in layer.weights.items()}
        factors = {linear.names[0]: self._scale(layer, linear, scaled) for linear in layer.linears}

        def convert(linear: LayerLinear, weight_NK: Tensor) -> tuple[layouts.Tensors, Tensor]:
            first = linear.names[0]
            squares_K = layer.inputs[first].gram_KK.diagonal() / factors[first] ** 2
            grouped = round_clipped(weight_NK, squares_K, self.group_size)
            return awq_tensors(grouped), dequantize_grouped(grouped)

        return _converted(scaled, layer.linears, convert)

    def _scale(self, layer: Layer, linear: LayerLinear, scaled: Weights) -> Tensor:
        """Scale one linear layer's in-features in `scaled`, and their source by the inverse -> the factors."""
        source = _source_of(layer, linear)
        inputs = layer.inputs[linear.names[0]]
        if source is None:
            return torch.ones(linear.in_features)
        weight_NK = torch.cat([layer.weights[f"{name}.weight"].float() for name in linear.names])
        factors_K = search_factors(weight_NK, inputs, self.group_size, source.repeat)
        factors_K = source.divide(scaled, factors_K)
        for name in linear.names:
            tensor = scaled[f"{name}.weight"]
            scaled[f"{name}.weight"] = (tensor.float() * factors_K).to(tensor.dtype)
        return factors_K

    def description(self, ignore: list[str]) -> dict[str, Any]:
        return layouts.awq_description(self.group_size)


@dataclass(frozen=True)
class _Source:
    """The part that makes the inputs of a linear layer. `divide` changes it and returns the factors that it used."""

    divide: Callable[[Weights, Tensor], Tensor]
    repeat: tuple[int, int] | None = None


def _source_of(layer: Layer, linear: LayerLinear) -> _Source | None:
    """The part that can take the inverse factors; None: there is none, because the residual stream is the input."""
    module, _, first = linear.names[0].rpartition(".")
    if first in ("o_proj", "down_proj"):
        return _rows_before(layer, module, first)
    norm = "input_layernorm" if module == "self_attn" else "pre_feedforward_layernorm"
    if module == "mlp" and norm not in layer.norms:
        norm = "post_attention_layernorm"
    if "input_layernorm" not in layer.norms:  # the model has norms after attention and MLP
        return None
    offset = layer.norms[norm]

    def divide(weights: Weights, factors_K: Tensor) -> Tensor:
        old_K = weights[f"{norm}.weight"]
        new_K = ((old_K.float() + offset) / factors_K - offset).to(old_K.dtype)
        weights[f"{norm}.weight"] = new_K
        taken_K = (old_K.float() + offset) / (new_K.float() + offset)  # these include the rounding of the norm
        return torch.where(taken_K.isfinite() & (taken_K > 0), taken_K, torch.ones_like(taken_K))

    return _Source(divide)


def _rows_before(layer: Layer, module: str, first: str) -> _Source:
    """v_proj makes the inputs of o_proj, up_proj of down_proj: both are the last rows of a fused weight."""
    inner = next(linear.in_features for linear in layer.linears if linear.names[0] == f"{module}.{first}")
    before = next(linear for linear in layer.linears if linear.names[0].startswith(f"{module}.") and first not in
                  linear.names[0])  # fmt: skip
    name = before.names[-1]
    if first == "down_proj":
        num_rows, times = inner, 1
    else:
        # The weight holds all of q, then k and v; k and v have the same width.
        num_rows = (sum(before.sizes) - inner) // 2
        times = inner // num_rows

    def divide(weights: Weights, factors_K: Tensor) -> Tensor:
        factors_N = factors_K.view(-1, times, layer.head_dim)[:, 0].flatten() if times > 1 else factors_K
        for suffix in (".weight", ".bias"):
            if (tensor := weights.get(name + suffix)) is not None:
                rows = tensor[-num_rows:].float()
                tensor[-num_rows:] = (rows / factors_N.view(-1, *[1] * (rows.dim() - 1))).to(tensor.dtype)
        return factors_K

    return _Source(divide, repeat=(times, layer.head_dim) if times > 1 else None)


def method(to: str, group_size: int, act_order: bool, dtype: torch.dtype) -> Method:
    """The method with this name, a key of FORMATS. `dtype`: of scales, in formats that store them in the model's."""
    if to == "gptq":
        return GPTQ(group_size, act_order)
    if to == "awq":
        return AWQ(group_size)
    weights: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
    activations: dict[str, Any] | None = layouts.ROWS_INT8
    layout, needs = "int-quantized", (1, 16)
    if to == "int4":
        weights |= {"num_bits": 4, "strategy": "group", "group_size": group_size}
        layout, activations, needs = "pack-quantized", None, (1, group_size)
    elif to == "fp8":
        weights |= {"type": "float"}
        layout, activations, needs = "float-quantized", layouts.ROWS_FP8, (1, 1)

    def convert(weight_NK: Tensor) -> tuple[layouts.Tensors, Tensor]:
        if to == "fp8":
            tensors = layouts.fp8(weight_NK, dtype)
            return tensors, tensors["weight"].float() * tensors["weight_scale"].float()
        bits, size = (4, group_size) if to == "int4" else (8, weight_NK.shape[1])
        grouped = round_to_nearest(weight_NK, bits, size, symmetric=True, scale_dtype=dtype)
        write: Callable[[GroupedWeight, torch.dtype], layouts.Tensors]
        write = pack_quantized_tensors if to == "int4" else int8_tensors
        return write(grouped, dtype), dequantize_grouped(grouped)

    def describe(ignore: list[str]) -> dict[str, Any]:
        return layouts.compressed_tensors_description(layout, weights, activations, ignore)

    return RoundToNearest(convert, describe, needs)
