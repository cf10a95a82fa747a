"""The link from the front end to an engine process: Unix sockets, or a TCP connection from another machine."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import zmq
import zmq.asyncio

from quire.distributed import wire
from quire.distributed.pulse import Pulse, is_silence, why
from quire.logs import get_logger
from quire.messages import UnixSockets

WAKE = b"wake"  # no frame: `end` wakes a `receive` that waits
RETRY_SECONDS = 0.005  # seconds between two attempts to send before the engine has connected
CLOSE_LINGER_MS = 1000  # the time in which the last frames are sent
LOOK_SECONDS = 0.25  # seconds between two checks whether an engine is still awaited

logger = get_logger(__name__)


class LinkEndedError(Exception):
    """No frame follows. Its text says why, if that is known and is no end of a process."""


class EngineLink(Protocol):
    """Messages to and from an engine process as frames, in order. One event loop uses it."""

    def send(self, frame: bytes) -> None:
        """Queue a frame without waiting. It is sent when `receive` runs and the engine has connected."""
        ...

    async def receive(self) -> bytes:
        """The next frame. Raises LinkEndedError."""
        ...

    def end(self) -> None:
        """Give the engine up. Frames that have come are still received; then `receive` raises LinkEndedError."""
        ...

    def close(self) -> None:
        """Free the connection. Sent frames still leave within a second, unless `end` was called."""
        ...


class UnixLink:
    """Two ZMQ sockets, bound here."""

    def __init__(self, sockets: UnixSockets) -> None:
        self._output_address = sockets.output_address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._input = self._context.socket(zmq.PUSH)
        self._input.set_hwm(0)
        self._input.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
        self._output = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.PULL)
        self._output.set_hwm(0)
        self._input.bind(sockets.input_address)
        self._output.bind(sockets.output_address)
        self._unsent: deque[bytes] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._has_ended = False

    def send(self, frame: bytes) -> None:
        self._unsent.append(frame)
        if self._retry is None:
            self._flush()

    def _flush(self) -> None:
        """Send queued frames. A bound PUSH socket cannot take one before the engine has connected."""
        self._retry = None
        while self._unsent:
            try:
                self._input.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                with suppress(RuntimeError):  # no loop runs yet, and `receive` tries again
                    self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._flush)
                return
            self._unsent.popleft()

    async def receive(self) -> bytes:
        if self._unsent and self._retry is None:
            self._flush()
        try:
            frame = await self._output.recv(zmq.NOBLOCK if self._has_ended else 0)
            while frame == WAKE:  # frames that the engine sent before its end may follow it
                frame = await self._output.recv(zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise LinkEndedError from error
        return frame

    def end(self) -> None:
        self._has_ended = True
        self._input.setsockopt(zmq.LINGER, 0)
        with self._context.socket(zmq.PUSH) as waker:
            waker.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
            waker.connect(self._output_address)
            waker.send(WAKE)

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._has_ended = True
        self._output.close(0)
        self._input.close()
        self._context.term()


class TcpLink:
    """The connection of one engine that knows the cluster key, and one for a pulse. Others are dropped, and logged.

    Args:
        listener: the socket that the engine connects to; the link owns it.
    """

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._has_ended = threading.Event()
        self._is_opening = False
        self._why = ""
        self._peer: socket.socket | None = None
        self._pulse: Pulse | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._unsent: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self._unsent.append(frame)
        self._flush()

    def _flush(self) -> None:
        if self._streams is not None:
            for frame in self._unsent:
                self._streams[1].writelines((wire.header(frame), frame))
            self._unsent.clear()

    async def receive(self) -> bytes:
        try:
            reader = self._streams[0] if self._streams is not None else await self._open()
            length = wire.length_of(await reader.readexactly(wire.HEADER_BYTES), wire.MOST_MESSAGE_BYTES)
            return await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError, wire.WireError) as error:
            if isinstance(error, wire.WireError):
                logger.warning("an engine is dropped: %s", error)
            raise LinkEndedError(self._why) from error

    async def _open(self) -> asyncio.StreamReader:
        self._is_opening = True
        # Not asyncio's threads, which are few: an engine may be awaited for a minute.
        accepting = ThreadPoolExecutor(1, thread_name_prefix="engine link")
        peers = asyncio.get_running_loop().run_in_executor(accepting, self._accept_both)
        accepting.shutdown(wait=False)
        self._peer, pulse = await peers
        self._address = self._peer.getpeername()[0]
        self._pulse = Pulse(pulse, self._on_pulse_end)
        if self._has_ended.is_set():  # the link may have ended meanwhile
            wire.end(self._peer)
        self._streams = await asyncio.open_connection(sock=self._peer)
        self._flush()
        return self._streams[0]

    def _accept_both(self) -> tuple[socket.socket, socket.socket]:
        with self._listener:
            peer = self._accept()
            try:
                return peer, self._accept()
            except BaseException:
                peer.close()
                raise

    def _accept(self) -> socket.socket:
        while not self._has_ended.is_set():
            with suppress(TimeoutError):
                peer = wire.accept(self._listener, self._key, time.monotonic() + LOOK_SECONDS)
                if not self._has_ended.is_set():
                    return peer
                peer.close()
        raise ConnectionAbortedError("the engine is not awaited any more")

    def _on_pulse_end(self, error: Exception) -> None:
        """If only the engine has ended, the other connection ends too, behind its last frames."""
        if is_silence(error):
            self._why = f"The engine at {self._address} is lost: {why(error)}"
            self.end()

    def end(self) -> None:
        self._has_ended.set()
        if self._peer is not None:
            wire.end(self._peer)  # frames that have already come can still be read

    def close(self) -> None:
        has_ended = self._has_ended.is_set()
        self._has_ended.set()
        if not self._is_opening:
            self._listener.close()
        if self._pulse is not None:
            self._pulse.close()
        if self._streams is not None:
            transport = self._streams[1].transport
            (transport.abort if has_ended else transport.close)()
        elif self._peer is not None:
            self._peer.close()
