"""The old names: only on request, equal to their replacements, and marked as old."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from quire.metrics.legacy import LEGACY_METRICS, RecentTokens
from quire.metrics.prometheus import PrometheusMetrics
from quire.schedule import StepRecord

# In the guides and in dashboards of vLLM before 0.32, with their types.
EXPECTED = {
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:cpu_cache_usage_perc": "gauge",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:gpu_prefix_cache_queries": "counter",
    "vllm:gpu_prefix_cache_hits": "counter",
    "vllm:gpu_prefix_cache_hit_rate": "gauge",
    "vllm:cpu_prefix_cache_hit_rate": "gauge",
    "vllm:avg_prompt_throughput_toks_per_s": "gauge",
    "vllm:avg_generation_throughput_toks_per_s": "gauge",
    "vllm:num_requests_swapped": "gauge",
    "vllm:num_generate_tokens": "counter",
}


def families(metrics):
    return {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}


def used(**options):
    metrics = PrometheusMetrics("m", 2048, **options)
    zeros = {name: 0 for name in StepRecord.__struct_fields__ if not name.endswith(("_seconds", "ranks", "lanes"))}
    metrics.engines[0].on_request_arrived(SimpleNamespace(requests=[1]))
    metrics.engines[0].on_step(
        StepRecord(**zeros | {"num_prefill_tokens": 40, "num_sampled_tokens": 1, "num_blocks_in_use": 3,
                              "num_blocks_total": 12, "prefix_cache_queries": 50, "prefix_cache_hits": 10})
    )  # fmt: skip
    metrics.engines[0].on_first_token(0.5, 1, 50, 10)
    metrics.engines[0].on_tokens(1, 0.003)
    return families(metrics)


def test_they_are_hidden_by_default():
    assert not set(used()) & set(EXPECTED)


def test_types_labels_and_help():
    found = used(legacy_names=True)
    assert {name: found[name].type for name in EXPECTED} == EXPECTED
    assert {metric.name for metric in LEGACY_METRICS} == set(EXPECTED)
    for name in EXPECTED:
        assert "vllm:" in found[name].documentation, f"{name} does not say what to use"
        for sample in found[name].samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("m", "0")


def test_values():
    found = used(legacy_names=True)

    def values(name):
        return {(s.name.removeprefix(name), s.labels.get("le")): s.value for s in found[name].samples}

    for metric in LEGACY_METRICS:
        if metric.now is not None:
            assert values(metric.name) == values(metric.now), metric.name
    assert values("vllm:gpu_cache_usage_perc") == {("", None): 0.25}
    assert values("vllm:time_per_output_token_seconds")["_count", None] == 1
    assert values("vllm:num_generate_tokens") == {("_total", None): 2}
    assert values("vllm:gpu_prefix_cache_hit_rate") == {("", None): 0.2}
    assert values("vllm:avg_prompt_throughput_toks_per_s") == {("", None): 4}
    assert values("vllm:num_requests_swapped") == {("", None): 0}


def test_throughput_is_that_of_the_last_ten_seconds():
    now = 100.0
    recent = RecentTokens(lambda: now)
    recent.add(100, 0)
    now = 105.0
    recent.add(0, 20)
    assert recent.per_second() == (10.0, 2.0)
    now = 111.0
    assert recent.per_second() == (0.0, 2.0)
    now = 116.0
    assert recent.per_second() == (0.0, 0.0)
