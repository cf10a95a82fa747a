"""Server-sent events, and work that ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


def event(data: msgspec.Struct) -> bytes:
    """One event that holds a JSON object."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


def raw_event(json: bytes) -> bytes:
    """One event from JSON that is already encoded."""
    return b"data: " + json + b"\n\n"


async def run_until_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`. If the client leaves first, `work` is cancelled, has ended, and ClientDisconnect is raised."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `events` as they come. The generator is closed when it ends, fails or the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        self._events = events
        self.status_code = 200
        self.background = None
        # No proxy may hold events back.
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(self._send_all(send), receive)

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
