"""The incremental text pipeline of one continuation: token ids in, final text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.frontend.text.stop import StopMatcher


class Detokenizer(Protocol):
    """Turns token ids into final text."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str:
        """The rest of the text at the end of the output."""
        ...


class TextDelta(NamedTuple):
    """The text of some tokens. With a match, only `num_tokens` were used: the last one completed the stop string."""

    text: str
    num_tokens: int
    stop: str | None = None


class TextPipeline:
    """Detokenizer, then stop strings. The joined text does not depend on the cut of the tokens into pushes."""

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_num_tokens")

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop, include=include_stop) if stop else None
        self._min_tokens = min_tokens  # a stop string may not end within the first min_tokens tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add tokens. No further push is allowed after a delta with `stop`."""
        matcher = self._matcher
        if matcher is None:
            return TextDelta(self._detokenizer.push(token_ids), len(token_ids))
        pieces = []
        for used, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            text = self._detokenizer.push((token_id,))
            pieces.append(matcher.push(text, armed=self._num_tokens > self._min_tokens))
            if matcher.matched is not None:
                return TextDelta("".join(pieces), used, matcher.matched)
        return TextDelta("".join(pieces), len(token_ids))

    def finish(self) -> str:
        """The rest of the text after the last token. It must not be called after a stop string."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        return self._matcher.push(rest, armed=False) + self._matcher.flush()
