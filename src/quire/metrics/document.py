"""docs/metrics.md from the registry: `python -m quire.metrics.document > docs/metrics.md`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from quire.metrics.legacy import LEGACY_METRICS, LegacyMetric
from quire.metrics.registry import (
    CACHE_CONFIG_INFO,
    CACHE_CONFIG_LABELS,
    EXPERT_METRICS,
    HTTP_DURATION,
    HTTP_DURATION_LABELS,
    HTTP_METHODS,
    HTTP_REQUESTS,
    HTTP_REQUESTS_LABELS,
    HTTP_STATUSES,
    KV_BLOCK_METRICS,
    LANE,
    LANE_METRICS,
    LORA_METRICS,
    LORA_REQUESTS_INFO,
    LORA_REQUESTS_LABELS,
    METRICS,
    OTHER,
    POSITION,
    RANK,
    RANK_METRICS,
    SPECULATION_METRICS,
    UP_TO_MODEL_LEN,
    Metric,
)

_HEAD = """\
# Metrics

`GET /metrics` answers in Prometheus' text format. The metrics have the names, types and labels of vLLM 0.32, so that
its dashboards and alerts work. vLLM does not have the metrics that begin with `quire_`. This page is generated from
`src/quire/metrics/registry.py` by `python -m quire.metrics.document > docs/metrics.md`.

- Every series of an engine has the labels `model_name` (the first served name) and `engine` (its index, from 0). The
  table has the other labels, with all values that they can have. No label holds a text that a client sent, so the
  number of series does not grow.
- A request with `n` above 1 has `n` continuations. vLLM counts each of them as a request. These metrics do the same
  where the table says "per continuation".
- Histograms of continuations and requests hold only those that ended by themselves (`stop`, `length`). The times to
  first token and between tokens hold all, as they come. `vllm:request_success_total` counts aborts and errors.
- `vllm:prompt_tokens_total` and `vllm:generation_tokens_total` are the sums of `usage` over all answers. Tokens count
  also if the client left or the engine failed. They count once, also if another engine goes on with the request.
- The metrics `vllm:kv_block_*` are there only with `--kv-cache-metrics`. They follow a share of the blocks:
  `--kv-cache-metrics-sample`.
- The metrics `quire_expert_*` and `quire_distinct_experts` are there only with `--expert-metrics`, for a model with
  experts on a CPU.
- The metrics `quire_rank_*` are there only where several ranks share a model (`-tp`, `-pp`). A step of another rank
  than the first may be counted with the step after it. The label `rank` has their numbers, from 0.
- The metrics `quire_lane_*` are there only where lanes of an engine share experts (`-dp` with `-ep`). The label `lane`
  has their numbers, from 0. All other metrics are sums over the lanes of an engine.
- The metrics `vllm:spec_decode_*` and `quire_spec_decode_*` are there only with `--speculative-config`.
- The metrics `vllm:lora_requests_info` and `quire_lora_*` are there only with `--enable-lora`. The names of adapters in
  use are labels, as in vLLM, and `vllm:lora_requests_info` never has more than one series.
- There are also the usual `process_*` and `python_*` metrics of the API process.
- `promtool check metrics` has two complaints, both about vLLM's names: the colon, and `_total` at a histogram.
"""
_LEGACY_HEAD = """\
## Old names

`quire serve --legacy-metric-names` also shows these, for guides and dashboards older than vLLM 0.32.
"""
_BUCKETS_HEAD = """\
## Buckets

The table has the upper bounds. vLLM's bounds are all there. Quire adds finer ones at the low end, because a small model
on a CPU is faster.
"""


def markdown() -> str:
    """The whole page."""
    cache = f"Labels of `{CACHE_CONFIG_INFO.name}`: {', '.join(f'`{label}`' for label in CACHE_CONFIG_LABELS)}."
    rows = [
        _row(metric, _label(metric))
        for metric in (
            *METRICS,
            *KV_BLOCK_METRICS,
            *EXPERT_METRICS,
            *RANK_METRICS,
            *LANE_METRICS,
            *SPECULATION_METRICS,
            *LORA_METRICS,
        )
    ]
    labels = ", ".join(f"`{label}`" for label in LORA_REQUESTS_LABELS)
    rows.append(_row(LORA_REQUESTS_INFO, f"none of the two, but {labels}"))
    rows.append(_row(CACHE_CONFIG_INFO, "see below; `None`: not set, or not in this version"))
    methods, statuses = (", ".join(f"`{value}`" for value in values) for values in (HTTP_METHODS, HTTP_STATUSES))
    handler = f"`handler`: a route as declared, or `{OTHER}`"
    rows.append(_row(HTTP_REQUESTS, f"none of the two, but `method`: {methods}; `status`: {statuses}; {handler}"))
    rows.append(
        _row(HTTP_DURATION, ", ".join(f"`{label}`" for label in HTTP_DURATION_LABELS) + " as above; none of the two")
    )
    assert HTTP_REQUESTS_LABELS == ("method", "status", "handler"), "the row above names these"
    histograms = [
        metric
        for metric in (*METRICS, *KV_BLOCK_METRICS, *EXPERT_METRICS, *LORA_METRICS, HTTP_DURATION)
        if metric.kind == "histogram"
    ]
    parts = [
        _HEAD,
        *_table(("name", "type", "unit", "labels besides `model_name` and `engine`", "meaning"), rows),
        "",
        *textwrap.wrap(cache, 120, break_long_words=False, break_on_hyphens=False),
        "",
        _BUCKETS_HEAD,
        *_table(("bounds", "metrics"), _bucket_rows(histograms)),
        "",
        _LEGACY_HEAD,
        *_table(("name", "type", "unit", "meaning"), ([*_start(metric), metric.help] for metric in LEGACY_METRICS)),
    ]
    return "\n".join(parts) + "\n"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _start(metric: Metric | LegacyMetric) -> list[str]:
    suffix = "_total" if metric.kind == "counter" else ""
    return [f"`{metric.name}{suffix}`", metric.kind, metric.unit or "-"]


def _row(metric: Metric, labels: str) -> list[str]:
    return [*_start(metric), labels, metric.help]


def _label(metric: Metric) -> str:
    if metric.label == POSITION:
        return f"`{POSITION}`: 0 to the longest draft's last"
    if metric.label == RANK:
        return f"`{RANK}`: 0 to the last rank"
    if metric.label == LANE:
        return f"`{LANE}`: 0 to the last lane"
    values = ", ".join(f"`{value}`" for value in metric.values)
    label = f"`{metric.label}`: {values}" if metric.label else "-"
    return label if "engine" in metric.common else f"{label}; no `engine`"


def _bucket_rows(histograms: list[Metric]) -> list[list[str]]:
    by_bounds: dict[tuple[float, ...], list[str]] = {}
    for metric in histograms:
        by_bounds.setdefault(metric.buckets, []).append(f"`{metric.name}`")
    return [[_bounds(bounds), ", ".join(names)] for bounds, names in by_bounds.items()]


def _bounds(bounds: tuple[float, ...]) -> str:
    if bounds == UP_TO_MODEL_LEN:
        return "1, 2, 5, 10, 20, 50, ... up to `max_model_len`"
    return ", ".join(f"{bound:g}" for bound in bounds)


if __name__ == "__main__":
    print(markdown(), end="")
