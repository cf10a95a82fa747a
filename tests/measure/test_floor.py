"""The hardware limit against counts made by hand."""

from __future__ import annotations

import pytest

import quire.demo
from quire.formats.kv_format import KV_FORMATS
from quire.measure.floor import Machine, Work, floor, together
from quire.model_config import load_model_config

MODEL = load_model_config(quire.demo.path("target"))
SLOW_MEMORY, SLOW_ARITHMETIC = Machine(1.0, 1e30, 1e30), Machine(1e30, 1.0, 1e30)
HEAD = MODEL.vocab_size * MODEL.hidden_size
LAYERS = MODEL.num_parameters() - HEAD * (1 if MODEL.tie_word_embeddings else 2)


def test_bytes_of_a_decode() -> None:
    """Weights once a step; K and V of all tokens before each further token."""
    found = floor(MODEL, "bfloat16", [Work(10, 0, 3)], SLOW_MEMORY)
    kv = MODEL.kv_bytes_per_token(KV_FORMATS["bfloat16"])
    assert found.seconds == pytest.approx(3 * 2 * (LAYERS + HEAD) + kv * (11 + 12))
    assert found.bound == "memory"


def test_bytes_of_quantized_weights() -> None:
    """As they are held."""
    found = floor(MODEL, "bfloat16", [Work(1, 0, 1)], SLOW_MEMORY, quantization="int4")
    embeddings = 0 if MODEL.tie_word_embeddings else 2 * HEAD
    assert found.seconds == pytest.approx(MODEL.weight_bytes("bfloat16", "int4") - embeddings)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_operations_of_quantized_weights(quantization: str) -> None:
    """Integers are multiplied as integers, FP8 and attention in floating point; norms and biases are floats too."""
    work, model = [Work(10, 0, 1)], MODEL
    total = floor(model, "bfloat16", work, SLOW_ARITHMETIC).num_flops
    found = floor(model, "bfloat16", work, Machine(1e30, 1.0, 2.0), quantization=quantization)
    linears = [(shape.out_features * shape.in_features, shape == model.output_linear()) for shape in model.linears()]
    products = sum(2 * size * (1 if is_output else 10) for size, is_output in linears)
    assert found.num_int8_ops == (products if quantization == "int8" else 0)
    assert found.num_flops == total - found.num_int8_ops
    assert found.seconds == pytest.approx(found.num_flops + found.num_int8_ops / 2)


def test_flops_of_a_prompt() -> None:
    found = floor(MODEL, "float32", [Work(10, 0, 1)], SLOW_ARITHMETIC)
    attention = MODEL.attention_flops() * sum(range(1, 11))
    assert found.seconds == pytest.approx(2 * LAYERS * 10 + 2 * HEAD + attention)
    assert found.bound == "arithmetic"


def test_a_batch_shares_the_weights() -> None:
    one = floor(MODEL, "bfloat16", [Work(1, 0, 8)], SLOW_MEMORY).num_bytes
    many = floor(MODEL, "bfloat16", [Work(1, 0, 8)] * 4, SLOW_MEMORY).num_bytes
    weights = 8 * 2 * (LAYERS + HEAD)
    assert many - weights == pytest.approx(4 * (one - weights))
    one_by_one = floor(MODEL, "bfloat16", [Work(1, 0, 8)] * 4, SLOW_MEMORY, max_num_seqs=1).num_bytes
    assert one_by_one == pytest.approx(4 * one)


def test_cached_tokens_are_not_computed_but_read() -> None:
    full = floor(MODEL, "bfloat16", [Work(32, 0, 2)], SLOW_ARITHMETIC)
    cached = floor(MODEL, "bfloat16", [Work(0, 32, 2)], SLOW_ARITHMETIC)
    assert cached.num_bytes == full.num_bytes
    assert cached.num_flops < full.num_flops


def test_a_window_bounds_what_is_read() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 4}
    windowed = load_model_config(quire.demo.path("target"), mistral)
    kv = MODEL.kv_bytes_per_token(KV_FORMATS["bfloat16"])
    found = floor(windowed, "bfloat16", [Work(10, 0, 3)], SLOW_MEMORY)
    assert found.seconds == pytest.approx(3 * 2 * (LAYERS + HEAD) + kv * (4 + 4))


def test_percent() -> None:
    found = floor(MODEL, "bfloat16", [Work(10, 0, 3)], Machine(1e9, 1e12, 1e12))
    assert found.report(2 * found.seconds, Machine(1e9, 1e12, 1e12))["percent"] == pytest.approx(50)


def test_rounds_add_up() -> None:
    """Each round reads the weights again: together they are no batch."""
    one = floor(MODEL, "bfloat16", [Work(1, 0, 8)], SLOW_MEMORY)
    assert together([one, one, one]).seconds == pytest.approx(3 * one.seconds)
