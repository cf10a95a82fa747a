"""Whoever answers a chat."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Piece(NamedTuple):
    """The next part of an answer; the last one says why the answer ends there, as OpenAI's API does."""

    text: str
    finish_reason: str | None = None


class ChatModel(Protocol):
    """Answers conversations, one at a time."""

    @property
    def name(self) -> str: ...

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The values of parameters that nobody has set, as far as they are known."""
        ...

    def answer(
        self, messages: Sequence[Mapping[str, str]], parameters: Mapping[str, Any]
    ) -> Generator[Piece, None, None]:
        """The pieces of an answer as they come. Closing it stops the model.

        Args:
            messages: `{"role", "content"}`, the last one to be answered.
            parameters: SamplingParams fields.
        Raises:
            QuireError: there is no answer, or no more of it.
        """
        ...
