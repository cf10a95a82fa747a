"""HTTP/1.1 connections: uvicorn's, with limits on header size and count and on how slow a client may be.

A connection is ended if a request's headers do not arrive in time, if its body does not, or if its client does not read
an answer. Unreadable requests get an answer in the same shape as every other error. The server never resets a
connection: a reset would destroy an answer that the client has not read yet.
"""

from __future__ import annotations

import asyncio
import select
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import is_ssl

from quire.logs import RateLimited, get_logger
from quire.server.errors import HttpError, error_body
from quire.server.state import new_request_id

MIN_PROGRESS_BYTES = 4096
ANSWER_PREFIX = b"HTTP/1.1 "  # every answer begins with it
FIRST_LOOK_SECONDS, MAX_LOOK_SECONDS = 0.02, 5.0  # seconds between checks whether a half-closed client is there

logger = get_logger(__name__)
_malformed_log = RateLimited(logger)


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of one connection. Sizes are in bytes, times in seconds.

    Args:
        max_header_bytes: the most bytes of a request's first line and of the names and values of its headers.
        header_seconds: the time from the connection, or from the first byte of a request, to the end of its headers.
        body_seconds: the time from there to the end of the body, also if no code waits for the body.
        stalled_write_seconds: if an answer waits to be sent, the client must take MIN_PROGRESS_BYTES in this time.
        max_unread_bytes: if an answer is complete before its request's body was read, the most bytes of the rest.
        linger_seconds: the time in which a client should close a connection after we have closed our side.
        max_linger_bytes: the most bytes that the client may send in this time.
    """

    max_header_bytes: int = 65536
    max_headers: int = 100
    header_seconds: float = 20.0
    body_seconds: float = 75.0
    stalled_write_seconds: float = 60.0
    max_unread_bytes: int = 32 << 20
    linger_seconds: float = 2.0
    max_linger_bytes: int = 4 << 20


class _Connection:
    """The transport of the protocol. `close` never resets a connection, and a client can be asked if it is there.

    If a socket is closed while it has unread bytes, the system resets the connection. So our side is closed first. Then
    later bytes are read until the client has closed its side, or until a time limit.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, linger_seconds: float) -> None:
        self._transport, self._loop, self._linger_seconds = transport, loop, linger_seconds
        self._is_ending = False
        self._has_eof = False  # the client has closed its sending side
        self._unasked = b""  # the bytes of ANSWER_PREFIX that are left to test a silent client
        self._num_early_bytes = 0  # the bytes of the answer that were sent before it
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._is_ending or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if self._is_ending:  # an answer that was given up, whose task does not know yet
            return
        self._transport.write(data[self._num_early_bytes :])
        self._num_early_bytes, self._unasked = 0, b""

    def close(self) -> None:
        if self.is_closing():
            return
        if self._has_eof or not self._transport.can_write_eof():  # TLS has a good-bye of its own
            self._transport.close()
            return
        self._is_ending = True
        self._transport.resume_reading()
        self._transport.write_eof()
        self._linger()

    def _linger(self) -> None:
        """Wait until all bytes are sent, and then linger. Other code notices clients that do not read."""
        self._timer = self._loop.call_later(self._linger_seconds, self._on_lingered)

    def _on_lingered(self) -> None:
        if self._transport.get_write_buffer_size():
            self._linger()
        else:
            self._transport.close()

    def on_lost(self) -> None:
        """Note that the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()

    def await_departure(self, *, is_silent: bool) -> None:
        """End the connection if its client has left. The client has closed its sending side.

        A client that still waits for its answer may have done the same. Only the client's system knows the difference:
        it refuses a byte if no program receives it. So bytes are sent as a test. If the answer has not begun
        (`is_silent`), these bytes are the beginning of the answer.
        """
        self._has_eof = True
        self._unasked = ANSWER_PREFIX if is_silent else b""
        self._look(FIRST_LOOK_SECONDS)

    def _look(self, seconds: float) -> None:
        if self._transport.is_closing():
            return
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), 0)
        if poll.poll(0):  # an error or a hang-up: nothing else was asked for
            self._transport.abort()
            return
        if self._unasked:
            self._transport.write(self._unasked[:1])
            self._unasked = self._unasked[1:]
            self._num_early_bytes += 1
        self._timer = self._loop.call_later(seconds, self._look, min(2 * seconds, MAX_LOOK_SECONDS))


class GuardedProtocol(HttpToolsProtocol):
    """One connection. `guarded_protocol` makes a class with other limits."""

    limits = ConnectionLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0  # the bytes of complete headers; 0: no headers are being read
        self._num_unparsed_bytes = 0  # bytes since the chunk in which the headers began
        self._num_unread_bytes = 0  # the unread bytes of a body whose answer is complete
        self._num_lingering_bytes = 0  # bytes that came after our side was closed
        self._unanswered: list[RequestResponseCycle] = []  # the request that is answered now, and the later ones
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connection = _Connection(transport, self.loop, self.limits.linger_seconds)
        super().connection_made(self._connection)  # type: ignore[arg-type]
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.on_lost()
        self._stop_reading_timer()
        self._stop_writing_timer()
        for cycle in self._unanswered:  # uvicorn tells only the last one
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Make the present answer the last one. Otherwise uvicorn would go on to later requests of the connection."""
        for cycle in self._unanswered:
            cycle.keep_alive = False
        super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self._num_lingering_bytes += len(data)
            if self._num_lingering_bytes > self.limits.max_linger_bytes:
                self.transport.abort()
            return
        if self._is_refused:
            return
        is_continued = self._num_header_bytes > 0
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the server has no other protocol, so it answers the request as if there were no upgrade
        except httptools.HttpParserError:
            self._refuse_malformed()
        if is_continued and self._num_header_bytes > 0:
            # The parser keeps a header to itself until it is complete: one without end must not grow there.
            self._num_unparsed_bytes += len(data)
            if self._num_unparsed_bytes > self.limits.max_header_bytes:
                self._refuse_headers(f"at most {self.limits.max_header_bytes} bytes")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open. It stays if an answer is due: the client may have closed only its sending
        side.
        """
        cycle = self.cycle
        is_due = cycle is not None and not cycle.response_complete and not cycle.more_body
        if not is_due or self.transport.is_closing() or is_ssl(self.transport):
            return False
        cycle.keep_alive = False
        is_silent = not self.pipeline and not cycle.response_started
        self._connection.await_departure(is_silent=is_silent)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether the client has got its answer to a request, and has sent no further request."""
        return self.cycle is not None and self.cycle.response_complete and self._num_header_bytes == 0

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
        if self._num_header_bytes == 0:  # there was no request: the client opened the connection in advance
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
        self._num_header_bytes = self._num_unread_bytes = 0
        self._stop_reading_timer()
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            self._refuse_malformed()
            return
        self._await_body()
        super().on_headers_complete()
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete] + [self.cycle]

    def _await_body(self) -> None:
        self._read_timer = self.loop.call_later(self.limits.body_seconds, self._on_slow_body)

    def _on_slow_body(self) -> None:
        if self.flow.read_paused:  # the parser is paused: the answer before it is not complete
            self._await_body()
        else:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        super().on_body(body)
        if self.cycle.response_complete:
            self._num_unread_bytes += len(body)
            if self._num_unread_bytes > self.limits.max_unread_bytes:
                self.transport.close()

    def on_message_complete(self) -> None:
        self._stop_reading_timer()
        if self._is_refused:
            return
        super().on_message_complete()
        if self.cycle.response_complete:  # before its request was: from now on the connection may be used again
            self._await_headers()

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
        """End the connection if its client stops reading the bytes that are buffered for it."""
        self._stop_writing_timer()
        if waiting := self.transport.get_write_buffer_size():
            self._write_timer = self.loop.call_later(self.limits.stalled_write_seconds, self._check_reader, waiting)

    def _check_reader(self, waiting: int) -> None:
        if self.transport.get_write_buffer_size() > waiting - MIN_PROGRESS_BYTES:
            self.transport.abort()
        else:
            self._await_reader()

    def _refuse_malformed(self) -> None:
        """Refuse requests that httptools cannot parse: an unknown method, or a transfer coding that is not chunked."""
        _malformed_log.warning("a request that is not HTTP/1.1 was refused")
        self._refuse(
            HttpError(
                400,
                "bad_http",
                "This is not a request in HTTP/1.1",
                fix="Check the method, the headers, the chunks, and that the address begins with http:// and not "
                "https://",
            )
        )

    def _refuse(self, error: HttpError) -> None:
        """Answer with an error, unless an answer is being sent, and end the connection."""
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_reading_timer()
        if self.pipeline and self.cycle.more_body:  # it has not begun to run, and must not begin
            self.pipeline.popleft()
            self._unanswered.pop()
            self.cycle = self._unanswered[-1]
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._write_error(error)
        elif not cycle.more_body:  # an earlier request gets its answer first
            cycle.keep_alive = False
            return
        elif not cycle.response_started:
            self._write_error(error)
            cycle.disconnected = True  # it must not answer too
            cycle.message_event.set()
        self._await_reader()
        self.transport.close()

    def _write_error(self, error: HttpError) -> None:
        body = error_body(error)
        head = [
            STATUS_LINE[error.http_status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"x-request-id: %s\r\n" % new_request_id().encode(),
            b"connection: close\r\n\r\n",
        ]
        self.transport.write(b"".join(head) + body)


def guarded_protocol(limits: ConnectionLimits) -> type[GuardedProtocol]:
    """A class for uvicorn.Config's `http`. uvicorn makes one object for each connection, without our arguments."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits})
