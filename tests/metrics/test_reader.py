"""Metrics as objects."""

from __future__ import annotations

from quire.metrics.prometheus import PrometheusMetrics
from quire.metrics.reader import Counter, Gauge, Histogram, read
from quire.metrics.registry import METRICS

LABELS = {"model_name": "m", "engine": "0"}


def test_every_series_once() -> None:
    metrics = PrometheusMetrics("m", 10)
    metrics.engines[0].on_tokens(3, 0.02)
    metrics.engines[0].on_tokens(1, 100.0)
    found = read(metrics.registry)
    assert len({(metric.name, *metric.labels.items()) for metric in found}) == len(found)
    assert {metric.name for metric in found} == {metric.name for metric in METRICS}, "all of them, and no process_*"
    assert Counter("vllm:generation_tokens", LABELS, 4) in found
    assert Gauge("vllm:engine_sleep_state", {**LABELS, "sleep_state": "awake"}, 1.0) in found
    assert Counter("vllm:request_success", {**LABELS, "finished_reason": "stop"}, 0) in found
    (latency,) = (metric for metric in found if metric.name == "vllm:inter_token_latency_seconds")
    assert isinstance(latency, Histogram)
    assert (latency.labels, latency.count, latency.sum) == (LABELS, 2, 100.02)
    assert (latency.buckets["0.01"], latency.buckets["0.025"], latency.buckets["80.0"]) == (0, 1, 1)
    assert latency.buckets["+Inf"] == 2
