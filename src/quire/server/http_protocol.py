"""HTTP/1.1 connections: uvicorn's, with limits on header size and count and on how slow a client may be.

A connection is ended if a request's headers do not arrive in time, if its body does not, or if its client does not read
an answer. What cannot be parsed gets an answer in the same shape as every other error.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from quire.server.errors import HttpError, error_body
from quire.server.state import new_request_id

MIN_PROGRESS_BYTES = 4096


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds of one connection. Sizes in bytes, times in seconds.

    Args:
        max_header_bytes: request line, names and values of one request.
        header_seconds: from the connection, or the request's first byte, to the end of its headers.
        body_seconds: from there to the end of the body, whether or not anybody waits for it.
        stalled_write_seconds: in which a client whose answer waits to be sent must take MIN_PROGRESS_BYTES of it.
    """

    max_header_bytes: int = 65536
    max_headers: int = 100
    header_seconds: float = 20.0
    body_seconds: float = 75.0
    stalled_write_seconds: float = 60.0


class GuardedProtocol(HttpToolsProtocol):
    """One connection. `guarded_protocol` makes a class with other limits."""

    limits = ConnectionLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0  # of complete headers; 0: no headers are being read
        self._num_unparsed_bytes = 0  # that came since the chunk in which the headers began
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_timer()
        self._stop_writing_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        is_continued = self._num_header_bytes > 0
        super().data_received(data)
        if is_continued and self._num_header_bytes > 0:
            # The parser keeps a header to itself until it is complete: one without end must not grow there.
            self._num_unparsed_bytes += len(data)
            if self._num_unparsed_bytes > self.limits.max_header_bytes:
                self._refuse_headers(f"at most {self.limits.max_header_bytes} bytes")

    def _await_headers(self) -> None:
        self._stop_reading_timer()
        self._read_timer = self.loop.call_later(self.limits.header_seconds, self._on_slow_headers)

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _stop_writing_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _on_slow_headers(self) -> None:
        if self._num_header_bytes == 0:  # nothing was asked: a connection opened in advance
            self.transport.close()
        else:
            self._refuse(
                HttpError(
                    408,
                    "headers_timeout",
                    f"The headers did not arrive within {self.limits.header_seconds:g} seconds",
                )
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes, self._num_unparsed_bytes = 1, 0
        self._await_headers()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_header_bytes(len(name) + len(value))
        if len(self.headers) > self.limits.max_headers:
            self._refuse_headers(f"at most {self.limits.max_headers} headers")

    def _count_header_bytes(self, count: int) -> None:
        self._num_header_bytes += count
        if self._num_header_bytes > self.limits.max_header_bytes:
            self._refuse_headers(f"at most {self.limits.max_header_bytes} bytes")

    def _refuse_headers(self, expected: str) -> None:
        self._refuse(HttpError(431, "headers_too_large", "The request's headers are too large", expected=expected))

    def on_headers_complete(self) -> None:
        if self._is_refused:
            return
        self._num_header_bytes = 0
        self._stop_reading_timer()
        self._await_body()
        super().on_headers_complete()

    def _await_body(self) -> None:
        self._read_timer = self.loop.call_later(self.limits.body_seconds, self._on_slow_body)

    def _on_slow_body(self) -> None:
        if self.flow.read_paused:  # we do not let it come: the answer before it is not complete
            self._await_body()
        else:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_reading_timer()
        if not self._is_refused:
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._stop_writing_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_reader()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._await_reader()

    def _await_reader(self) -> None:
        """End the connection if its client stops reading what is buffered for it."""
        self._stop_writing_timer()
        if waiting := self.transport.get_write_buffer_size():
            self._write_timer = self.loop.call_later(self.limits.stalled_write_seconds, self._check_reader, waiting)

    def _check_reader(self, waiting: int) -> None:
        if self.transport.get_write_buffer_size() > waiting - MIN_PROGRESS_BYTES:
            self.transport.abort()
        else:
            self._await_reader()

    def send_400_response(self, msg: str) -> None:
        """What httptools cannot parse, an unknown method for one."""
        self._refuse(
            HttpError(
                400,
                "bad_http",
                "This is not a request in HTTP/1.1",
                fix="Check the method, the headers, and that the address begins with http:// and not https://",
            )
        )

    def _refuse(self, error: HttpError) -> None:
        """Answer, unless an answer is on its way, and end the connection."""
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_reading_timer()
        if self.cycle is None or self.cycle.response_complete:
            body = error_body(error)
            head = [
                STATUS_LINE[error.http_status],
                b"content-type: application/json\r\n",
                b"content-length: %d\r\n" % len(body),
                b"x-request-id: %s\r\n" % new_request_id().encode(),
                b"connection: close\r\n\r\n",
            ]
            self.transport.write(b"".join(head) + body)
        self._await_reader()
        self.transport.close()


def guarded_protocol(limits: ConnectionLimits) -> type[GuardedProtocol]:
    """For uvicorn.Config's `http`: it makes one object of the class per connection, without our arguments."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits})
