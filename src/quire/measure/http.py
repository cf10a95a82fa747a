"""A small HTTP/1.1 client for streamed completions. It reuses connections, and events carry their arrival time."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from urllib.parse import urlsplit

from quire.errors import QuireError

READ_BYTES = 1 << 16


class HttpError(QuireError):
    """The server answered with an error status, or with bytes that are not HTTP."""

    code, status = "server_error", 502


class Body:
    """Parses the bytes of a response body, chunked or of a known length."""

    def __init__(self, head: bytes) -> None:
        lines = head.lower().split(b"\r\n")
        headers = dict(line.split(b":", 1) for line in lines[1:] if b":" in line)
        self.status = int(head.split(b" ", 2)[1])
        self.is_chunked = b"chunked" in headers.get(b"transfer-encoding", b"")
        length = headers.get(b"content-length")
        self.keeps_open = b"close" not in headers.get(b"connection", b"") and (self.is_chunked or length is not None)
        self._left = 0 if self.is_chunked else (int(length) if length is not None else -1)  # -1: until the end
        self._buffer = bytearray()
        self.is_done = not self.is_chunked and self._left == 0

    def feed(self, data: bytes) -> bytes:
        """The content in the next bytes of the connection."""
        if not self.is_chunked:
            if self._left >= 0:
                data = data[: self._left]
                self._left -= len(data)
                self.is_done = self._left == 0
            return data
        self._buffer += data
        parts = []
        while not self.is_done:
            line_end = self._buffer.find(b"\r\n")
            if line_end < 0:
                break
            size = int(self._buffer[:line_end].split(b";")[0], 16)
            if len(self._buffer) < line_end + 2 + size + 2:
                break
            parts.append(bytes(self._buffer[line_end + 2 : line_end + 2 + size]))
            del self._buffer[: line_end + 2 + size + 2]
            self.is_done = size == 0
        return b"".join(parts)


class HttpClient:
    """Connections to one server. Close it at the end.

    Args:
        url: scheme, host and port.
        headers: sent with each request.
        insecure: whether certificates are not checked.
    """

    def __init__(self, url: str, headers: dict[str, str] | None = None, *, insecure: bool = False) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._ssl = None
        if parts.scheme == "https":
            self._ssl = ssl._create_unverified_context() if insecure else ssl.create_default_context()
        lines = {"host": parts.netloc, "content-type": "application/json"} | (headers or {})
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The whole content of an answer.

        Raises HttpError if the status is not 200, and OSError if there is no connection.
        """
        return b"".join([data async for _, data in self._content(method, path, body)])

    async def events(self, path: str, body: bytes) -> AsyncIterator[tuple[float, bytes]]:
        """For each server-sent event, the arrival time of its end (time.perf_counter, in seconds) and its data.

        Raises as `request` does.
        """
        buffer = b""
        async for now, data in self._content("POST", path, body):
            *events, buffer = (buffer + data).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                if event.startswith(b"data:"):
                    yield now, event[5:].strip()

    async def _content(self, method: str, path: str, body: bytes) -> AsyncIterator[tuple[float, bytes]]:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode() + self._head
        request = head + b"content-length: %d\r\n\r\n" % len(body) + body
        reader, writer, first = await self._send(request)
        is_reusable = False
        try:
            answer = Body(first)
            if answer.status != 200:
                raise HttpError(f"HTTP {answer.status}: {(await _rest(reader, answer)).decode(errors='replace')[:300]}")
            while not answer.is_done:
                data = await reader.read(READ_BYTES)
                now = time.perf_counter()
                if not data:
                    if answer.is_chunked:
                        raise HttpError("The connection ended before the answer was complete")
                    break
                if content := answer.feed(data):
                    yield now, content
            is_reusable = answer.keeps_open and answer.is_done
        finally:
            if is_reusable:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _send(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        """Send on an idle connection, or on a new one if the server has closed it.

        Returns the connection (reader and writer) and the head of the answer.
        """
        while self._idle:
            reader, writer = self._idle.pop()
            with suppress(OSError, asyncio.IncompleteReadError):
                writer.write(request)
                return reader, writer, await reader.readuntil(b"\r\n\r\n")
            writer.close()
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=1 << 20)
        try:
            writer.write(request)
            return reader, writer, await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            writer.close()
            raise HttpError("The server closed the connection without an answer") from None
        except BaseException:
            writer.close()
            raise

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


async def _rest(reader: asyncio.StreamReader, answer: Body) -> bytes:
    content = b""
    while not answer.is_done and (data := await reader.read(READ_BYTES)):
        content += answer.feed(data)
    return content
