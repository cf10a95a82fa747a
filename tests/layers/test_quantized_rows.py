"""Norms and activations that feed FP8 layers, on a GPU or under Triton's interpreter: they give FP8 where the layer
would quantize its input, and the results are the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import quire.demo
from quire.kernels import cpu, fp8, gpu
from quire.kernels.fp8 import Fp8Rows
from quire.layer_spec.shapes import LinearShape
from quire.layers.activation import gated_activation
from quire.layers.linear import Linear, SplitLinear
from quire.layers.norm import RMSNorm
from quire.model_config import load_model_config
from quire.models.form import ModelForm
from quire.models.registry import build_model
from quire.quantization.fp8 import Fp8OnLoad
from quire.quantization.unquantized import Unquantized
from tests import triton_interpreter

if reason := triton_interpreter.why_not():
    pytest.skip(reason, allow_module_level=True)
# of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
K, N, T = 96, 64, 20


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 16 rows on, products of FP8; tensors of the test's device go where tensors of a GPU go."""
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of FP8")
    monkeypatch.setattr(gpu, "serves", lambda device: device.type == DEVICE)
    monkeypatch.setattr(cpu, "_available", False)
    monkeypatch.setattr(fp8, "_FEWEST_QUANTIZED_ROWS", 16)
    monkeypatch.setattr(fp8, "_multiplies_fp8", lambda device: True)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


def linear(in_features: int, out_features: int, is_fp8: bool = True) -> Linear:
    scheme = Fp8OnLoad() if is_fp8 else Unquantized()
    shape = LinearShape(prefix="", shards=(("w", out_features),), in_features=in_features)
    layer = Linear(shape, dtype=torch.bfloat16, scheme=scheme)
    for _, slot in layer.slots():
        slot.load(randn(out_features, in_features, seed=1) / in_features**0.5)
    return layer


def norm(feeds: Linear | SplitLinear | None) -> RMSNorm:
    made = RMSNorm(K, 1e-6, 1.0, torch.bfloat16)
    made.weight_D = randn(K, seed=2)
    made.feeds = feeds
    return made


def test_a_norm_feeds_a_layer() -> None:
    layer, x_TK = linear(K, N), randn(T, K)
    rows = norm(layer).feed(x_TK)
    assert isinstance(rows, Fp8Rows)
    assert torch.equal(layer(rows), layer(norm(None)(x_TK)))


def test_a_norm_behind_the_addition_to_the_residual_feeds_a_layer() -> None:
    layer, x_TK, residual_TK, plain_TK = linear(K, N), randn(T, K), randn(T, K, seed=3), randn(T, K, seed=3)
    rows, plain = norm(layer).add(x_TK, residual_TK), norm(None).add(x_TK, plain_TK)
    assert isinstance(rows, Fp8Rows)
    assert isinstance(plain, Tensor)
    assert torch.equal(layer(rows), layer(plain))
    assert torch.equal(residual_TK, plain_TK)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_an_activation_feeds_a_layer(name: str) -> None:
    layer, x_T2I = linear(K, N), randn(T, 2 * K)
    rows, plain = gated_activation(name, layer)(x_T2I), gated_activation(name, linear(K, N, is_fp8=False))(x_T2I)
    assert isinstance(rows, Fp8Rows)
    assert isinstance(plain, Tensor)
    assert torch.equal(layer(rows), layer(plain))


def test_layers_that_quantize_nothing_get_rows_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, another format, one of several shards with another format, --deterministic, a CPU."""
    layer, plain, x_TK = linear(K, N), linear(K, N, is_fp8=False), randn(T, K)
    assert isinstance(norm(layer).feed(x_TK[:15]), Tensor)
    assert isinstance(norm(plain).feed(x_TK), Tensor)
    assert isinstance(norm(SplitLinear([layer, layer])).feed(x_TK), Fp8Rows)
    assert isinstance(norm(SplitLinear([layer, plain])).feed(x_TK), Tensor)
    assert isinstance(norm(None).feed(x_TK), Tensor)
    monkeypatch.setattr(gpu, "_is_deterministic", True)
    assert isinstance(norm(layer).feed(x_TK), Tensor)
    monkeypatch.setattr(gpu, "_is_deterministic", False)
    monkeypatch.setattr(gpu, "serves", lambda device: False)
    assert isinstance(norm(layer).feed(x_TK), Tensor)
    assert isinstance(gated_activation("silu", layer)(randn(T, 2 * K)), Tensor)


def test_every_family_feeds_its_layers() -> None:
    """The norms before attention and MLP; those behind them, the final one and OLMo's feed none."""
    for architecture in ("LlamaForCausalLM", "Gemma2ForCausalLM", "GraniteForCausalLM"):
        config = load_model_config(quire.demo.path("target"), {"architectures": [architecture]})
        model = build_model(config, ModelForm(torch.bfloat16))
        for sublayer in model._sublayers:
            assert sublayer.input_norm.feeds is sublayer._mixer.reader
        assert model._sublayers[-1].next_norm.feeds is None
