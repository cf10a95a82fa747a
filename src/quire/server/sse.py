"""Server-sent events, and work that ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.logs import get_logger
from quire.server.errors import error_body, internal_error_body, is_anthropic
from quire.server.state import request_id_of

logger = get_logger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


def event(data: msgspec.Struct) -> bytes:
    """One event that holds a JSON object."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


def named_event(data: msgspec.Struct) -> bytes:
    """One event that holds a JSON object and has the name of its type."""
    return f"event: {data.__struct_config__.tag}\n".encode() + event(data)


async def run_until_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`. If the client leaves first: ClientDisconnect, and `work` was cancelled and has ended."""
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
    """Sends events as they come. The generator is closed when it ends, fails or the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        self._first, self._events = first, events
        self.status_code = 200
        self.background = None
        # No proxy may hold events back.
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})

    @classmethod
    async def start(cls, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> EventStream:
        """Wait for the first event, so that a request that fails before it is answered with a status of its own."""
        return cls(await anext(events), events, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            with suppress(ClientDisconnect):  # there is nobody left to tell
                await run_until_disconnect(self._send_all(scope, send), receive)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except QuireError as error:
            body = _last_event(scope["path"], error_body(error, scope["path"]))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception:
            request_id = request_id_of(scope)
            logger.exception("request %s failed while streaming", request_id)
            body = _last_event(scope["path"], internal_error_body(request_id, scope["path"]))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _last_event(path: str, error: bytes) -> bytes:
    if is_anthropic(path):
        return b"event: error\ndata: " + error + b"\n\n"
    return b"data: " + error + b"\n\n" + DONE
