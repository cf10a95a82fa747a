"""Lines of OpenAI's batch files, answered by the server's app in this process: no socket, the same checks."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_NOT_IN_FILES = ("stream", "background")  # their answers would be no answer
_RETRIED = (429, 503)
MAX_ATTEMPTS = 10
RETRY_SECONDS = 1.0


class BatchLine(msgspec.Struct):
    custom_id: str
    url: str
    body: dict[str, msgspec.Raw]
    method: str = "POST"


class BatchError(msgspec.Struct):
    code: str | None
    message: str


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchEntry(msgspec.Struct):
    """The entry of one line in the output file; `custom_id` is null if the line has none."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None


_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Named(msgspec.Struct):
    custom_id: str


class _Refusal(msgspec.Struct):
    error: BatchError


def entry_id(number: int, line: bytes) -> str:
    """A name for a line, from its place and its content. A later run recognizes the line by it."""
    return f"batch_req_{hashlib.sha256(b'%d:' % number + line).hexdigest()[:24]}"


async def answer_line(app: ASGIApp, line_id: str, line: bytes) -> BatchEntry:
    """The entry of one line; a malformed line has an entry too. A line is sent again if the server is too busy."""
    try:
        asked = msgspec.json.decode(line, type=BatchLine)
    except _UNREADABLE as error:
        message = f'The line is not {{"custom_id", "method", "url", "body"}}: {error}'
        return BatchEntry(line_id, _custom_id(line), error=BatchError("invalid_line", message))
    if (wrong := _wrong(asked)) is not None:
        return BatchEntry(line_id, asked.custom_id, error=BatchError("invalid_line", wrong))
    body = msgspec.json.encode(asked.body)
    for attempt in range(MAX_ATTEMPTS):
        if attempt:
            await asyncio.sleep(RETRY_SECONDS)
        response = await _post(app, asked.url, body)
        if response.status_code not in _RETRIED:
            break
    entry = BatchEntry(line_id, asked.custom_id, response)
    if response.status_code != 200:
        entry.error = msgspec.json.decode(response.body, type=_Refusal).error
    return entry


def _custom_id(line: bytes) -> str | None:
    """The name that its author gave a malformed line; None: it has none that can be read."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except _UNREADABLE:
        return None


def _wrong(asked: BatchLine) -> str | None:
    if asked.method != "POST":
        return f"method is {asked.method[:20]!r}. Expected POST."
    if asked.url not in URLS:
        return f"url is {asked.url[:100]!r}. Expected one of {', '.join(URLS)}."
    for name in _NOT_IN_FILES:
        if bytes(asked.body.get(name, b"")) == b"true":
            return f"{name} is true. Remove it: a file holds whole answers."
    return None


async def _post(app: ASGIApp, path: str, body: bytes) -> BatchResponse:
    """The app's answer to one body. The client of this request never leaves early."""
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    sent: list[Message] = []
    bodies = iter([body])

    async def receive() -> Message:
        if (data := next(bodies, None)) is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": data}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *parts = sent
    request_id = dict(start["headers"])[b"x-request-id"].decode()
    return BatchResponse(start["status"], request_id, msgspec.Raw(b"".join(part.get("body", b"") for part in parts)))
