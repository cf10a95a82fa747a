"""Notices that another machine is lost, or the network to it. No torch.

A cut network is silent: no packet says that a connection has ended. So two machines have a connection on which both
send beats. The system of a machine acknowledges them, however busy its processes are, and even if they are stopped. If
it does not, then the machine or the network is lost.

The connection carries nothing else. If the reader of much data is busy, its system has no room for more, and does not
acknowledge it either. Beats that a stopped process does not read would fill it too. So a machine from which no beat has
come for long gets none until it beats again. Meanwhile the system's keepalive looks for it.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from quire.distributed import wire

BEAT_SECONDS = 0.15
LOST_SECONDS = 1.5  # a machine that acknowledges nothing for so long is lost
# So many looks must find nothing acknowledged. After a pause of this machine as a whole, the first look proves nothing.
LEAST_LOOKS = 5
MOST_UNHEARD = 1000  # beats, while the other machine sends none. A system has room for several thousand.
_SILENCES = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_BEAT = b""


class SilenceError(TimeoutError):
    """The other machine has acknowledged nothing for LOST_SECONDS."""

    def __init__(self) -> None:
        super().__init__(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


class Pulse:
    """One end of a connection that carries beats, and now and then a short message.

    A lost machine is noticed at most LOST_SECONDS + 2 x BEAT_SECONDS after its loss. An interruption of half a
    second is survived: the system sends a beat again after 0.2 and 0.6 seconds, and the next time, after 1.4 seconds,
    may be too late. Only Linux says what was acknowledged. Other systems send no beats, and notice a loss after some
    seconds (`wire.KEEPALIVE_PROBES`). So does a machine that was stopped for minutes, or whose peer was.

    Args:
        peer: the connection, which is authenticated already. `close` closes it.
        on_end: called by a thread with the error with which the connection has ended, unless `close` has ended it. See
            is_silence.
        on_message: called by a thread with each message.
    """

    def __init__(
        self,
        peer: socket.socket,
        on_end: Callable[[Exception], None],
        on_message: Callable[[bytes], None] = lambda message: None,
    ) -> None:
        self._peer, self._on_end, self._on_message = peer, on_end, on_message
        self._sending, self._is_over = threading.Lock(), threading.Event()
        self._num_sent = 0  # bytes
        self._num_unheard = 0  # beats since the last one from the other machine
        self._is_closing = self._is_silent = False
        tasks = (self._listen, self._beat) if sys.platform == "linux" else (self._listen,)
        self._threads = [threading.Thread(target=task, name="pulse", daemon=True) for task in tasks]
        for thread in self._threads:
            thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended, and `on_end` was called."""
        return self._is_over.is_set()

    def wait(self, seconds: float) -> None:
        """Wait until the connection has ended and `on_end` was called, at most for this time."""
        self._is_over.wait(seconds)

    def say(self, message: bytes) -> None:
        """Send a message. Raises OSError."""
        with self._sending:
            wire.send(self._peer, message)
            self._num_sent += wire.HEADER_BYTES + len(message)

    def end(self) -> None:
        """End the connection."""
        wire.end(self._peer)

    def close(self) -> None:
        """End the connection, and free it. `on_end` is not called for it."""
        self._is_closing = True
        self.end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._peer.close()

    def _beat(self) -> None:
        heard_until, num_looks, num_acknowledged = time.monotonic(), 0, 0
        with suppress(OSError):
            while not self._is_over.wait(BEAT_SECONDS):
                before, num_waiting = num_acknowledged, wire.num_unacknowledged(self._peer)
                num_acknowledged, num_looks = self._num_sent - num_waiting, num_looks + 1
                if num_waiting == 0 or num_acknowledged != before:
                    heard_until, num_looks = time.monotonic(), 0
                elif num_looks >= LEAST_LOOKS and time.monotonic() - heard_until >= LOST_SECONDS:
                    self._is_silent = True
                    self.end()
                    return
                if self._num_unheard < MOST_UNHEARD:
                    self._num_unheard += 1
                    self.say(_BEAT)

    def _listen(self) -> None:
        try:
            while True:
                message = wire.receive(self._peer)
                self._num_unheard = 0
                if message != _BEAT:
                    self._on_message(message)
        except (OSError, wire.WireError) as error:
            if not self._is_closing:
                self._on_end(SilenceError() if self._is_silent else error)
        finally:
            self._is_over.set()


def is_silence(error: Exception) -> bool:
    """Whether the machine at the other end of a pulse has stopped to answer, and has not ended the connection."""
    return getattr(error, "errno", None) in _SILENCES


def why(error: Exception) -> str:
    """The reason for the end of a pulse, as text for people."""
    if not is_silence(error):
        return str(error)
    silent = f"has not answered for {LOST_SECONDS:g} s" if isinstance(error, SilenceError) else "does not answer"
    return f"its machine {silent}: it is down, or the network to it is cut"
