"""The text of each format in config.json, and the FP8 tensors. quantization/ has integer tensors and their readers.

Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448

Tensors = dict[str, Tensor]  # by the last part of the name


def fp8(weight_NK: Tensor, dtype: torch.dtype) -> Tensors:
    """The tensors of compressed-tensors with e4m3 numbers and a scale for each out-feature.

    Args:
        weight_NK: floating point.
        dtype: the dtype of the scales.
    """
    largest_N1 = weight_NK.float().abs().amax(1, keepdim=True)
    scale_N1 = (largest_N1 / FP8_MAX).clamp_min(torch.finfo(dtype).tiny).to(dtype)
    values_NK = (weight_NK.float() / scale_N1.float()).clamp(-FP8_MAX, FP8_MAX)
    return {"weight": values_NK.to(torch.float8_e4m3fn), "weight_scale": scale_N1}


def awq_description(group_size: int) -> dict[str, Any]:
    """The `quantization_config` of config.json; the next two functions make it for other formats."""
    return {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group_size, "zero_point": True,
            "modules_to_not_convert": None}  # fmt: skip


def gptq_description(group_size: int, act_order: bool, damping: float) -> dict[str, Any]:
    return {"quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": group_size, "sym": True,
            "desc_act": False, "damp_percent": damping, "static_groups": act_order, "true_sequential": False,
            "lm_head": False}  # fmt: skip


def compressed_tensors_description(
    layout: str, weights: dict[str, Any], input_activations: dict[str, Any] | None, ignore: list[str]
) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors.

    Args:
        layout: pack-quantized, int-quantized or float-quantized.
        ignore: the linear layers that are not quantized.
    """
    weights = {
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "actorder": None,
        "observer": "minmax",
    } | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": input_activations,
             "output_activations": None, "format": layout}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ignore, "kv_cache_scheme": None}  # fmt: skip


# Activations of W8A8 formats: each row has its own scale, which is computed while the model runs.
ROWS_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
ROWS_FP8 = ROWS_INT8 | {"type": "float"}
