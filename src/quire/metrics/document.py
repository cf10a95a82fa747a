"""docs/metrics.md from the registry: `python -m quire.metrics.document > docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Iterable

from quire.metrics.legacy import LEGACY_METRICS, LegacyMetric
from quire.metrics.registry import (
    CACHE_CONFIG_INFO,
    CACHE_CONFIG_LABELS,
    HTTP_DURATION,
    HTTP_DURATION_LABELS,
    HTTP_METHODS,
    HTTP_REQUESTS,
    HTTP_REQUESTS_LABELS,
    HTTP_STATUSES,
    KV_BLOCK_METRICS,
    METRICS,
    OTHER,
    UP_TO_MODEL_LEN,
    Metric,
)

_HEAD = """\
# Metrics

`GET /metrics` answers in Prometheus' text format. Names, types and labels are those of vLLM 0.32, so that its
dashboards and alerts work; those that begin with `quire_` it does not have. This page is generated from
`src/quire/metrics/registry.py` by `python -m quire.metrics.document > docs/metrics.md`.

- Every series of an engine has the labels `model_name` (the first served name) and `engine` (its index, from 0).
  Other labels are in the table, with all the values they can have. No label holds anything a client sent: the number of
  series does not grow.
- A request with `n` above 1 has as many continuations. vLLM counts each of them as a request, and so do these metrics
  where the table says "per continuation".
- Histograms of continuations and requests hold those that ended by themselves (`stop`, `length`); the times to first
  token and between tokens hold all, as they come. Aborts and errors are counted by `vllm:request_success_total`.
- `vllm:prompt_tokens_total` and `vllm:generation_tokens_total` are the sums of `usage` over all answers; tokens that
  went to a client that left or whose engine failed are counted too, those computed again after a failure once.
- The `vllm:kv_block_*` are there with `--kv-cache-metrics` only; `--kv-cache-metrics-sample` is the share of the
  blocks they follow.
- Besides these there are the usual `process_*` and `python_*` of the API process.
- `promtool check metrics` has two complaints, both about vLLM's names: the colon, and `_total` at a histogram.
"""
_LEGACY_HEAD = """\
## Old names

`quire serve --legacy-metric-names` also shows these, for guides and dashboards older than vLLM 0.32.
"""
_BUCKETS_HEAD = """\
## Buckets

Upper bounds. vLLM's are all there; the finer ones at the low end are Quire's, since a small model on a CPU is faster.
"""


def markdown() -> str:
    """The whole page."""
    cache = ", ".join(f"`{label}`" for label in CACHE_CONFIG_LABELS)
    rows = [_row(metric, _label(metric)) for metric in (*METRICS, *KV_BLOCK_METRICS)]
    rows.append(_row(CACHE_CONFIG_INFO, f"{cache}; `None`: not set, or not in this version"))
    methods, statuses = (", ".join(f"`{value}`" for value in values) for values in (HTTP_METHODS, HTTP_STATUSES))
    handler = f"`handler`: a route as declared, or `{OTHER}`"
    rows.append(_row(HTTP_REQUESTS, f"none of the two, but `method`: {methods}; `status`: {statuses}; {handler}"))
    rows.append(
        _row(HTTP_DURATION, ", ".join(f"`{label}`" for label in HTTP_DURATION_LABELS) + " as above; none of the two")
    )
    assert HTTP_REQUESTS_LABELS == ("method", "status", "handler"), "the row above names these"
    histograms = [metric for metric in (*METRICS, *KV_BLOCK_METRICS, HTTP_DURATION) if metric.kind == "histogram"]
    parts = [
        _HEAD,
        *_table(("name", "type", "unit", "labels besides `model_name` and `engine`", "meaning"), rows),
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
