"""Parts of a decoder on their own: rotary tables against transformers, fused linear layers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.errors import ModelConfigError
from quire.hf_config.fields import Fields
from quire.hf_config.rope import parse_rope
from quire.kernels import cpu
from quire.layer_spec.rope_config import RopeConfig
from quire.layer_spec.shapes import LinearShape
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rope import cos_sin_table, frequencies
from quire.models.block import Sublayer
from quire.quantization.unquantized import Unquantized

MAX_POSITION = 64
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.4,
        "beta_fast": 4,
        "truncate": False,
    },
    "yarn-given": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 16,
    },
    "longrope": {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 32},
    "longrope-factor": {"rope_type": "longrope", **FACTORS, "factor": 5.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("length", [32, 33, 64, 200])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name, length):
    """For the length that is served; 32 and 64 are the borders at which longrope and dynamic change."""
    raw = {"hidden_size": 48, "num_attention_heads": 4, "max_position_embeddings": MAX_POSITION, "model_type": "llama"}
    parameters = {**ROPES[name], "rope_theta": 300.0}
    rope, local = parse_rope(Fields({**raw, "rope_parameters": parameters}, "config.json"), head_dim=12)
    theirs, factor = ROPE_INIT_FUNCTIONS[rope.type](
        LlamaConfig(**raw, rope_parameters=dict(parameters)), seq_len=length
    )
    assert local is None
    assert rope.attention_factor == pytest.approx(factor)
    torch.testing.assert_close(frequencies(rope, length), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["default", *ROPES])
def test_any_rope_that_is_accepted_gives_a_finite_table(name):
    """Poison every number in turn: numbers that would divide by zero or overflow are refused when config.json is
    read.
    """
    given = ROPES.get(name, {"rope_type": "default"})
    optional = ("beta_fast", "beta_slow", "attention_factor", "partial_rotary_factor", "mscale", "mscale_all_dim")
    others = ("rope_theta", "original_max_position_embeddings")
    raw = {"max_position_embeddings": MAX_POSITION, "model_type": "llama"}
    num_accepted = 0
    for field in {*given, *optional, *others} - {"rope_type"}:
        for poison in (-1, 0, 1, 2, 1 << 39, 10**400, 1e-300, 1e300, math.nan, [0] * 6, [1e-300] * 6, [1e300] * 6):
            for head_dim in (2, 12):
                parameters = {"rope_theta": 300.0, **given, field: poison}
                try:
                    rope, _ = parse_rope(Fields({**raw, "rope_parameters": parameters}, "config.json"), head_dim)
                except ModelConfigError:
                    continue
                num_accepted += 1
                for length in (16, 100):
                    table = cos_sin_table(rope, length)
                    assert table.isfinite().all(), f"{field} = {poison!r} with heads of {head_dim}"
    assert num_accepted > 10


def test_table_holds_cosines_then_sines():
    rope = RopeConfig(rotary_dim=4, theta=100.0, attention_factor=1.5)
    table = cos_sin_table(rope, 9)
    assert table.shape == (9, 4)
    assert table.dtype == torch.float32
    angles = torch.tensor([[p * 1.0, p * 0.1] for p in range(9)])
    torch.testing.assert_close(table, 1.5 * torch.cat([angles.cos(), angles.sin()], dim=1))


@pytest.fixture(params=["torch", "kernels"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "kernels" and not cpu.available():
        pytest.skip("the compiled kernels are not in use")
    monkeypatch.setattr(cpu, "_available", request.param == "kernels")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_fused_shards_land_in_their_columns(order, path):
    shape = LinearShape(prefix="", shards=(("q", 5), ("k", 2), ("v", 3)), in_features=7, bias=True)
    layer = Linear(shape, dtype=torch.float32, scheme=Unquantized())
    slots = dict(layer.slots())
    weights = {name: torch.randn(slot.shape) for name, slot in slots.items()}
    assert {name: slot.shape for name, slot in slots.items() if name.startswith("k")} == {
        "k.weight": (2, 7),
        "k.bias": (2,),
    }
    for shard in (("q", "k", "v")[i] for i in order):
        for suffix in ("weight", "bias"):
            slots[f"{shard}.{suffix}"].load(weights[f"{shard}.{suffix}"])
    x = torch.randn(4, 7)
    want = torch.cat([x @ weights[f"{s}.weight"].T + weights[f"{s}.bias"] for s in ("q", "k", "v")], dim=1)
    torch.testing.assert_close(layer(x), want)


def test_weights_are_converted_to_the_layers_dtype(path):
    shape = LinearShape(prefix="", shards=(("o", 6),), in_features=8)
    layer = Linear(shape, dtype=torch.bfloat16, scheme=Unquantized())
    weight = torch.randn(6, 8)
    dict(layer.slots())["o.weight"].load(weight)
    x = torch.randn(3, 8).bfloat16()
    y = layer(x, torch.float32)
    assert y.dtype == torch.float32
    # plain torch rounds the product to bfloat16 first
    torch.testing.assert_close(y, x.float() @ weight.bfloat16().float().T, rtol=1e-2, atol=1e-2)


def test_a_multiplier_is_rounded_before_the_sum() -> None:
    """With a norm behind it, and without one."""
    y_TD, residual_TD = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    expected = residual_TD + y_TD * 0.3
    assert not torch.equal(expected, residual_TD.clone().add_(y_TD, alpha=0.3)), "the numbers show nothing"
    for next_norm in (None, RMSNorm.without_weights(64, 1e-6, torch.bfloat16, torch.device("cpu"))):
        sublayer = Sublayer(lambda x_TD, batch: y_TD.clone(), None, None, 0.3)  # type: ignore[arg-type]
        sublayer.next_norm, stream_TD = next_norm, residual_TD.clone()
        sublayer(stream_TD, stream_TD, None)  # type: ignore[arg-type]
        assert torch.equal(stream_TD, expected)
