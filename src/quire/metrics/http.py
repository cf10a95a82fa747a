"""Counts HTTP requests by method, status and route. Each of these has a closed set of values."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from quire.metrics.registry import (
    HTTP_DURATION,
    HTTP_DURATION_LABELS,
    HTTP_METHODS,
    HTTP_REQUESTS,
    HTTP_REQUESTS_LABELS,
    HTTP_STATUSES,
    OTHER,
)


class HttpMetrics:
    """Counts answered requests in `registry`. A series begins with its first request."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(HTTP_REQUESTS.name, HTTP_REQUESTS.help, HTTP_REQUESTS_LABELS, registry=registry)
        self._seconds = Histogram(
            HTTP_DURATION.name,
            HTTP_DURATION.help,
            HTTP_DURATION_LABELS,
            buckets=HTTP_DURATION.buckets,
            registry=registry,
        )

    def on_request(self, method: str, handler: str, status: int, seconds: float) -> None:
        """A request was answered, or left by its client.

        Args:
            method: the client's text; an unknown method counts as "other".
            handler: a route of the server, or "other"; never the client's path.
            status: the status of the answer, 100 to 599.
        """
        known = method if method in HTTP_METHODS else OTHER
        self._requests.labels(known, HTTP_STATUSES[status // 100 - 1], handler).inc()
        self._seconds.labels(known, handler).observe(seconds)
