"""Dummy weights depend on name and shape only, differ between tensors, and keep activations finite."""

from __future__ import annotations

import pytest
import torch

from quire.loader.dummy import dummy_weights

SHAPES = {
    "embed.weight": (131, 48),
    "layers.0.q_proj.weight": (64, 48),
    "layers.1.q_proj.weight": (64, 48),
    "layers.0.q_proj.bias": (64,),
    "layers.0.input_layernorm.weight": (48,),
    "layers.0.input_layernorm.bias": (48,),
    "experts.weight": (3, 700, 700),
    "scalar": (),
    "nothing": (0, 4),
}


def test_order_and_other_tensors_do_not_matter() -> None:
    forward = dict(dummy_weights(SHAPES, torch.float32))
    backward = dict(dummy_weights(dict(reversed(SHAPES.items())), torch.float32))
    alone = dict(dummy_weights({"experts.weight": (3, 700, 700)}, torch.float32))
    assert {name: tuple(tensor.shape) for name, tensor in forward.items()} == SHAPES
    assert all(torch.equal(forward[name], backward[name]) for name in SHAPES)
    assert torch.equal(forward["experts.weight"], alone["experts.weight"])


def test_tensors_and_rows_differ() -> None:
    weights = dict(dummy_weights(SHAPES, torch.float32))
    assert not torch.equal(weights["layers.0.q_proj.weight"], weights["layers.1.q_proj.weight"])
    rows = weights["experts.weight"].reshape(-1, 700)
    assert rows.unique(dim=0).shape[0] == rows.shape[0], "rows repeat: the experts of a mixture would be the same"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_keep_activations_near_one(dtype: torch.dtype) -> None:
    weights = dict(dummy_weights(SHAPES, dtype))
    assert all(tensor.dtype == dtype for tensor in weights.values())
    assert weights["experts.weight"].float().std().item() == pytest.approx(700**-0.5, rel=0.02)
    norm = weights["layers.0.input_layernorm.weight"].float()
    assert norm.min() > 0.85
    assert norm.max() < 1.15
    for bias in ("layers.0.q_proj.bias", "layers.0.input_layernorm.bias"):
        assert weights[bias].abs().max() <= 0.11
