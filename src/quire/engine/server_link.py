"""The link from an engine process to its server: Unix sockets of the machine, or a connection from another one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Protocol

import zmq

from quire.distributed import wire
from quire.distributed.pulse import Pulse, is_silence, why
from quire.logs import get_logger
from quire.messages import ServerAddress, UnixSockets

LINGER_SECONDS = 2.0  # the time in which the last messages are sent
LOOK_SECONDS = 0.0005  # the time between two checks whether a frame has arrived
CONNECT_SECONDS = 30.0  # the server listens before it starts an engine

logger = get_logger(__name__)


class ServerLink(Protocol):
    """Messages from and to the server as frames, in order. One thread uses it."""

    def wait(self, seconds: float) -> bool:
        """Whether a frame is there, or comes in time."""
        ...

    def take(self) -> bytes | None:
        """The next frame, if it is there."""
        ...

    def receive(self) -> bytes:
        """The next frame."""
        ...

    def send(self, frame: bytes) -> None:
        """It leaves at once, or as soon as the server takes it."""
        ...

    def deliver(self, frame: bytes) -> None:
        """Like `send`, but when it returns, the frame has left: it arrives even if this process ends at once.

        It may overtake frames that were sent before. A frame that the server has not taken within two seconds, because
        it is stopped or the network is slow, is not waited for any longer. Over TCP the system must have room for the
        frame first. That wait is the one of `send`: it ends when the server reads, or is gone.
        """
        ...

    @contextmanager
    def beats(self) -> Iterator[Callable[[bytes], None]]:
        """A `send` for another thread. It drops frames that the server cannot take while other frames wait."""
        ...

    def close(self) -> None:
        """Sent frames still leave within two seconds."""
        ...


class UnixLink:
    """Two ZMQ sockets, which the server has bound."""

    def __init__(self, sockets: UnixSockets) -> None:
        self._context, self._address = zmq.Context(), sockets.output_address
        self._inputs = self._context.socket(zmq.PULL)
        self._inputs.connect(sockets.input_address)
        self._outputs = self._context.socket(zmq.PUSH)
        self._outputs.setsockopt(zmq.LINGER, int(1000 * LINGER_SECONDS))
        self._outputs.connect(sockets.output_address)

    def wait(self, seconds: float) -> bool:
        return bool(self._inputs.poll(int(1000 * seconds)))

    def take(self) -> bytes | None:
        try:
            return self._inputs.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def receive(self) -> bytes:
        return self._inputs.recv()

    def send(self, frame: bytes) -> None:
        self._outputs.send(frame)

    def deliver(self, frame: bytes) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as own:  # its end waits for the frame
            own.setsockopt(zmq.LINGER, int(1000 * LINGER_SECONDS))
            own.connect(self._address)
            own.send(frame)

    @contextmanager
    def beats(self) -> Iterator[Callable[[bytes], None]]:
        with self._context.socket(zmq.PUSH) as own:  # sockets are not shared between threads
            own.setsockopt(zmq.LINGER, 0)
            own.connect(self._address)

            def send(frame: bytes) -> None:
                with suppress(zmq.Again):  # the server has not read a thousand of them, so it is stopped
                    own.send(frame, zmq.NOBLOCK)

            yield send

    def close(self) -> None:
        self._inputs.close(0)
        self._outputs.close()
        self._context.term()


class TcpLink:
    """A connection to a server that knows the cluster key, and one for a pulse. Raises OSError and WireError.

    Args:
        on_end: called by a thread when the server or its machine is gone, or the server sends an illegal message.
    """

    def __init__(self, server: ServerAddress, on_end: Callable[[], None]) -> None:
        until, key = time.monotonic() + CONNECT_SECONDS, wire.cluster_key()
        self._peer = wire.connect(server.address, server.port, key, until)
        try:
            pulse = wire.connect(server.address, server.port, key, until)
        except BaseException:
            self._peer.close()
            raise
        self._pulse = Pulse(pulse, self._on_pulse_end)
        self._arrived, self._sending = SimpleQueue[bytes](), threading.Lock()
        self._next: bytes | None = None
        self._on_end, self._is_closed = on_end, False
        self._reader = threading.Thread(target=self._read, name="server", daemon=True)
        self._reader.start()

    def _on_pulse_end(self, error: Exception) -> None:
        """If only the server has ended, the other connection ends too."""
        if is_silence(error):
            logger.error("the server is lost: %s", why(error))
            wire.end(self._peer)

    def _read(self) -> None:
        try:
            while True:
                self._arrived.put(wire.receive(self._peer, wire.MOST_MESSAGE_BYTES))
        except (OSError, wire.WireError) as error:
            if not self._is_closed:
                logger.info("the server has left: %s", error)
                self._on_end()

    def wait(self, seconds: float) -> bool:
        if self._next is None:
            with suppress(Empty):
                self._next = self._arrived.get(timeout=seconds)
        return self._next is not None

    def take(self) -> bytes | None:
        if not self.wait(0.0):
            return None
        frame, self._next = self._next, None
        return frame

    def receive(self) -> bytes:
        frame = self.take()
        return self._arrived.get() if frame is None else frame

    def send(self, frame: bytes) -> None:
        with self._sending, suppress(OSError):  # the thread that reads notices the end
            wire.send(self._peer, frame)

    def deliver(self, frame: bytes) -> None:
        self.send(frame)
        until = time.monotonic() + LINGER_SECONDS
        # If this process ends and has not read everything, its system resets the connection, and drops what is left.
        while wire.num_unacknowledged(self._peer) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)

    @contextmanager
    def beats(self) -> Iterator[Callable[[bytes], None]]:
        def send(frame: bytes) -> None:
            if self._sending.acquire(blocking=False):
                with suppress(OSError):
                    wire.send(self._peer, frame)
                self._sending.release()

        yield send

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_WR)  # after everything that was sent
        self._reader.join(LINGER_SECONDS)  # until the server has read all, and closes
        self._pulse.close()
        wire.end(self._peer)
        self._reader.join()
        self._peer.close()
