"""Estimated work of a step, against counts by hand on the demo model's sizes."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

import quire.demo
from quire.layer_spec import Full
from quire.messages import EngineReady
from quire.metrics.prometheus import PrometheusMetrics
from quire.metrics.step_work import StepWork
from quire.model_config import ModelConfig, load_model_config
from tests.metrics.test_registry import record


@pytest.fixture
def model() -> ModelConfig:
    return load_model_config(quire.demo.path())


def test_one_decoding_row(model: ModelConfig) -> None:
    """The layers' and the output's weights twice, four operations per element of each cached key (and value)."""
    step = record(num_decode_tokens=1, num_sampled_tokens=1, num_kv_tokens_read=100, num_rows=1)
    assert model.tie_word_embeddings, "the count below takes the embeddings for the output projection"
    q_width = sum(spec.attention.output.in_features for spec in model.layers if isinstance(spec.attention, Full))
    attention = 4 * 100 * q_width
    assert StepWork(model, "bfloat16", None, "auto").num_flops(step) == 2 * model.num_parameters() + attention


@pytest.mark.parametrize(
    ("dtype", "quantization", "kv_cache_dtype", "width"),
    [("float32", None, "auto", 4), ("bfloat16", "int8", "auto", 2), ("bfloat16", None, "fp8", 1)],
)
def test_bytes(model: ModelConfig, dtype: str, quantization: str | None, kv_cache_dtype: str, width: int) -> None:
    step = record(num_prefill_tokens=30, num_decode_tokens=2, num_sampled_tokens=3, num_kv_tokens_read=140, num_rows=3)
    token = sum(2 * spec.num_kv_heads * spec.head_dim_k * width for spec in model.kv_specs())
    work = StepWork(model, dtype, quantization, kv_cache_dtype)
    assert work.read_bytes(step) == model.weight_bytes(dtype, quantization) + 140 * token
    assert work.write_bytes(step) == 32 * token


def test_steps_are_added_up(model: ModelConfig) -> None:
    metrics = PrometheusMetrics("m", 2048, model=model)
    step = record(num_decode_tokens=4, num_sampled_tokens=4, num_kv_tokens_read=50, num_rows=4)
    metrics.engines[0].on_step(step)  # of a batch that was on its way before anything was known
    resolved = {
        "dtype": {"value": "bfloat16"},
        "quantization": {"value": "int4"},
        "kv_cache_dtype": {"value": "fp8_e5m2"},
    }
    metrics.engines[0].on_ready(EngineReady(2048, 8, 16, 8, 2048, resolved))
    metrics.engines[0].on_step(step)
    metrics.engines[0].on_step(step)
    families = text_string_to_metric_families(metrics.render().decode())
    found = {f.name.removeprefix("vllm:estimated_"): f.samples[0].value for f in families if "estimated" in f.name}
    work = StepWork(model, "bfloat16", "int4", "fp8_e5m2")
    assert found == {
        "flops_per_gpu": 2 * work.num_flops(step),
        "read_bytes_per_gpu": 2 * work.read_bytes(step),
        "write_bytes_per_gpu": 2 * work.write_bytes(step),
    }
