"""ASGI middleware that counts and times every HTTP request under the route it belongs to."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.metrics.http import HttpMetrics
from quire.metrics.registry import OTHER
from quire.server import page

# Machines call these routes every few seconds, which would hide the requests of people. vLLM leaves them out too. The
# files of the page at / are loaded with the page.
NOT_COUNTED = frozenset({"/metrics", "/health", "/livez", "/readyz", "/ping", "/load", "/version", *page.FILES})


class CountRequests:
    """Counts HTTP requests. It is around everything, so that refused and failed requests count too.

    Args:
        routes: the routes of the server. Only their paths are labels; a request to another path counts as "other".
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, routes: Sequence[Route]) -> None:
        self._app, self._metrics = app, metrics
        self._fixed = frozenset(route.path for route in routes if "{" not in route.path)
        self._patterns = [(route.path_regex, route.path) for route in routes if "{" in route.path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in NOT_COUNTED:
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        status = 500  # if nothing is ever answered

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_look)
        finally:
            handler = self._handler(scope["path"])
            self._metrics.on_request(scope["method"], handler, status, time.monotonic() - start)

    def _handler(self, path: str) -> str:
        """The route's path as it was declared."""
        if path in self._fixed:
            return path
        return next((declared for pattern, declared in self._patterns if pattern.match(path)), OTHER)
