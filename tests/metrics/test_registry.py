"""The declared metrics against vLLM 0.32's names, types and buckets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.messages import EngineReady
from quire.metrics.prometheus import PrometheusMetrics
from quire.metrics.registry import METRICS, steps_up_to
from quire.schedule import StepRecord

# Names and types that dashboards use; a released name works for a year.
EXPECTED = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_num_preemptions": "histogram",
}
# vLLM's own upper bounds, which must stay among ours.
VLLM_BUCKETS = {
    "vllm:inter_token_latency_seconds": [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 80.0],
    "vllm:e2e_request_latency_seconds": [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 60.0, 120.0, 7680.0],
    "vllm:time_to_first_token_seconds": [0.001, 2560.0],
    "vllm:iteration_tokens_total": [1.0, 8.0, 16.0, 32.0, 16384.0],
    "vllm:request_params_n": [1.0, 2.0, 5.0, 10.0, 20.0],
    "vllm:request_prompt_tokens": [1.0, 2.0, 5.0, 1000.0, 2000.0],
}


def record(**fields: int) -> StepRecord:
    zeros = {name: 0 for name in StepRecord.__struct_fields__ if not name.endswith("_seconds")}
    return StepRecord(**{**zeros, **fields})


@pytest.fixture
def metrics() -> PrometheusMetrics:
    metrics = PrometheusMetrics('na"me\nwith\\all', 4000)
    resolved = {"kv_cache_dtype": {"value": "auto"}, "enable_prefix_caching": {"value": True}}
    metrics.set_cache_config(EngineReady(4000, 512, 16, 8, 2048, resolved))
    return metrics


def families(metrics):
    return {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}


def test_names_and_types(metrics):
    assert {name: family.type for name, family in families(metrics).items()} == EXPECTED
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_labels(metrics):
    for family in families(metrics).values():
        for sample in family.samples:
            assert sample.labels["model_name"] == 'na"me\nwith\\all'
            assert sample.labels["engine"] == "0"


def test_buckets(metrics):
    found = families(metrics)
    for name, bounds in VLLM_BUCKETS.items():
        ours = [float(s.labels["le"]) for s in found[name].samples if s.name.endswith("_bucket")]
        assert set(bounds) <= set(ours), name
        assert ours == sorted(ours)
    below = [metric.name for metric in METRICS if metric.name.endswith("_seconds") and min(metric.buckets) >= 0.01]
    assert not below, f"these cannot resolve times below 10 ms: {below}"


def test_every_reason_is_there_from_the_start(metrics):
    reasons = {s.labels["finished_reason"]: s.value for s in families(metrics)["vllm:request_success"].samples}
    assert reasons == {"stop": 0, "length": 0, "abort": 0, "error": 0}


def test_cache_config_is_published_once(metrics):
    metrics.set_cache_config(EngineReady(1, 1, 1, 1, 1))
    (sample,) = families(metrics)["vllm:cache_config_info"].samples
    assert sample.labels["cache_dtype"] == "auto"
    assert sample.labels["enable_prefix_caching"] == "True"
    assert sample.labels["gpu_memory_utilization"] == "None"


def test_a_step_that_comes_after_the_last_abort_leaves_nothing_running(metrics):
    metrics.on_step(record(num_running=1, num_blocks_in_use=3, num_blocks_total=12))
    found = families(metrics)
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        assert found[name].samples[0].value == 0


def test_steps(metrics):
    scheduled = {"num_prefill_tokens": 30, "num_decode_tokens": 4, "num_running": 5, "num_waiting": 2}
    cache = {"num_blocks_in_use": 3, "num_blocks_total": 12, "prefix_cache_queries": 30, "prefix_cache_hits": 16}
    metrics.on_request_arrived(SimpleNamespace(requests=[1]))
    metrics.on_step(record(**scheduled, **cache, num_preemptions=2))
    found = families(metrics)

    def value(name: str, suffix: str = "") -> float:
        return next(s.value for s in found[name].samples if s.name == name + suffix)

    assert value("vllm:num_requests_running") == 5
    assert value("vllm:num_requests_waiting") == 2
    assert value("vllm:kv_cache_usage_perc") == 0.25
    assert value("vllm:num_preemptions", "_total") == 2
    assert value("vllm:prefix_cache_queries", "_total") == 30
    assert value("vllm:prefix_cache_hits", "_total") == 16
    assert value("vllm:iteration_tokens_total", "_sum") == 34


@pytest.mark.parametrize(
    ("maximum", "expected"),
    [(1, [1]), (2, [1, 2]), (4, [1, 2]), (5, [1, 2, 5]), (2048, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000])],
)
def test_steps_up_to(maximum, expected):
    assert list(steps_up_to(maximum)) == expected
