"""The declared metrics as Prometheus families in their own registry. The front end's hooks fill them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Set, Sized
from dataclasses import replace
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from quire.config import EngineConfig, max_draft
from quire.cost.arithmetic import Load, StepArithmetic
from quire.messages import AdapterState, EngineReady
from quire.metrics.http import HttpMetrics
from quire.metrics.legacy import LegacyNames, LegacyValues, RecentTokens
from quire.metrics.log_line import StatsLine
from quire.metrics.registry import (
    CACHE_CONFIG_INFO,
    CACHE_CONFIG_LABELS,
    EXPERT_METRICS,
    KV_BLOCK_METRICS,
    LANE_METRICS,
    LORA_METRICS,
    LORA_REQUESTS_INFO,
    LORA_REQUESTS_LABELS,
    METRICS,
    POSITION,
    RANK_METRICS,
    SPECULATION_METRICS,
    UP_TO_MODEL_LEN,
    Metric,
    steps_up_to,
)
from quire.metrics.utilization import Utilization
from quire.model_config import ModelConfig
from quire.schedule import StepRecord

# Without this every counter and histogram has a second series that nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]


Family = Counter | Gauge | Histogram


class ArrivedRequest(Protocol):
    """The part of the front end's ProcessedRequest that is read: `requests` has one entry per continuation."""

    @property
    def requests(self) -> Sized: ...


class EndedRequest(Protocol):
    """The part of the front end's FinishedRequest that is read. Times are seconds; None: it never got there."""

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
    def has_met_targets(self) -> bool | None: ...
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


class TargetTimes(Protocol):
    """The part of the front end's Targets that is read: seconds; 0: no target."""

    @property
    def ttft(self) -> float: ...
    @property
    def itl(self) -> float: ...


class PrometheusMetrics:
    """Every family in its own registry. Label values come from closed sets, so the number of series never grows.

    Args:
        model_name: label of every series of the engines.
        max_model_len: last bucket of the length histograms.
        num_engines: each has its own series; the label `engine` is its index.
        model: the config for estimates of work; None: there are none.
        legacy_names: show the old names too.
        kv_blocks: show the lifetimes of KV blocks.
        experts: show where tokens go.
        max_draft: tokens of the longest draft; 0: there are no drafts, and no metrics of drafts.
        has_adapters: show the metrics of adapters.
        num_ranks: the number of ranks that share a model; 1: there are no metrics of ranks.
        num_lanes: the number of lanes of an engine; 1: there are no metrics of lanes.

    Attributes:
        engines: the front end's EngineMetrics of each engine, by its index.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        num_engines: int = 1,
        model: ModelConfig | None = None,
        *,
        legacy_names: bool = False,
        kv_blocks: bool = False,
        experts: bool = False,
        max_draft: int = 0,
        has_adapters: bool = False,
        num_ranks: int = 1,
        num_lanes: int = 1,
    ) -> None:
        self.registry = CollectorRegistry()
        self._max_model_len = max_model_len
        declared = METRICS + (KV_BLOCK_METRICS if kv_blocks else ()) + (LORA_METRICS if has_adapters else ())
        if experts:
            declared += EXPERT_METRICS
        if max_draft:
            positions = tuple(map(str, range(max_draft)))
            declared += tuple(
                replace(metric, values=positions if metric.label == POSITION else ()) for metric in SPECULATION_METRICS
            )
        if num_ranks > 1:
            declared += tuple(replace(metric, values=tuple(map(str, range(num_ranks)))) for metric in RANK_METRICS)
        if num_lanes > 1:
            declared += tuple(replace(metric, values=tuple(map(str, range(num_lanes)))) for metric in LANE_METRICS)
        families = {metric: self._add(metric) for metric in declared}
        info = CACHE_CONFIG_INFO
        cache_config = Gauge(info.name, info.help, (*info.common, *CACHE_CONFIG_LABELS), registry=self.registry)
        self.engines = [
            EngineSeries(families, cache_config, {"model_name": model_name, "engine": str(index)}, model)
            for index in range(num_engines)
        ]
        self.http = HttpMetrics(self.registry)
        if legacy_names:
            current = {metric.name: family for metric, family in families.items()}
            self.registry.register(LegacyNames(current, [engine.legacy_values() for engine in self.engines]))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    @classmethod
    def of_config(
        cls,
        config: EngineConfig,
        model_name: str,
        max_model_len: int,
        num_engines: int = 1,
        model: ModelConfig | None = None,
        *,
        legacy_names: bool = False,
    ) -> PrometheusMetrics:
        """The metrics of engines with these settings. The constructor explains the other arguments."""
        return cls(
            model_name,
            max_model_len,
            num_engines,
            model,
            legacy_names=legacy_names,
            kv_blocks=config.kv_cache_metrics,
            experts=config.expert_metrics,
            max_draft=max_draft(config),
            has_adapters=config.enable_lora,
            num_ranks=config.num_ranks,
            num_lanes=config.num_lanes,
        )

    def _add(self, metric: Metric) -> Family:
        """Make a family without series."""
        labels = (*metric.common, metric.label) if metric.label else metric.common
        if metric.kind == "counter":
            return Counter(metric.name, metric.help, labels, registry=self.registry)
        if metric.kind == "gauge":
            return Gauge(metric.name, metric.help, labels, registry=self.registry)
        buckets = steps_up_to(self._max_model_len) if metric.buckets == UP_TO_MODEL_LEN else metric.buckets
        return Histogram(metric.name, metric.help, labels, buckets=buckets, registry=self.registry)

    def show_adapters(self, names: Callable[[], tuple[Set[str], Set[str]]]) -> None:
        """Show vllm:lora_requests_info.

        Args:
            names: the names of the adapters that requests run with, and that requests wait for.
        """
        self.registry.register(AdaptersInUse(names, self.engines[0]))

    def render(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry)


class AdaptersInUse(Collector):
    """vllm:lora_requests_info. Its only series is the present one: names are labels, as in vLLM."""

    def __init__(self, names: Callable[[], tuple[Set[str], Set[str]]], engine: EngineSeries) -> None:
        self._names, self._engine = names, engine

    def collect(self) -> Iterator[GaugeMetricFamily]:
        info = LORA_REQUESTS_INFO
        family = GaugeMetricFamily(info.name, info.help, labels=LORA_REQUESTS_LABELS)
        running, waiting = (",".join(sorted(names)) for names in self._names())
        family.add_metric([str(self._engine.max_loras), waiting, running], time.time())
        yield family


class EngineSeries:
    """The series of one engine: the front end's EngineMetrics.

    Args:
        families: the families by their declarations.
        cache_config: the family vllm:cache_config_info.
        labels: values of COMMON_LABELS. Families without the label `engine` have one series for all engines.
        model: see PrometheusMetrics.
    """

    def __init__(
        self, families: Mapping[Metric, Family], cache_config: Gauge, labels: dict[str, str], model: ModelConfig | None
    ) -> None:
        self.stats_line = StatsLine(f"{int(labels['engine']):03d}")
        self._labels, self._cache_config, self._model = labels, cache_config, model
        self._arithmetic: StepArithmetic | None = None
        self._utilization = Utilization(0.0, 0.0)
        self._has_cache_config = False
        self._num_unfinished = 0
        self.max_loras: object = None  # known when the engine has reported it
        self._recent_tokens: RecentTokens | None = None
        # The series by name and by the value of the family's own label, or "" without such a label.
        self._counters: dict[tuple[str, str], Counter] = {}
        self._gauges: dict[tuple[str, str], Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric, family in families.items():
            own = {name: labels[name] for name in metric.common}
            for value in metric.values if metric.label else ("",):
                series = family.labels(**own, **({metric.label: value} if metric.label else {}))
                if isinstance(series, Counter):
                    self._counters[metric.name, value] = series
                elif isinstance(series, Gauge):
                    self._gauges[metric.name, value] = series
                else:
                    self._histograms[metric.name] = series
        self._gauges["vllm:engine_sleep_state", "awake"].set(1)

    def legacy_values(self) -> LegacyValues:
        """This engine's values of the old names. Counting begins now."""
        self._recent_tokens = RecentTokens()
        return LegacyValues(self._labels, self._recent_tokens, lambda: self.stats_line.prefix_cache_hit_rate)

    def _count(self, name: str, amount: float = 1, value: str = "") -> None:
        self._counters[name, value].inc(amount)

    def _set(self, name: str, amount: float, value: str = "") -> None:
        self._gauges[name, value].set(amount)

    def _observe(self, name: str, amount: float | None) -> None:
        if amount is not None:
            self._histograms[name].observe(amount)

    def on_request_arrived(self, request: ArrivedRequest) -> None:
        """A request was sent to the engine. The engine may still refuse it."""
        self._num_unfinished += len(request.requests)

    def on_moved(self, count: int) -> None:
        """The engine got `count` continuations of another engine, or lost as many if the number is negative."""
        self._num_unfinished += count
        if self._num_unfinished == 0:
            self._set_idle()

    def on_first_token(self, seconds: float, num_tokens: int, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A continuation has its first tokens. The prompt counts with the first continuation of a request."""
        self._observe("vllm:time_to_first_token_seconds", seconds)
        self._count("vllm:generation_tokens", num_tokens)
        self._count("vllm:prompt_tokens", num_prompt_tokens)
        self._count("vllm:prompt_tokens_by_source", num_prompt_tokens - num_cached_tokens, "local_compute")
        self._count("vllm:prompt_tokens_by_source", num_cached_tokens, "local_cache_hit")
        self._count("vllm:prompt_tokens_cached", num_cached_tokens)
        self._count("vllm:prompt_tokens_cached_by_source", num_cached_tokens, "device")

    def on_tokens(self, num_tokens: int, seconds: float) -> None:
        """A continuation has further tokens, `seconds` after the last ones."""
        self._observe("vllm:inter_token_latency_seconds", seconds)
        self._count("vllm:generation_tokens", num_tokens)

    def on_finished(self, finished: EndedRequest) -> None:
        """A continuation ended. If the caller left or it failed, only the reason counts, and no histogram changes."""
        self._count("vllm:request_success", 1, finished.finish_reason)
        self._num_unfinished -= 1
        if self._num_unfinished == 0:
            self._set_idle()
        if finished.finish_reason not in ("stop", "length"):
            return
        if finished.has_met_targets is not None:
            self._count("quire_slo_requests", 1, "true" if finished.has_met_targets else "false")
        self._observe("vllm:e2e_request_latency_seconds", finished.e2e_seconds)
        self._observe("vllm:request_queue_time_seconds", finished.queued_seconds)
        self._observe("vllm:request_prefill_time_seconds", finished.prefill_seconds)
        self._observe("vllm:request_decode_time_seconds", finished.decode_seconds)
        self._observe("vllm:request_inference_time_seconds", finished.inference_seconds)
        self._observe("vllm:request_time_per_output_token_seconds", finished.seconds_per_output_token)
        self._observe("vllm:request_prompt_tokens", finished.num_prompt_tokens)
        self._observe("vllm:request_generation_tokens", finished.num_output_tokens)
        num_computed = finished.num_prompt_tokens - finished.num_cached_tokens
        self._observe("vllm:request_prefill_kv_computed_tokens", num_computed)
        self._observe("vllm:request_num_preemptions", finished.num_preemptions)
        if finished.longest_num_output_tokens is not None:  # once per request, with the last continuation
            self._observe("vllm:request_max_num_generation_tokens", finished.longest_num_output_tokens)
            self._observe("vllm:request_params_n", finished.n)
            self._observe("vllm:request_params_max_tokens", finished.max_tokens_param)

    def on_step(self, record: StepRecord) -> None:
        """The engine did a step."""
        self._set_load(record.num_running, record.num_waiting - record.num_deferred, record.num_deferred)
        self._set("vllm:kv_cache_usage_perc", record.num_blocks_in_use / max(record.num_blocks_total, 1))
        self._observe("vllm:iteration_tokens_total", record.num_prefill_tokens + record.num_sampled_tokens)
        if record.predicted_seconds:
            self._observe("quire_step_predicted_seconds", record.predicted_seconds)
        if record.timed_seconds:
            self._observe("quire_prediction_ratio", record.timed_seconds / record.predicted_seconds)
            is_inside = record.predicted_low_seconds <= record.timed_seconds <= record.predicted_high_seconds
            self._count("quire_predicted_steps", 1, "true" if is_inside else "false")
        self._count("vllm:prefix_cache_queries", record.prefix_cache_queries)
        self._count("vllm:prefix_cache_hits", record.prefix_cache_hits)
        self._count("vllm:num_preemptions", record.num_preemptions)
        if record.num_drafts:
            self._count("vllm:spec_decode_num_drafts", record.num_drafts)
            self._count("vllm:spec_decode_num_draft_tokens", record.num_draft_tokens)
            self._count("vllm:spec_decode_num_accepted_tokens", record.num_accepted_tokens)
            for position, count in enumerate(record.accepted_per_position):
                self._count("vllm:spec_decode_num_accepted_tokens_per_pos", count, str(position))
        if record.num_draft_failures:
            self._count("quire_spec_decode_draft_failures", record.num_draft_failures)
        if self._arithmetic is not None and record.pairs:
            demand = self._arithmetic.demand(load_of(record))
            self._count("vllm:estimated_flops_per_gpu", demand.flops)
            self._count("vllm:estimated_read_bytes_per_gpu", demand.weight_bytes + demand.kv_bytes)
            self._count("vllm:estimated_write_bytes_per_gpu", demand.written_bytes)
            self._set_utilization(*self._utilization.add(demand, record.step_seconds))
        for block in record.evicted_blocks or ():
            self._observe("vllm:kv_block_lifetime_seconds", block.lifetime_seconds)
            self._observe("vllm:kv_block_idle_before_evict_seconds", block.idle_seconds)
            for gap in block.reuse_gaps_seconds:
                self._observe("vllm:kv_block_reuse_gap_seconds", gap)
        if use := record.experts:
            for count in use.tokens:
                self._observe("quire_expert_tokens", count)
            self._observe("quire_distinct_experts", use.distinct)
            self._set("quire_expert_balancedness", use.balancedness)
            self._set("quire_expert_rank_balancedness", use.of_ranks)
            self._count("quire_moved_experts", use.num_moved)
        for rank, (seconds, waited) in enumerate(record.ranks):
            self._count("quire_rank_step_seconds", seconds, str(rank))
            self._count("quire_rank_waiting_seconds", waited, str(rank))
        for number, lane in enumerate(record.lanes):
            self._count("quire_lane_tokens", lane.num_tokens, str(number))
            self._set("quire_lane_requests_running", lane.num_running, str(number))
            self._set("quire_lane_requests_waiting", lane.num_waiting, str(number))
            self._set("quire_lane_kv_blocks_in_use", lane.num_blocks_in_use, str(number))
        if ("quire_lora_adapters", "known") in self._gauges:
            self._set("quire_lora_adapters", record.num_adapters, "known")
            self._set("quire_lora_adapters", record.num_adapters_in_memory, "in_memory")
        self.stats_line.add(record)
        if self._recent_tokens is not None:
            self._recent_tokens.add(record.num_prefill_tokens, record.num_sampled_tokens)
        if self._num_unfinished == 0:
            self._set_idle()  # the step was running when the last caller left

    def on_targets(self, targets: TargetTimes) -> None:
        """Set the targets."""
        self._set("quire_slo_target_seconds", targets.ttft, "ttft")
        self._set("quire_slo_target_seconds", targets.itl, "itl")

    def on_rejected(self, reason: str) -> None:
        """A request was refused because the server has no room."""
        self._count("vllm:admission_rejections", 1, reason)

    def on_restart(self, reason: str) -> None:
        """The engine failed and starts again. The remaining requests wait for it."""
        self._count("quire_engine_restarts", 1, reason)
        self._set_load(0, self._num_unfinished, 0)
        self._set("vllm:kv_cache_usage_perc", 0)
        self._clear_utilization()

    def on_retry(self) -> None:
        """A request of a failed engine is sent to another one."""
        self._count("quire_requests_retried")

    def on_unsaved(self, reason: str) -> None:
        """A request ended because its engine failed."""
        self._count("quire_requests_lost", 1, reason)

    def on_adapter_read(self, state: AdapterState) -> None:
        """The engine has read an adapter, or failed to."""
        self._count("quire_lora_loads", 1, "error" if state.facts is None else "ok")
        self._observe("quire_lora_load_seconds", state.seconds)

    def on_event_loop_lag(self, seconds: float) -> None:
        """The event loop was `seconds` late. All engines share this series."""
        self._observe("quire_event_loop_lag_seconds", seconds)

    def _set_idle(self) -> None:
        """Set the load to 0: no step follows the abort of the last request."""
        self._set_load(0, 0, 0)
        self._set("vllm:kv_cache_usage_perc", 0)
        self._clear_utilization()
        self.stats_line.set_idle()

    def _clear_utilization(self) -> None:
        self._utilization.clear()
        self._set_utilization(0, 0)

    def _set_utilization(self, flops: float, bandwidth: float) -> None:
        self._set("quire_model_flops_utilization", flops)
        self._set("quire_model_bandwidth_utilization", bandwidth)

    def _set_load(self, num_running: int, num_capacity: int, num_deferred: int) -> None:
        self._set("vllm:num_requests_running", num_running)
        self._set("vllm:num_requests_waiting", num_capacity + num_deferred)
        self._set("vllm:num_requests_waiting_by_reason", num_capacity, "capacity")
        self._set("vllm:num_requests_waiting_by_reason", num_deferred, "deferred")

    def on_ready(self, ready: EngineReady) -> None:
        """The engine takes requests: publish vllm:cache_config_info once, and prepare the estimates of work."""
        self.stats_line.device = "GPU" if _setting(ready, "device") == "cuda" else "CPU"
        dtype, quantization = _setting(ready, "dtype"), _setting(ready, "quantization")
        if self._model is not None and isinstance(dtype, str):
            weights = quantization if isinstance(quantization, str) else None
            kv_cache_dtype = str(_setting(ready, "kv_cache_dtype") or "auto")
            self._arithmetic = StepArithmetic(self._model, dtype, weights, kv_cache_dtype)
        self.max_loras = _setting(ready, "max_loras")
        peaks = (_setting(ready, name) for name in ("peak_flops", "peak_read_bandwidth"))
        self._utilization = Utilization(*(peak if isinstance(peak, int | float) else 0.0 for peak in peaks))
        if not self._has_cache_config:
            self._has_cache_config = True
            self._cache_config.labels(**self._labels, **cache_config(ready)).set(1)


def load_of(record: StepRecord) -> Load:
    """The load of a step, for its demand."""
    num_tokens = record.num_prefill_tokens + record.num_decode_tokens
    return Load(num_tokens, record.num_rows, record.num_logits, record.kv_tokens, record.pairs)


def cache_config(ready: EngineReady) -> dict[str, str]:
    """Values of CACHE_CONFIG_LABELS; "None" for a setting that was left to Quire or does not exist here."""
    num_tokens = _setting(ready, "kv_cache_tokens")
    known = {
        "block_size": ready.block_size,
        "cache_dtype": _setting(ready, "kv_cache_dtype"),
        "effective_attention_block_size": ready.block_size,
        "enable_prefix_caching": _setting(ready, "enable_prefix_caching"),
        "gpu_memory_utilization": _setting(ready, "gpu_memory_utilization"),
        "is_attention_free": False,
        "kv_cache_max_concurrency": f"{num_tokens / ready.max_model_len:.2f}" if isinstance(num_tokens, int) else None,
        "kv_cache_memory_bytes": _setting(ready, "kv_cache_bytes"),
        "kv_cache_size_tokens": num_tokens,
        "num_gpu_blocks": ready.num_blocks,
        "num_gpu_blocks_override": _setting(ready, "num_gpu_blocks_override"),
        "prefix_caching_hash_algo": "sha256",
        "user_specified_block_size": _setting(ready, "block_size", "source") in ("flag", "file", "argument"),
    }
    return {label: str(known.get(label)) for label in CACHE_CONFIG_LABELS}


def _setting(ready: EngineReady, name: str, part: str = "value") -> object:
    setting = ready.resolved.get(name)
    return setting.get(part) if isinstance(setting, dict) else None
