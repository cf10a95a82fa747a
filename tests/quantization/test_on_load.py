"""`--quantization int8`, `int4` and `fp8` in the engine: logits of the rounded weights, planned bytes, answers kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import quire.demo
from quire import LLM
from quire.errors import ConfigError, ModelConfigError
from quire.formats.weight_format import ON_LOAD, Fp8Format, WeightFormat
from quire.kernels import cpu, reference
from quire.model_config import load_model_config
from tests.loading import load_model
from tests.quantization.answers import answer, answer_in_floating_point
from tests.quantization.checkpoints import write_model
from tests.quantization.logits import error_of_logits

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 24, "num_threads": 1}
SIZES: dict[str, Any] = {
    "vocab_size": 192,
    "hidden_size": 200,  # no whole groups of 128
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
}
# Relative errors of logits: rounding activations to 8 bits, and the order of sums where they stay as they are.
TOLERANCE = {"int8": 0.02, "int4": 0.02, "fp8": 1e-5}


def rounded(weight_NK: Tensor, held: WeightFormat) -> Tensor:
    """What the codes stand for."""
    group_size = held.group_size_of(weight_NK.shape[1])
    if isinstance(held, Fp8Format):
        return reference.dequantize_fp8(reference.quantize_fp8(weight_NK))
    return reference.dequantize_grouped(reference.quantize_grouped(weight_NK, held.bits, group_size))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", ON_LOAD)
def test_logits(quantization: str, family: str, path: str, tmp_path: Path) -> None:
    """Logits of transformers with every weight rounded and brought back to float32, the output projection's too."""
    formats = ON_LOAD[quantization]

    def make(N: int, K: int) -> tuple[Tensor, dict[str, Tensor]]:
        weight_NK = torch.randn(N, K) * K**-0.5
        return rounded(weight_NK, formats.linear), {"weight": weight_NK}

    checkpoint = write_model(tmp_path, FAMILIES[family](), {}, make)
    description = json.loads((tmp_path / "config.json").read_text())
    del description["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(description))
    head = checkpoint.model.get_output_embeddings().weight
    with torch.no_grad():
        head.copy_(rounded(head, formats.output))
    assert error_of_logits(tmp_path, checkpoint.model, quantization=quantization) < TOLERANCE[quantization]


@pytest.mark.parametrize("quantization", ON_LOAD)
@pytest.mark.skipif(not cpu.available(), reason="the twin holds 4-bit codes in bytes")
def test_planned_bytes_are_held(quantization: str) -> None:
    config = load_model_config(quire.demo.path())
    model = load_model(config, torch.bfloat16, quantization=quantization)
    assert model.weight_bytes() == config.weight_bytes("bfloat16", quantization)
    assert model.weight_bytes() < {"int8": 0.56, "int4": 0.45, "fp8": 0.56}[quantization] * config.weight_bytes(
        "bfloat16"
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantization", [None, *ON_LOAD])
@pytest.mark.skipif(not cpu.available(), reason="the twin holds 4-bit codes in bytes")
def test_padding_is_planned(quantization: str | None, tied: bool, dtype: str) -> None:
    """No size is a multiple of the kernels' panels: to a byte, weights in floating point too."""
    sizes = {"vocab_size": 1003, "hidden_size": 88, "intermediate_size": 200, "head_dim": 22, "num_hidden_layers": 2}
    config = load_model_config(quire.demo.path(), {**sizes, "tie_word_embeddings": tied})
    model = load_model(config, getattr(torch, dtype), load_format="dummy", quantization=quantization)
    assert model.weight_bytes() == config.weight_bytes(dtype, quantization)
    if quantization is None:
        assert config.weight_bytes(dtype, is_packed=False) < config.weight_bytes(dtype)


def test_weights_on_plain_torch_are_planned_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_available", False)
    config = replace(load_model_config(quire.demo.path()), vocab_size=1003)
    model = load_model(config, torch.bfloat16, load_format="dummy")
    assert model.weight_bytes() == config.weight_bytes("bfloat16", is_packed=False) == 2 * config.num_parameters()
    model = load_model(config, torch.bfloat16, load_format="dummy", quantization="fp8")
    assert model.weight_bytes() == config.weight_bytes("bfloat16", "fp8", is_packed=False)


def test_rows_too_long_for_one_scale_are_refused_by_the_plan() -> None:
    config = load_model_config(quire.demo.path(), {"intermediate_size": 65_552})
    with pytest.raises(ModelConfigError, match="more in-features than one scale") as caught:
        config.weight_bytes("bfloat16", "int8")
    assert "65552" in str(caught.value)
    assert "int4" in str(caught.value)
    assert config.weight_bytes("bfloat16", "fp8") > config.weight_bytes("bfloat16", "int4")


@pytest.mark.parametrize("quantization", ON_LOAD)
def test_the_engine_plans_and_says_it(quantization: str) -> None:
    llm = LLM(quantization=quantization, **OPTIONS)
    assert llm.resolved.model.quantization == quantization
    assert llm.resolved.settings["quantization"].detail == ON_LOAD[quantization].description
    assert llm.resolved.memory.weight_bytes == llm.llm_engine.core.executor.workers[0].runner.model.weight_bytes()  # type: ignore[attr-defined]


@pytest.mark.parametrize("quantization", ON_LOAD)
def test_the_demo_model_keeps_its_answer(quantization: str) -> None:
    assert answer(quantization=quantization) == answer_in_floating_point()


def test_unknown_format_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="int8, int4, fp8") as caught:
        LLM(quantization="int3")
    assert caught.value.param == "quantization"
