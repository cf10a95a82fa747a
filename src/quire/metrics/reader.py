"""Metrics as objects in vLLM's shape: the result of `LLM.get_metrics()`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family

from quire.metrics.registry import POSITION

PREFIXES = ("vllm:", "quire_")


@dataclass
class Metric:
    """One series: a family's name (for counters without `_total`) and its labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A value that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """A counter for each of several positions."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A value that may rise and fall."""

    value: float


@dataclass
class Histogram(Metric):
    """`buckets`: observations up to each upper bound; "+Inf" has all. `sum`: in the metric's unit."""

    count: int
    sum: float
    buckets: dict[str, int]


def read(registry: CollectorRegistry) -> list[Metric]:
    """The present value of every series of the engine."""
    families = (family for family in registry.collect() if family.name.startswith(PREFIXES))
    return [metric for family in families for metric in _series(family)]


def _series(family: Family) -> Iterator[Metric]:
    name = family.name
    vectors: dict[tuple[tuple[str, str], ...], Vector] = {}
    histograms: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        if family.type == "gauge":
            yield Gauge(name, sample.labels, sample.value)
        elif family.type == "counter" and POSITION in sample.labels:
            labels = {label: value for label, value in sample.labels.items() if label != POSITION}
            vectors.setdefault(tuple(labels.items()), Vector(name, labels, [])).values.append(int(sample.value))
        elif family.type == "counter":
            yield Counter(name, sample.labels, int(sample.value))
        elif family.type == "histogram":
            labels = {label: value for label, value in sample.labels.items() if label != "le"}
            histogram = histograms.setdefault(tuple(labels.items()), Histogram(name, labels, 0, 0.0, {}))
            if sample.name == f"{name}_bucket":
                histogram.buckets[sample.labels["le"]] = int(sample.value)
            elif sample.name == f"{name}_count":
                histogram.count = int(sample.value)
            elif sample.name == f"{name}_sum":
                histogram.sum = sample.value
    yield from vectors.values()
    yield from histograms.values()
