"""Writes logprobs in the shapes of OpenAI's two APIs, and prompt logprobs in vLLM's shape."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import cast

import msgspec

from quire.frontend.tokenizer import Tokenizer
from quire.outputs import Logprob, PositionLogprobs
from quire.server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from quire.server.protocol.common import MIN_LOGPROB, PromptLogprob, PromptLogprobs
from quire.server.protocol.completions import CompletionLogprobs

_encoder = msgspec.json.Encoder()


class LogprobWriter:
    """Writes positions for one request.

    Args:
        as_token_ids: whether tokens are named "token_id:<id>". These names are unique, but texts may not be.
        max_top: the most likely tokens to show per position; for a chat, the chosen token counts. -1: all.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_token_ids: bool, max_top: int) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids or tokenizer is None
        self._max_top = max_top

    def chat(self, positions: Sequence[PositionLogprobs]) -> ChatLogprobs:
        """For message.content; the chosen token is the first of each position, and of its top_logprobs, as in vLLM."""
        content = []
        for position in positions:
            token_id, chosen = next(iter(position.items()))
            shown = {token_id: chosen, **dict(self._most_likely(position))}
            top = [
                TopLogprob(
                    token=self._name(other_id, other), logprob=_finite(other.logprob), bytes=self._bytes(other_id)
                )
                for other_id, other in islice(shown.items(), self._max_top if self._max_top >= 0 else None)
            ]
            content.append(
                TokenLogprob(
                    token=self._name(token_id, chosen),
                    logprob=_finite(chosen.logprob),
                    bytes=self._bytes(token_id),
                    top_logprobs=top,
                )
            )
        return ChatLogprobs(content=content)

    def completion(
        self,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs | None],
        offset: int,
        left_out: Collection[int] = (),
    ) -> tuple[CompletionLogprobs, int]:
        """For choice.logprobs.

        Args:
            token_ids: the chosen tokens, one per position; a position of None (the prompt's first) has no logprobs.
            offset: characters of the choice's text before the first of them.
            left_out: tokens that are no part of the text.
        Returns:
            the logprobs, and the offset after the last token.
        """
        result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token_id, position in zip(token_ids, positions, strict=True):
            chosen = Logprob(0.0, None, self._text(token_id)) if position is None else position[token_id]
            result.text_offset.append(offset)
            result.tokens.append(self._name(token_id, chosen))
            result.token_logprobs.append(None if position is None else _finite(chosen.logprob))
            result.top_logprobs.append(None if position is None else self._top_by_name(token_id, position))
            if token_id not in left_out:
                offset += len(chosen.decoded_token or "")
        return result, offset

    def _top_by_name(self, token_id: int, position: PositionLogprobs) -> dict[str, float]:
        """The chosen token, then the most likely ones. Of tokens with equal text the first is kept."""
        named: dict[str, float] = {}
        for other_id, other in [(token_id, position[token_id]), *self._most_likely(position)]:
            named.setdefault(self._name(other_id, other), _finite(other.logprob))
        return named

    def _most_likely(self, position: PositionLogprobs) -> list[tuple[int, Logprob]]:
        ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
        return ranked if self._max_top < 0 else ranked[: self._max_top]

    def _name(self, token_id: int, logprob: Logprob) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else logprob.decoded_token or ""

    def _text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def _bytes(self, token_id: int) -> list[int] | None:
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))


def prompt_logprobs(positions: Iterable[PositionLogprobs | None]) -> PromptLogprobs:
    """vLLM's field of the same name, encoded: position by position, so that other threads get their turn between."""
    data = b"[" + b",".join(_encoder.encode(_prompt_position(position)) for position in positions) + b"]"
    return cast("PromptLogprobs", msgspec.Raw(data))


def _prompt_position(position: PositionLogprobs | None) -> dict[str, PromptLogprob] | None:
    if position is None:
        return None
    return {
        str(token_id): PromptLogprob(logprob=_finite(entry.logprob), rank=entry.rank, decoded_token=entry.decoded_token)
        for token_id, entry in position.items()
    }


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
