"""Reads parts of an object by its signed URL, from the socket straight into memory, without the client library.

With TLS, Python reads at most 16 KiB at a time, and releases its interpreter's lock each time. Many threads would
compete for the lock. So only a few threads read at the same time, and only if their bytes have come
(benchmarks/NOTES.md).

This is only the faster way. It stops at any unexpected answer, and its caller reads the rest with the client library,
which repeats requests and names errors. No torch.
"""

from __future__ import annotations

import io
import logging
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import SplitResult, urlsplit

import numpy as np
from numpy.typing import NDArray

SIGNED_SECONDS = 900.0  # a URL is valid for so long, as a signed request is for S3. It is renewed after half of it
WAIT_SECONDS = 5.0  # how long to wait for a connection, and for more bytes
PART_SECONDS = 30.0  # how long to wait for a whole part, as in the client library
NUM_TURNS = 2  # threads that read at once
MAX_FAILURES = 32  # failures in a row: twice the number of readers, which may all fail when a URL ends

logger = logging.getLogger(__name__)


class SignedReads:
    """Connections that read parts of one version of an object. Threads may share it.

    Args:
        sign: gives an http:// or https:// URL that is valid for this many seconds; raises if that is not possible.
        size: the size of the object, in bytes.
        etag: the etag of the version, as an HTTP header has it; None: the store gives none.
    """

    def __init__(self, sign: Callable[[float], str], size: int, etag: str | None) -> None:
        self._sign, self._size, self._etag = sign, size, etag
        self._lock = threading.Lock()
        self._url: SplitResult | None = None
        self._valid_until = 0.0
        self._failures = 0  # failures in a row
        self._idle: list[HTTPConnection] | None = []  # None: closed
        self._turns = threading.Semaphore(NUM_TURNS)
        self._tls: ssl.SSLContext | None = None

    def fill(self, buffers: Sequence[NDArray[np.uint8]], begin: int) -> int:
        """Fill buffers, one after the other, with the bytes from `begin` on. No buffer is empty.

        Returns:
            The number of bytes that came. If it is less than all, this way does not work, or not now. The rest of the
            buffers is not defined.
        """
        url = self._current_url() if buffers else None
        if url is None:
            return 0
        connection, body = self._connection(url), _Body(buffers)
        try:
            answer, source = self._ask(connection, url, begin, begin + sum(map(len, buffers)))
            body.read(answer, source, self._turns)
        except (OSError, HTTPException, ValueError) as error:
            connection.close()
            self._failed(url, error)
        else:
            self._give_back(connection)
        return body.came

    def close(self) -> None:
        """End all connections: now, or when their part has come."""
        with self._lock:
            idle, self._idle = self._idle or [], None
        for each in idle:
            each.close()

    def _current_url(self) -> SplitResult | None:
        """The URL that is valid now; None: this way is given up."""
        with self._lock:
            if self._failures >= MAX_FAILURES:
                return None
            if self._url is None or time.monotonic() > self._valid_until:
                try:
                    self._url = urlsplit(self._sign(SIGNED_SECONDS))
                    _ = self._url.port  # ValueError: none
                    if self._url.scheme not in ("http", "https"):
                        raise ValueError("of another scheme")
                    if self._url.scheme == "https" and self._tls is None:
                        self._tls = ssl.create_default_context()
                except Exception as error:  # the library has errors of its own, and this is no error of a user
                    self._failures = MAX_FAILURES
                    logger.debug("Read with the client library alone: no URL is signed (%s)", type(error).__name__)
                    return None
                self._valid_until = time.monotonic() + SIGNED_SECONDS / 2
            return self._url

    def _connection(self, url: SplitResult) -> HTTPConnection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        assert url.hostname is not None
        if url.scheme == "https":
            return HTTPSConnection(url.hostname, url.port, timeout=WAIT_SECONDS, context=self._tls)
        return HTTPConnection(url.hostname, url.port, timeout=WAIT_SECONDS)

    def _ask(
        self, connection: HTTPConnection, url: SplitResult, begin: int, end: int
    ) -> tuple[HTTPResponse, socket.socket]:
        """Send a request, and read the headers of the answer. Returns the answer and the source of its body.

        Raises HTTPException if the answer has another status or another length.
        """
        headers = {"Range": f"bytes={begin}-{end - 1}"} | ({} if self._etag is None else {"If-Match": self._etag})
        connection.request("GET", f"{url.path}?{url.query}", headers=headers)
        source = connection.sock  # the connection forgets its socket if the server closes it after this answer
        answer = connection.getresponse()
        found = (answer.status, answer.length, answer.headers["Content-Range"])
        if found != (206, end - begin, f"bytes {begin}-{end - 1}/{self._size}"):
            raise HTTPException(f"{found} in the answer")
        if self._etag not in (None, answer.headers["ETag"]):
            raise HTTPException("another version in the answer")
        return answer, source

    def _give_back(self, connection: HTTPConnection) -> None:
        with self._lock:
            self._failures = 0
            if self._idle is not None:
                self._idle.append(connection)
                return
        connection.close()

    def _failed(self, url: SplitResult, error: Exception) -> None:
        """Note a failure. The next part gets a new URL, because this one may no longer be valid."""
        with self._lock:
            self._failures += 1
            if self._url is url:
                self._url = None
            is_last = self._failures == MAX_FAILURES
        if is_last:
            said = f"{type(error).__name__}: {error}".partition("?")[0]  # the text before "?" has no signature
            logger.debug("Read with the client library alone: signed URLs fail (%s)", said)


class _Body:
    """The body of an answer, read into buffers.

    Attributes:
        came: the number of bytes in them.
    """

    def __init__(self, buffers: Sequence[NDArray[np.uint8]]) -> None:
        self.came = 0
        self._free = deque(each.data for each in buffers)

    def read(self, answer: HTTPResponse, source: socket.socket, turns: threading.Semaphore) -> None:
        """Fill the buffers, which have the length of the body. Raises OSError or HTTPException: cut, or too slow."""
        deadline = time.monotonic() + PART_SECONDS
        first = memoryview(answer.read1(io.DEFAULT_BUFFER_SIZE))  # this part may have come with the headers
        while first:
            count = min(len(first), len(self._free[0]))
            self._free[0][:count] = first[:count]
            self._filled(count)
            first = first[count:]
        source.settimeout(0)
        arrival = select.poll()
        arrival.register(source, select.POLLIN)
        while self._free:
            if time.monotonic() > deadline:
                raise TimeoutError("too slow")
            with turns:
                self._take(source)
            if self._free and not arrival.poll(WAIT_SECONDS * 1000):
                raise TimeoutError("nothing came")
        source.settimeout(WAIT_SECONDS)
        answer.close()  # the answer is complete; the connection stays open

    def _take(self, source: socket.socket) -> None:
        """Read the bytes that have come."""
        try:
            while self._free:
                count = source.recv_into(self._free[0], len(self._free[0]))
                if not count:
                    raise HTTPException("the answer was cut")
                self._filled(count)
        except (BlockingIOError, ssl.SSLWantReadError):
            pass

    def _filled(self, count: int) -> None:
        self.came += count
        self._free[0] = self._free[0][count:]
        if not self._free[0]:
            self._free.popleft()
