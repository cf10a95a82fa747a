"""The contract of a model that answers a chat."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Piece(NamedTuple):
    """The next part of an answer. The last one has a finish reason, as in OpenAI's API."""

    text: str
    finish_reason: str | None = None


class ChatModel(Protocol):
    """Answers conversations, one at a time."""

    @property
    def name(self) -> str: ...

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The values of parameters that were not set, if they are known."""
        ...

    def answer(
        self, messages: Sequence[Mapping[str, str]], parameters: Mapping[str, Any]
    ) -> Generator[Piece, None, None]:
        """The pieces of an answer as they come. Closing the generator stops the model.

        Args:
            messages: `{"role", "content"}`; the model answers the last one.
            parameters: SamplingParams fields.
        Raises:
            QuireError: the model gives no answer, or stops in the middle of it.
        """
        ...
