"""The boundary to the engine: the contract EngineClient, and a real engine process behind ZeroMQ."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from quire.errors import EngineDeadError
from quire.messages import AddRequest, EngineInput, EngineMessage
from quire.sampling_params import SpelledWords

WAKE = b"wake"  # no message: `mark_dead` wakes a `receive` that waits
RETRY_SECONDS = 0.005  # between attempts to send before the engine has connected
LIFE_CHECK_SECONDS = 0.1
CLOSE_LINGER_MS = 1000  # for the last messages (shutdown) to leave


class EngineClient(Protocol):
    """Sends messages to an engine and receives its answers in order. One event loop uses it."""

    @property
    def is_alive(self) -> bool:
        """False if the engine is known to be gone."""
        ...

    def send(self, message: EngineInput) -> None:
        """Queue a message without waiting. Raises EngineDeadError if the engine is gone."""
        ...

    async def receive(self) -> EngineMessage:
        """The next message; EngineProgress and EngineReady come first. Raises EngineDeadError if no message follows."""
        ...

    def mark_dead(self, message: str) -> None:
        """Give the engine up. Its earlier messages are still received; then receive and send raise EngineDeadError.

        Args:
            message: the event, for the user.
        """
        ...

    def close(self) -> None:
        """Free the connection. Earlier messages still leave within a second, unless the engine is gone."""
        ...


class ProcessClient:
    """An engine in another process: msgpack frames over two Unix sockets, bound here.

    Args:
        input_address: for the engine's PULL socket: `ipc://` and a path in a folder of mode 0700.
        output_address: for the engine's PUSH socket.
        is_process_alive: called every LIFE_CHECK_SECONDS while receiving; False counts as `mark_dead`.
        engine_index: the index in the engine's messages.
        first: leaves before every other message, once something is received.
    """

    def __init__(
        self,
        input_address: str,
        output_address: str,
        is_process_alive: Callable[[], bool] = lambda: True,
        engine_index: int = 0,
        first: EngineInput | None = None,
    ) -> None:
        self._output_address, self._engine_index = output_address, engine_index
        self._is_process_alive = is_process_alive
        self._life_check: asyncio.TimerHandle | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._input = self._context.socket(zmq.PUSH)
        self._input.set_hwm(0)
        self._input.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
        self._output = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.PULL)
        self._output.set_hwm(0)
        self._input.bind(input_address)
        self._output.bind(output_address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
        self._words: tuple[SpelledWords | None, Any] = None, None  # the last ones that were sent, and their encoding
        self._unsent: deque[bytes] = deque()
        if first is not None:
            self._unsent.append(self._encode(first))
        self._retry: asyncio.TimerHandle | None = None
        self._death: str | None = None

    @property
    def is_alive(self) -> bool:
        return self._death is None

    def send(self, message: EngineInput) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        self._unsent.append(self._encode(message))
        if self._retry is None:
            self._flush()

    def _encode(self, message: EngineInput) -> bytes:
        """Encode a message. Spellings of bad words may be long: continuations of a request share their encoding."""
        words = message.sampling_params.bad_words_spelled if isinstance(message, AddRequest) else None
        if isinstance(message, AddRequest) and words is not None:
            if words is not self._words[0]:
                self._words = words, msgspec.Raw(self._encoder.encode(words))
            params = copy.copy(message.sampling_params)
            params.bad_words_spelled = self._words[1]
            message = msgspec.structs.replace(message, sampling_params=params)
        return self._encoder.encode(message)

    def _flush(self) -> None:
        """Send queued messages. A bound PUSH socket cannot take a message before the engine has connected."""
        self._retry = None
        while self._unsent:
            try:
                self._input.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._flush)
                return
            self._unsent.popleft()

    async def receive(self) -> EngineMessage:
        if self._life_check is None:
            self._check_life()
            if self._retry is None:
                self._flush()
        try:
            frame = await self._output.recv(0 if self._death is None else zmq.NOBLOCK)
            while frame == WAKE:  # messages that the engine sent before its end may follow it
                frame = await self._output.recv(zmq.NOBLOCK)
            message: EngineMessage = self._decoder.decode(frame)
        except zmq.ZMQError:  # no earlier message of a dead engine is left, or the connection is closed
            raise EngineDeadError(self._death or "The connection to the engine is closed") from None
        except msgspec.MsgspecError as error:
            raise EngineDeadError(f"The engine sent a message that cannot be read: {error}") from error
        if message.engine_index != self._engine_index:
            raise EngineDeadError(f"A message to engine {self._engine_index} is from engine {message.engine_index}")
        return message

    def _check_life(self) -> None:
        if self._is_process_alive():
            self._life_check = asyncio.get_running_loop().call_later(LIFE_CHECK_SECONDS, self._check_life)
        else:
            self.mark_dead("The engine process has ended; its log says why")

    def mark_dead(self, message: str) -> None:
        if self._death is not None:
            return
        self._death = message
        self._input.setsockopt(zmq.LINGER, 0)
        with self._context.socket(zmq.PUSH) as waker:
            waker.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
            waker.connect(self._output_address)
            waker.send(WAKE)

    def close(self) -> None:
        for timer in (self._retry, self._life_check):
            if timer is not None:
                timer.cancel()
        self._death = self._death or "The connection to the engine is closed"
        self._output.close(0)
        self._input.close()
        self._context.term()
