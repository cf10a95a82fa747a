"""The life of the HTTP server. It is uvicorn's, but its end resets no connection.

When the server ends, the port stays open while requests run, so that new clients learn that it is shutting down. Then
new connections are turned away, the existing connections get their answers, and the port is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quire.server.http_protocol import GuardedProtocol

POLL_SECONDS = 0.05
HANDSHAKE_SECONDS = 0.1  # the time for a connection that a client has begun to open
LAST_REQUEST_SECONDS = 0.5  # the time in which a client that has just connected can send its request
GOOD_BYE_SECONDS = 0.25  # the time in which clients close idle connections after we did


def http_config(app: ASGIApp, protocol: type[GuardedProtocol] = GuardedProtocol, **options: Any) -> uvicorn.Config:
    """The settings of every HttpServer, and uvicorn's other `options`. Answers have no `server` header."""
    return uvicorn.Config(app, http=protocol, ws="none", server_header=False, **options)


class HttpServer(uvicorn.Server):
    """One server. `should_exit` starts its end, and `force_exit` makes the end short."""

    def __init__(
        self,
        config: uvicorn.Config,
        drain_seconds: float,
        turn_away: Callable[[], None] = lambda: None,
        *,
        hands_over: bool = False,
    ) -> None:
        """Make a server with uvicorn's `config`.

        Args:
            drain_seconds: the most seconds for requests that run when the end begins. Then their connections are cut.
            turn_away: makes new connections fail. Connections that have been made can still be accepted.
            hands_over: whether another process has the sockets too. Then it gets new connections when the end begins.
        """
        super().__init__(config)
        self._drain_seconds, self._turn_away, self._hands_over = drain_seconds, turn_away, hands_over

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller. uvicorn would end the process before it has cleaned up."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain and close. Requests that come meanwhile get an answer; the app refuses them."""
        listeners = sockets or []
        if self._hands_over:
            self._stop_listening(listeners)
        running = set(self.server_state.tasks)
        busy = [each for each in self._connections() if not each.is_idle]
        await self._wait_until(lambda: all(task.done() for task in running), self._drain_seconds)
        if not all(task.done() for task in running):
            self._cut(busy)
        if not self._hands_over:
            self._turn_away()
            if not self.force_exit:
                await asyncio.sleep(HANDSHAKE_SECONDS)
            await self._wait_until(lambda: not select.select(listeners, [], [], 0)[0], LAST_REQUEST_SECONDS)
            self._stop_listening(listeners)
        await self._wait_until(lambda: all(each.is_idle for each in self._connections()), LAST_REQUEST_SECONDS)
        for connection in self._connections():
            connection.shutdown()
        await self._wait_until(lambda: not self.server_state.connections, GOOD_BYE_SECONDS)
        self._cut(self._connections())
        await self.lifespan.shutdown()

    def _stop_listening(self, listeners: list[socket.socket]) -> None:
        for server in self.servers:
            server.close()
        for listener in listeners:
            listener.close()

    @staticmethod
    def _cut(connections: list[GuardedProtocol]) -> None:
        for connection in connections:
            connection.transport.abort()

    def _connections(self) -> list[GuardedProtocol]:
        return [each for each in self.server_state.connections if isinstance(each, GuardedProtocol)]

    async def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for tick in count():
            if condition() or self.force_exit or time.monotonic() >= deadline:
                return
            await self.on_tick(tick)  # so that answers have the right date
            await asyncio.sleep(POLL_SECONDS)
