"""PromQL about metrics of the registry: a name that nothing emits is an error here, not an empty panel at night."""

from __future__ import annotations

from dataclasses import dataclass

from quire.metrics.registry import (
    CACHE_CONFIG_INFO,
    HTTP_DURATION,
    HTTP_REQUESTS,
    KV_BLOCK_METRICS,
    LORA_METRICS,
    LORA_REQUESTS_INFO,
    METRICS,
    SPECULATION_METRICS,
    Metric,
)

DECLARED = {
    metric.name: metric
    for metric in (
        *METRICS, *KV_BLOCK_METRICS, *SPECULATION_METRICS, *LORA_METRICS,
        LORA_REQUESTS_INFO, CACHE_CONFIG_INFO, HTTP_REQUESTS, HTTP_DURATION,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Queries:
    """Expressions over one window of time.

    Args:
        window: the window of rates and quantiles, such as `5m`.
        has_variables: select by the variables `$job` and `$model_name` of a dashboard.
        by: labels that sums keep.
    """

    window: str
    has_variables: bool = False
    by: tuple[str, ...] = ()

    def gauge(self, name: str, **labels: str) -> str:
        """The series of a gauge. `labels`: their own values to select."""
        return self._select(self._declared(name, "gauge"), "", **labels)

    def sum(self, name: str, **labels: str) -> str:
        """A gauge, summed."""
        return self._sum(self.gauge(name, **labels))

    def rate(self, name: str, by: tuple[str, ...] = (), **labels: str) -> str:
        """Events of a counter per second, summed."""
        return self._sum(self._over("rate", self._declared(name, "counter"), "_total", **labels), by)

    def increase(self, name: str, **labels: str) -> str:
        """Events of a counter within the window, summed."""
        return self._sum(self._over("increase", self._declared(name, "counter"), "_total", **labels))

    def count_rate(self, name: str) -> str:
        """Observations of a histogram per second, summed."""
        return self._sum(self._over("rate", self._declared(name, "histogram"), "_count"))

    def mean(self, name: str) -> str:
        """The mean of a histogram's observations."""
        metric = self._declared(name, "histogram")
        return f"{self._sum(self._over('rate', metric, '_sum'))} / {self.count_rate(name)}"

    def quantile(self, share: float, name: str) -> str:
        """A quantile of a histogram's observations."""
        buckets = self._over("rate", self._declared(name, "histogram"), "_bucket")
        return f"histogram_quantile({share:g}, {self._sum(buckets, ('le',))})"

    @staticmethod
    def _declared(name: str, kind: str) -> Metric:
        metric = DECLARED[name]
        assert metric.kind == kind, f"{name} is a {metric.kind}"
        return metric

    def _sum(self, expression: str, by: tuple[str, ...] = ()) -> str:
        labels = (*self.by, *by)
        return f"sum by ({', '.join(labels)}) ({expression})" if labels else f"sum({expression})"

    def _over(self, function: str, metric: Metric, suffix: str, **labels: str) -> str:
        return f"{function}({self._select(metric, suffix, **labels)}[{self.window}])"

    def _select(self, metric: Metric, suffix: str, **labels: str) -> str:
        for label, value in labels.items():
            assert label == metric.label and value in metric.values, f"{metric.name} has no {label}={value}"
        parts = [f'{label}="{value}"' for label, value in labels.items()]
        if self.has_variables:
            variables = ("job", *(("model_name",) if "model_name" in metric.common else ()))
            parts = [f'{name}=~"${name}"' for name in variables] + parts
        return f"{metric.name}{suffix}" + (f"{{{', '.join(parts)}}}" if parts else "")
