"""`--quantization int8`, `int4` and `fp8` in the engine: planned bytes are held, the demo model keeps its answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import quire.demo
from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelConfigError
from quire.kernels import cpu
from quire.loader.load import load_model
from quire.model_config import load_model_config
from quire.weight_format import ON_LOAD

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 24, "num_threads": 1}


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
    """No size is a multiple of what the kernels pack together: to a byte, weights in floating point too."""
    config = replace(
        load_model_config(quire.demo.path()),
        vocab_size=1003,
        hidden_size=88,
        intermediate_size=200,
        head_dim=22,
        tie_word_embeddings=tied,
        num_layers=2,
    )
    model = load_model(config, getattr(torch, dtype), "dummy", quantization=quantization)
    assert model.weight_bytes() == config.weight_bytes(dtype, quantization)
    if quantization is None:
        assert config.weight_bytes(dtype, is_packed=False) < config.weight_bytes(dtype)


def test_weights_on_plain_torch_are_planned_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_available", False)
    config = replace(load_model_config(quire.demo.path()), vocab_size=1003)
    model = load_model(config, torch.bfloat16, "dummy")
    assert model.weight_bytes() == config.weight_bytes("bfloat16", is_packed=False) == 2 * config.num_parameters()
    model = load_model(config, torch.bfloat16, "dummy", quantization="fp8")
    assert model.weight_bytes() == config.weight_bytes("bfloat16", "fp8", is_packed=False)


def test_rows_too_long_for_one_scale_are_refused_by_the_plan() -> None:
    config = replace(load_model_config(quire.demo.path()), intermediate_size=65_552)
    with pytest.raises(ModelConfigError, match="more in-features than one scale") as caught:
        config.weight_bytes("bfloat16", "int8")
    assert "65552" in str(caught.value)
    assert "int4" in str(caught.value)
    assert config.weight_bytes("bfloat16", "fp8") > config.weight_bytes("bfloat16", "int4")


@pytest.mark.parametrize("quantization", ON_LOAD)
def test_the_engine_plans_and_says_it(quantization: str) -> None:
    llm = LLM(quantization=quantization, **OPTIONS)
    assert llm.resolved.quantization == quantization
    assert llm.resolved.settings["quantization"].detail == ON_LOAD[quantization].description
    assert llm.resolved.weight_bytes == llm._core.executor._runner.model.weight_bytes()  # type: ignore[attr-defined]


@pytest.mark.parametrize("quantization", ON_LOAD)
def test_the_demo_model_keeps_its_answer(quantization: str) -> None:
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    params = SamplingParams(temperature=0.0, max_tokens=60)
    texts = [LLM(quantization=q, **OPTIONS).chat(messages, params)[0].outputs[0].text for q in (None, quantization)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("`os.path.join(")


def test_unknown_format_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="int8, int4, fp8") as caught:
        LLM(quantization="int3")
    assert caught.value.param == "quantization"
