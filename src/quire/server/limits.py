"""Limits for the cost of one HTTP request before it reaches the engine, and the reading of bodies within them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TypeVar

from starlette.requests import Request

from quire.errors import InvalidRequestError
from quire.server.errors import HttpError

T = TypeVar("T")

MAX_JSON_DEPTH = 64
# Objects and lists in one body. A conversation of 4096 messages with ten parts each has a twentieth of it.
MAX_JSON_CONTAINERS = 1_000_000
# Larger bodies are decoded in a thread, so that other requests' streams go on meanwhile.
_INLINE_BODY_BYTES = 256 * 1024

# Numbers near the limits of a double in one body: each takes the decoder 15 to 30 us, and an ordinary one 0.1.
MAX_EXTREME_NUMBERS = 1000
_EXTREME_EXPONENT = re.compile(rb"[eE][+-]?0*(?:2[89]\d|[3-9]\d\d|\d{4})")

_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_IS_OPENING = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

# When the body of the HTTP request that is served was complete, on the monotonic clock.
body_time: ContextVar[float | None] = ContextVar("body_time", default=None)


@dataclass(frozen=True)
class Limits:
    """The limits of one HTTP request. The number of sequences is the number of prompts times n."""

    max_body_bytes: int = 16 * 2**20
    body_timeout_seconds: float = 60.0
    max_prompts: int = 1024
    max_sequences: int = 1024


async def read_json(request: Request, limits: Limits, decode: Callable[[bytes], T]) -> T:
    """The decoded body. Sets `body_time`.

    Raises:
        HttpError: 415 not JSON by its content type, or compressed, 413 too large, 408 too slow.
        InvalidRequestError: nested too deeply, and the errors of `decode`.
        ClientDisconnect: the client left.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise HttpError(
            415, "unsupported_media_type", "The content type is not JSON", expected="content-type: application/json"
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise HttpError(
            415,
            "unsupported_media_type",
            "The body is compressed, and this server does not unpack bodies",
            fix="Send it as it is, without content-encoding",
        )
    try:
        async with asyncio.timeout(limits.body_timeout_seconds):
            body = await _read_body(request, limits.max_body_bytes)
    except TimeoutError:
        raise HttpError(
            408, "body_timeout", f"The body did not arrive within {limits.body_timeout_seconds:g} seconds"
        ) from None
    body_time.set(time.monotonic())
    if len(body) <= _INLINE_BODY_BYTES:
        return _checked(body, decode)
    return await asyncio.to_thread(_checked, body, decode)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, "body_too_large", "The body is too large", expected=f"at most {max_bytes} bytes")


def _checked(body: bytes, decode: Callable[[bytes], T]) -> T:
    check_nesting(body)
    check_numbers(body)
    return decode(body)


def check_numbers(body: bytes) -> None:
    """Raise InvalidRequestError if a JSON text has so many numbers like 1e308 that decoding takes over some 30 ms."""
    if _has_many_exponents(body) and _has_many_exponents(_outside_strings(body)):
        raise InvalidRequestError(
            "The body has too many numbers with exponents of 280 and more", expected=f"at most {MAX_EXTREME_NUMBERS}"
        )


def _has_many_exponents(text: bytes) -> bool:
    found = islice(_EXTREME_EXPONENT.finditer(text), MAX_EXTREME_NUMBERS + 1)
    return sum(1 for _ in found) > MAX_EXTREME_NUMBERS


def check_nesting(body: bytes) -> None:
    """Raise InvalidRequestError if a JSON text is nested deeper than MAX_JSON_DEPTH. The check takes linear time."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return
    brackets = _outside_strings(body).translate(None, _NOT_BRACKETS)
    if len(brackets) > 2 * MAX_JSON_CONTAINERS:
        raise InvalidRequestError("The body has too many lists and objects", expected=f"at most {MAX_JSON_CONTAINERS}")
    if max(accumulate(map(_IS_OPENING.__getitem__, brackets)), default=0) > MAX_JSON_DEPTH:
        raise InvalidRequestError("The body is nested too deeply", expected=f"at most {MAX_JSON_DEPTH} levels")


def _outside_strings(body: bytes) -> bytes:
    """The parts of a JSON text outside of its strings."""
    without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(without_escapes.split(b'"')[::2])
