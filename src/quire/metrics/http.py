"""What HTTP requests are counted by: method, status and route, each from a closed set."""

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
    """Counts answered requests in `registry`. A series exists from its first request on."""

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
            method: as the client wrote it; one that is none of HTTP's counts as "other".
            handler: a route of the server, or "other": never a path as the client wrote it.
            status: of the answer, 100 to 599.
        """
        known = method if method in HTTP_METHODS else OTHER
        self._requests.labels(known, HTTP_STATUSES[status // 100 - 1], handler).inc()
        self._seconds.labels(known, handler).observe(seconds)
