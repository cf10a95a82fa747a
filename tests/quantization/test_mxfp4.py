"""Blocks of gpt-oss's checkpoints against transformers' dequantization: equal to a bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.errors import ModelConfigError, WeightsError
from quire.formats.stored_linear import stored_from
from quire.formats.weight_format import MXFP4
from quire.hf_config.fields import Fields
from quire.hf_config.quantization import parse_description
from quire.kernels.grouped import grouped_rows
from quire.layer_spec.shapes import LinearShape
from quire.layers.linear import Linear
from quire.quantization.select import select_scheme

CHECKPOINT = parse_description(Fields({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "config.json"))
PREFIX = "model.layers.0.mlp.experts.0."


def make_layer(in_features: int = 96) -> Linear:
    shape = LinearShape(prefix=PREFIX, shards=(("gate_proj", 40), ("up_proj", 30)), in_features=in_features)
    (stored,) = stored_from(shape, CHECKPOINT)
    assert stored.held == MXFP4
    return Linear(shape, dtype=torch.float32, scheme=select_scheme(stored))


def random_blocks(num_rows: int, num_blocks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    blocks = torch.randint(0, 256, (num_rows, num_blocks, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(0, 250, (num_rows, num_blocks), dtype=torch.uint8, generator=generator)


def test_equal_to_a_bit() -> None:
    layer, expected = make_layer(), []
    slots = dict(layer.slots())
    for name, size in layer.shards:
        blocks, scales = random_blocks(size, 3)
        slots[f"{name}.scales"].load(scales)
        slots[f"{name}.blocks"].load(blocks)
        # transformers computes a subnormal power of two in float32, too
        expected.append(convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T)
    rows_NK = grouped_rows(layer.weight, torch.arange(70), torch.float32)
    assert torch.equal(rows_NK, torch.cat(expected))
    assert layer.weight_bytes() == MXFP4.num_bytes(70, 96) or not layer.weight.is_packed


def test_a_scale_that_is_no_number_is_refused() -> None:
    layer = make_layer()
    slots = dict(layer.slots())
    for name, size in layer.shards:
        blocks, scales = random_blocks(size, 3)
        scales[1, 2] = 255
        slots[f"{name}.blocks"].load(blocks)
        if name == "up_proj":
            with pytest.raises(WeightsError, match="a scale is not a finite number"):
                slots[f"{name}.scales"].load(scales)
        else:
            slots[f"{name}.scales"].load(scales)


def test_only_experts_are_quantized() -> None:
    assert CHECKPOINT.format_of("model.layers.0.self_attn.q_proj") is None
    assert CHECKPOINT.format_of("lm_head") is None
    layer_format = CHECKPOINT.format_of(PREFIX + "down_proj")
    assert layer_format is not None
    assert layer_format.describe() == "MXFP4, groups of 32"


def test_a_width_of_broken_blocks_is_refused() -> None:
    with pytest.raises(ModelConfigError, match=r"no whole number of MXFP4's blocks.*100.*multiple of 32"):
        make_layer(in_features=100)
