"""The boundary to the engine: the contract EngineClient, and a real engine process at the other end of a link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from quire.errors import EngineDeadError
from quire.frontend.engine_link import EngineLink, LinkEndedError
from quire.messages import EngineInput, EngineMessage

LIFE_CHECK_SECONDS = 0.1


class EngineClient(Protocol):
    """Sends messages to an engine and receives its answers in order. One event loop uses it."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine may be alive. False: it is known to be gone."""
        ...

    def send(self, message: EngineInput) -> None:
        """Queue a message without waiting. Raises EngineDeadError if the engine is gone."""
        ...

    async def receive(self) -> EngineMessage:
        """Wait for the next message. EngineProgress and EngineReady come first.

        Raises EngineDeadError if no message follows.
        """
        ...

    def mark_dead(self, message: str) -> None:
        """Give the engine up. Its earlier messages are still received; then receive and send raise EngineDeadError.

        Args:
            message: says what has happened, as text for the user.
        """
        ...

    def close(self) -> None:
        """Free the connection. Earlier messages still leave within a second, unless the engine is gone."""
        ...


class ProcessClient:
    """An engine in another process: msgpack frames over a link.

    Args:
        link: the client owns it.
        is_process_alive: called every LIFE_CHECK_SECONDS while receiving; False counts as `mark_dead`.
        engine_index: the index in the engine's messages.
        first: a message that is sent before all others, when the first message has been received.
    """

    def __init__(
        self,
        link: EngineLink,
        is_process_alive: Callable[[], bool] = lambda: True,
        engine_index: int = 0,
        first: EngineInput | None = None,
    ) -> None:
        self._link, self._engine_index = link, engine_index
        self._is_process_alive = is_process_alive
        self._life_check: asyncio.TimerHandle | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
        self._death: str | None = None
        if first is not None:
            self._link.send(self._encoder.encode(first))

    @property
    def is_alive(self) -> bool:
        return self._death is None

    def send(self, message: EngineInput) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        self._link.send(self._encoder.encode(message))

    async def receive(self) -> EngineMessage:
        if self._life_check is None:
            self._check_life()
        try:
            message: EngineMessage = self._decoder.decode(await self._link.receive())
        # The engine is gone and no earlier message of it is left, or this end is closed.
        except LinkEndedError as error:
            self._death = self._death or str(error) or "The connection to the engine is closed"
            raise EngineDeadError(self._death) from None
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
        if self._death is None:
            self._death = message
            self._link.end()

    def close(self) -> None:
        if self._life_check is not None:
            self._life_check.cancel()
        self._death = self._death or "The connection to the engine is closed"
        self._link.close()
