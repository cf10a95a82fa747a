"""Old names of metrics, from guides and dashboards older than vLLM 0.32. They are shown on request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from quire.metrics.registry import Kind

# The throughput gauges cover this time, like the line in the log.
WINDOW_SECONDS = 10.0


@dataclass(frozen=True)
class LegacyMetric:
    """An old name. It repeats the family `now`; if that is None, it has its own value: see `LegacyValues`."""

    name: str
    kind: Kind
    unit: str
    help: str
    now: str | None = None


def _renamed(name: str, now: str, kind: Kind, unit: str, why: str = "Old name of") -> LegacyMetric:
    suffix = "_total" if kind == "counter" else ""
    return LegacyMetric(name, kind, unit, f"{why} {now}{suffix}: use that.", now)


def _gone(name: str, unit: str, what: str) -> LegacyMetric:
    return LegacyMetric(name, "gauge", unit, f"Always 0: {what}.")


GPU_HIT_RATE = "vllm:gpu_prefix_cache_hit_rate"
PROMPT_THROUGHPUT = "vllm:avg_prompt_throughput_toks_per_s"
GENERATION_THROUGHPUT = "vllm:avg_generation_throughput_toks_per_s"
LEGACY_METRICS: tuple[LegacyMetric, ...] = (
    _renamed("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc", "gauge", "share, 0 to 1"),
    _renamed("vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds", "histogram", "seconds"),
    _renamed("vllm:gpu_prefix_cache_queries", "vllm:prefix_cache_queries", "counter", "tokens"),
    _renamed("vllm:gpu_prefix_cache_hits", "vllm:prefix_cache_hits", "counter", "tokens"),
    _renamed(
        "vllm:num_generate_tokens", "vllm:generation_tokens", "counter", "tokens", "Never a name of vLLM's; meant is"
    ),
    LegacyMetric(
        GPU_HIT_RATE,
        "gauge",
        "share, 0 to 1",
        "Replaced by rate(vllm:prefix_cache_hits_total[5m]) / rate(vllm:prefix_cache_queries_total[5m]).",
    ),
    LegacyMetric(
        PROMPT_THROUGHPUT,
        "gauge",
        "tokens per second",
        "Over the last 10 seconds. Replaced by rate(vllm:prompt_tokens_total[1m]).",
    ),
    LegacyMetric(
        GENERATION_THROUGHPUT,
        "gauge",
        "tokens per second",
        "Over the last 10 seconds. Replaced by rate(vllm:generation_tokens_total[1m]).",
    ),
    _gone("vllm:num_requests_swapped", "requests", "nothing is swapped; see vllm:num_preemptions_total"),
    _gone("vllm:cpu_cache_usage_perc", "share, 0 to 1", "there is no swap space; see vllm:kv_cache_usage_perc"),
    _gone(
        "vllm:cpu_prefix_cache_hit_rate", "share, 0 to 1", "there is no second cache; see vllm:prefix_cache_hits_total"
    ),
)


class RecentTokens:
    """Tokens of the last `WINDOW_SECONDS`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, int, int]] = deque()

    def add(self, num_prompt: int, num_generated: int) -> None:
        """Count one step."""
        self._steps.append((self._clock(), num_prompt, num_generated))
        self._forget()

    def per_second(self) -> tuple[float, float]:
        """(prompt, generated) tokens per second."""
        self._forget()
        num_prompt = sum(prompt for _, prompt, _ in self._steps)
        num_generated = sum(generated for _, _, generated in self._steps)
        return num_prompt / WINDOW_SECONDS, num_generated / WINDOW_SECONDS

    def _forget(self) -> None:
        oldest = self._clock() - WINDOW_SECONDS
        while self._steps and self._steps[0][0] < oldest:
            self._steps.popleft()


@dataclass(frozen=True)
class LegacyValues:
    """One engine's values for the old names that repeat no family.

    Args:
        labels: COMMON_LABELS with their values.
        hit_rate: gives the hit rate of the prefix cache, 0 to 1.
    """

    labels: dict[str, str]
    recent_tokens: RecentTokens
    hit_rate: Callable[[], float]

    def by_name(self) -> dict[str, float]:
        """The values that are not always 0."""
        prompt, generated = self.recent_tokens.per_second()
        return {PROMPT_THROUGHPUT: prompt, GENERATION_THROUGHPUT: generated, GPU_HIT_RATE: self.hit_rate()}


class LegacyNames(Collector):
    """The families of LEGACY_METRICS, made at every scrape.

    Args:
        current: the families by their present names.
        engines: the values of each engine.
    """

    def __init__(self, current: Mapping[str, Collector], engines: Sequence[LegacyValues]) -> None:
        self._current, self._engines = current, engines

    def collect(self) -> Iterable[Family]:
        own = [(engine.labels, engine.by_name()) for engine in self._engines]
        for metric in LEGACY_METRICS:
            family = Family(metric.name, metric.help, metric.kind)
            if metric.now is None:
                family.samples = [Sample(metric.name, labels, values.get(metric.name, 0.0)) for labels, values in own]
            else:
                (current,) = self._current[metric.now].collect()
                family.samples = [
                    sample._replace(name=metric.name + sample.name.removeprefix(metric.now))
                    for sample in current.samples
                ]
            yield family
