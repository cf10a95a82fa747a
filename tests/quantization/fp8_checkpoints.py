"""Writes small FP8 checkpoints in each form, from its description, without Quire's code.

Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tests.quantization.checkpoints import Written, write_model


@dataclass(frozen=True, kw_only=True)
class Fp8Form:
    """One kind of checkpoint."""

    method: Literal["fp8", "compressed-tensors", "modelopt"] = "fp8"
    scales: Literal["tensor", "channel", "block"] = "tensor"
    block: tuple[int, int] = (128, 128)
    scale_shape: tuple[int, ...] | None = None  # of one scale per tensor: () or (1,)
    scale_dtype: torch.dtype = torch.float32
    has_input_scale: bool = False
    config: dict[str, Any] = field(default_factory=dict)  # over what `describe` says

    @property
    def scale_name(self) -> str:
        return "weight_scale_inv" if self.method == "fp8" and self.scales == "block" else "weight_scale"

    def describe(self) -> dict[str, Any]:
        """The object under quantization_config."""
        if self.method == "fp8":
            own: dict[str, Any] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "static" if self.has_input_scale else "dynamic",
            }
            if self.scales == "block":
                own["weight_block_size"] = list(self.block)
            return own | self.config
        if self.method == "modelopt":
            algorithm = {"tensor": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN"}[self.scales]
            producer = {"name": "modelopt", "version": "0.39.0"}
            own = {"quant_method": "modelopt", "quant_algo": algorithm, "producer": producer, "ignore": ["lm_head"]}
            return own | self.config
        weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": self.scales}
        if self.scales == "block":
            weights["block_structure"] = list(self.block)
        activations = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": not self.has_input_scale}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        own = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        }
        return own | self.config


@dataclass(frozen=True)
class Fp8Numbers:
    """weight = code * scale of its block; `scales` has a row and a column per block."""

    codes_NK: Tensor
    scales: Tensor
    block: tuple[int, int]

    def weight(self) -> Tensor:
        """In float32."""
        N, K = self.codes_NK.shape
        scales_NK = self.scales.float().repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1)
        return self.codes_NK.float() * scales_NK[:N, :K]


def quantized(weight_NK: Tensor, form: Fp8Form) -> Fp8Numbers:
    """The largest magnitude of each block becomes the largest code, 448."""
    N, K = weight_NK.shape
    rows, columns = {"tensor": (N, K), "channel": (1, K), "block": form.block}[form.scales]
    scales = torch.zeros(-(-N // rows), -(-K // columns))
    codes_NK = torch.zeros(N, K, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            part = weight_NK[here].float()
            scale = (part.abs().max() / 448).to(form.scale_dtype)
            scales[i, j] = scale
            codes_NK[here] = (part / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Fp8Numbers(codes_NK, scales.to(form.scale_dtype), (rows, columns))


def draw(N: int, K: int, form: Fp8Form, generator: torch.Generator) -> Fp8Numbers:
    """Random weights of the deviation 1 / sqrt(K), whose blocks differ in size."""
    sizes_N1 = torch.rand(N, 1, generator=generator) + 0.5
    return quantized(torch.randn(N, K, generator=generator) * sizes_N1 / K**0.5, form)


def tensors_of(numbers: Fp8Numbers, form: Fp8Form) -> dict[str, Tensor]:
    """The tensors of one linear layer."""
    scales = numbers.scales
    if form.scales == "tensor":
        scales = scales.reshape(form.scale_shape or ())
    tensors = {"weight": numbers.codes_NK, form.scale_name: scales}
    if form.has_input_scale:
        tensors["input_scale"] = torch.tensor(0.02).reshape(scales.shape if form.scales == "tensor" else (1,))
    return tensors


def write(folder: Path, model_config: Any, form: Fp8Form, plain: tuple[str, ...] = ()) -> Written:
    """A random model whose linear layers, but those with a name that ends in one of `plain`, are in the form."""
    generator = torch.Generator().manual_seed(5)

    def make(N: int, K: int) -> tuple[Tensor, dict[str, Tensor]]:
        numbers = draw(N, K, form, generator)
        return numbers.weight(), tensors_of(numbers, form)

    return write_model(folder, model_config, form.describe(), make, plain)
