"""The responses of /v1/responses that later requests may ask for: finished ones in bounded memory, and running ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import msgspec

from quire.errors import InvalidRequestError
from quire.server.errors import HttpError
from quire.server.protocol.responses import ResponseObject

MAX_RESPONSES = 10_000
MAX_BYTES = 64 * 2**20
MAX_SEQUENCE_NUMBER = 999_999_999


class StoredResponse:
    """One response, with the data to continue the conversation.

    Args:
        conversation: messages of a chat, without instructions. The answer is among them when the response is complete.
    """

    def __init__(self, answer: ResponseObject, conversation: list[dict[str, Any]]) -> None:
        self.answer, self.conversation = answer, conversation
        self.num_bytes = 0  # counted by the store
        self.is_deleted = False
        self._num_event_bytes = 0
        self._events: list[bytes] = []
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_in_background(self) -> bool:
        return self._task is not None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Make the answer in the background."""
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(lambda _: self.add_events(b""))

    async def cancel(self) -> None:
        """End the work; returns when it has ended. A response that has finished does not change."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def add_events(self, data: bytes) -> None:
        """Add events for the readers. The caller counts them with ResponseStore.grow."""
        self._events += [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]
        self._num_event_bytes += len(data)
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, place: int = 0) -> AsyncGenerator[bytes, None]:
        """The events from a sequence number on, until the last one."""
        while True:
            while place < len(self._events):
                yield self._events[place]
                place += 1
            if not self.is_running:
                return
            await self._news.wait()

    def measure(self) -> int:
        """The bytes that it holds."""
        return len(msgspec.json.encode((self.answer, self.conversation))) + self._num_event_bytes


class ResponseStore:
    """The oldest responses leave first. Running ones stay: the engine's queue bounds them."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: dict[str, StoredResponse] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()  # answers with many logprobs are written in threads

    def get(self, response_id: str) -> StoredResponse:
        """Raises HttpError."""
        if (stored := self._stored.get(response_id)) is not None:
            return stored
        raise HttpError(
            404,
            "response_not_found",
            "There is no response of this id",
            expected="an id of a response that was stored and is not too old",
            fix="Send the whole conversation as input",
        )

    def conversation(self, response_id: str) -> list[dict[str, Any]]:
        """The messages up to a response, and its own. Raises HttpError, InvalidRequestError."""
        stored = self.get(response_id)
        if stored.answer.status not in ("completed", "incomplete"):
            raise InvalidRequestError(
                "The previous response has no answer that can be continued",
                value=stored.answer.status,
                expected="a response that is completed or incomplete",
                param="previous_response_id",
            )
        return stored.conversation

    def keep(self, stored: StoredResponse) -> None:
        """Keep a response, or measure it again, unless it was deleted. Others leave if there is no room."""
        if not stored.is_deleted:
            with self._lock:
                self._stored[stored.answer.id] = stored
                self._count(stored, stored.measure() - stored.num_bytes)

    def grow(self, stored: StoredResponse, num_bytes: int) -> None:
        """Count further events of a response that runs. Others leave if there is no room."""
        if stored.answer.id in self._stored:
            with self._lock:
                self._count(stored, num_bytes)

    def _count(self, stored: StoredResponse, num_bytes: int) -> None:
        stored.num_bytes += num_bytes
        self._num_bytes += num_bytes
        if len(self._stored) <= self._max_responses and self._num_bytes <= self._max_bytes:
            return
        for response_id, oldest in list(self._stored.items()):
            if not oldest.is_running:
                self._num_bytes -= self._stored.pop(response_id).num_bytes
                if len(self._stored) <= self._max_responses and self._num_bytes <= self._max_bytes:
                    return

    async def delete(self, response_id: str) -> None:
        """Forget a response; one in the background ends first. Raises HttpError."""
        stored = self.get(response_id)
        stored.is_deleted = True
        await stored.cancel()
        with self._lock:
            if self._stored.pop(response_id, None) is not None:
                self._num_bytes -= stored.num_bytes

    async def close(self) -> None:
        """End what runs."""
        for stored in list(self._stored.values()):
            await stored.cancel()
