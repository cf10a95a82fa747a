"""The declared metrics as Prometheus families in a registry of their own, filled by the front end's hooks."""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from quire.messages import EngineReady
from quire.metrics.log_line import StatsLine
from quire.metrics.registry import (
    ADMISSION_REJECTIONS,
    CACHE_CONFIG_INFO,
    COMMON_LABELS,
    METRICS,
    REQUEST_SUCCESS,
    UP_TO_MODEL_LEN,
    Metric,
    steps_up_to,
)
from quire.schedule import StepRecord

# Else every counter and histogram has a second series that nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

# Every reason is there from the start, so that a rate over it exists before the first such end.
FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTION_REASONS = ("queue_full",)
# The settings among the labels of CACHE_CONFIG_INFO, in its order, by our names.
_CACHE_SETTINGS = ("kv_cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_bytes")


class ArrivedRequest(Protocol):
    """What is read of the front end's ProcessedRequest when it arrives: one of `requests` per continuation."""

    @property
    def requests(self) -> Sized: ...


class EndedRequest(Protocol):
    """What is read of a continuation at its end: the front end's FinishedRequest. Seconds; None: it never got there."""

    @property
    def finish_reason(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def max_tokens_param(self) -> int | None: ...
    @property
    def n(self) -> int: ...
    @property
    def longest_num_output_tokens(self) -> int | None: ...
    @property
    def e2e_seconds(self) -> float: ...
    @property
    def queued_seconds(self) -> float | None: ...
    @property
    def prefill_seconds(self) -> float | None: ...
    @property
    def decode_seconds(self) -> float | None: ...
    @property
    def inference_seconds(self) -> float | None: ...
    @property
    def seconds_per_output_token(self) -> float | None: ...


class PrometheusMetrics:
    """The front end's EngineMetrics. Label values come from closed sets only, so the number of series never grows.

    Args:
        model_name: label of every series.
        max_model_len: last bucket of the length histograms.
        engine: index of the engine, a label.
        device: word of the statistics line, CPU or GPU.
    """

    def __init__(self, model_name: str, max_model_len: int, engine: int = 0, device: str = "CPU") -> None:
        self.registry = CollectorRegistry()
        self.stats_line = StatsLine(f"{engine:03d}", device)
        self._labels = (model_name, str(engine))
        self._has_cache_config = False
        self._num_unfinished = 0
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in METRICS:
            self._add(metric, max_model_len)
        ended = Counter(
            REQUEST_SUCCESS.name, REQUEST_SUCCESS.help, COMMON_LABELS + REQUEST_SUCCESS.labels, registry=self.registry
        )
        self._ended = {reason: ended.labels(*self._labels, reason) for reason in FINISH_REASONS}
        rejected = Counter(
            ADMISSION_REJECTIONS.name,
            ADMISSION_REJECTIONS.help,
            ("model_name", *ADMISSION_REJECTIONS.labels),
            registry=self.registry,
        )
        self._rejected = {reason: rejected.labels(model_name, reason) for reason in REJECTION_REASONS}

    def _add(self, metric: Metric, max_model_len: int) -> None:
        """The one series of a family without labels of its own."""
        if metric.kind == "counter":
            counter = Counter(metric.name, metric.help, COMMON_LABELS, registry=self.registry)
            self._counters[metric.name] = counter.labels(*self._labels)
        elif metric.kind == "gauge":
            gauge = Gauge(metric.name, metric.help, COMMON_LABELS, registry=self.registry)
            self._gauges[metric.name] = gauge.labels(*self._labels)
        else:
            buckets = steps_up_to(max_model_len) if metric.buckets == UP_TO_MODEL_LEN else metric.buckets
            histogram = Histogram(metric.name, metric.help, COMMON_LABELS, buckets=buckets, registry=self.registry)
            self._histograms[metric.name] = histogram.labels(*self._labels)

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(value)

    def on_request_arrived(self, request: ArrivedRequest) -> None:
        """A request was sent to the engine, which may still refuse it."""
        self._num_unfinished += len(request.requests)

    def on_first_token(self, seconds: float, num_tokens: int, num_prompt_tokens: int) -> None:
        """A continuation's first tokens; the prompt counts with the first continuation that gets there."""
        self._observe("vllm:time_to_first_token_seconds", seconds)
        self._counters["vllm:generation_tokens"].inc(num_tokens)
        self._counters["vllm:prompt_tokens"].inc(num_prompt_tokens)

    def on_tokens(self, num_tokens: int, seconds: float) -> None:
        """Further tokens, `seconds` after the last ones."""
        self._observe("vllm:inter_token_latency_seconds", seconds)
        self._counters["vllm:generation_tokens"].inc(num_tokens)

    def on_finished(self, finished: EndedRequest) -> None:
        """A continuation ended. If the caller left or it failed, only the reason is counted, no distribution."""
        self._ended[finished.finish_reason].inc()
        self._num_unfinished -= 1
        if self._num_unfinished == 0:
            self._set_idle()
        if finished.finish_reason not in ("stop", "length"):
            return
        self._observe("vllm:e2e_request_latency_seconds", finished.e2e_seconds)
        self._observe("vllm:request_queue_time_seconds", finished.queued_seconds)
        self._observe("vllm:request_prefill_time_seconds", finished.prefill_seconds)
        self._observe("vllm:request_decode_time_seconds", finished.decode_seconds)
        self._observe("vllm:request_inference_time_seconds", finished.inference_seconds)
        self._observe("vllm:request_time_per_output_token_seconds", finished.seconds_per_output_token)
        self._observe("vllm:request_prompt_tokens", finished.num_prompt_tokens)
        self._observe("vllm:request_generation_tokens", finished.num_output_tokens)
        self._observe(
            "vllm:request_prefill_kv_computed_tokens", finished.num_prompt_tokens - finished.num_cached_tokens
        )
        self._observe("vllm:request_num_preemptions", finished.num_preemptions or None)
        if finished.longest_num_output_tokens is not None:  # once per request: with the last continuation
            self._observe("vllm:request_max_num_generation_tokens", finished.longest_num_output_tokens)
            self._observe("vllm:request_params_n", finished.n)
            self._observe("vllm:request_params_max_tokens", finished.max_tokens_param)

    def on_step(self, record: StepRecord) -> None:
        """The engine did a step."""
        self._gauges["vllm:num_requests_running"].set(record.num_running)
        self._gauges["vllm:num_requests_waiting"].set(record.num_waiting)
        self._gauges["vllm:kv_cache_usage_perc"].set(record.num_blocks_in_use / max(record.num_blocks_total, 1))
        self._observe("vllm:iteration_tokens_total", record.num_prefill_tokens + record.num_decode_tokens)
        self._counters["vllm:prefix_cache_queries"].inc(record.prefix_cache_queries)
        self._counters["vllm:prefix_cache_hits"].inc(record.prefix_cache_hits)
        self._counters["vllm:num_preemptions"].inc(record.num_preemptions)
        self.stats_line.add(record)
        if self._num_unfinished == 0:
            self._set_idle()  # the step was on its way when the last caller left

    def on_rejected(self, reason: str) -> None:
        """A request was refused for want of room."""
        self._rejected[reason].inc()

    def _set_idle(self) -> None:
        """No step follows an abort of the last request, so nothing else would say that it is gone."""
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            self._gauges[name].set(0)
        self.stats_line.set_idle()

    def set_cache_config(self, ready: EngineReady) -> None:
        """Publish vllm:cache_config_info, once."""
        if self._has_cache_config:
            return
        self._has_cache_config = True
        labels = COMMON_LABELS + CACHE_CONFIG_INFO.labels
        gauge = Gauge(CACHE_CONFIG_INFO.name, CACHE_CONFIG_INFO.help, labels, registry=self.registry)
        settings = [_setting(ready, name) for name in _CACHE_SETTINGS]
        gauge.labels(*self._labels, str(ready.block_size), str(ready.num_blocks), *settings).set(1)

    def render(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry)


def _setting(ready: EngineReady, name: str) -> str:
    """The resolved value as a label; "None" where the setting was left to Quire, as vLLM prints it."""
    setting = ready.resolved.get(name)
    return str(setting.get("value")) if isinstance(setting, dict) else "None"
