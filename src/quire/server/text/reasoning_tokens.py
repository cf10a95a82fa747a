"""Counts the tokens of an answer's reasoning by the tokens of its tags."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.formats.answer_formats import HARMONY_REASONING
from quire.server.text import harmony
from quire.server.text.reasoning import REASONING_FORMATS


class ReasoningTokens:
    """The tokens between the tags of one answer, without the tags. In reasoning without an end, EOS counts.

    Args:
        openings: each is the token ids that begin reasoning.
        closings: token ids that end it. A token of an opening that is none of them is not counted if reasoning is open.
        is_open: the answer begins with reasoning.
        is_first_only: what follows the first end of reasoning is none.
    """

    def __init__(
        self, openings: Sequence[tuple[int, ...]], closings: frozenset[int], *, is_open: bool, is_first_only: bool
    ) -> None:
        self._openings, self._closings = openings, closings
        self._is_open, self._is_first_only = is_open, is_first_only
        self._marks = closings.union(*openings)
        self._longest = max(map(len, openings))
        self._last: tuple[int, ...] = ()  # the last tokens that may be in a tag
        self.num_tokens = 0

    @classmethod
    def of(cls, name: str | None, prompt: str, token_to_id: Callable[[str], int | None]) -> ReasoningTokens | None:
        """The counter for an answer to a prompt; None: its reasoning has no tags, or they are no single tokens.

        Args:
            name: the name of the format of reasoning.
        """
        if name is None:
            return None
        openings: list[tuple[str, ...]]
        if name == HARMONY_REASONING:
            openings, closings, is_open = [harmony.REASONING_TOKENS[1:]], harmony.ENDS.names, False
        else:
            reasoning = REASONING_FORMATS[name]
            openings, closings = [(tag,) for tag in reasoning.opening.names], reasoning.closing.names
            is_open = reasoning.is_open(prompt) is True
        ids = {tag: token_to_id(tag) for tag in {*closings, *(tag for tags in openings for tag in tags)}}
        known = {tag: token_id for tag, token_id in ids.items() if token_id is not None}
        if len(known) < len(ids):
            return None
        return cls(
            [tuple(known[tag] for tag in tags) for tags in openings],
            frozenset(known[tag] for tag in closings),
            is_open=is_open,
            is_first_only=name != HARMONY_REASONING,
        )

    def add(self, token_ids: Sequence[int]) -> None:
        """More tokens of the answer."""
        begin = 0
        for index in [index for index, token_id in enumerate(token_ids) if token_id in self._marks]:
            self._add_text(index - begin)
            self._add_mark(token_ids[index])
            begin = index + 1
        self._add_text(len(token_ids) - begin)

    def _add_text(self, num_tokens: int) -> None:
        """Tokens that are in no tag."""
        if num_tokens:
            self._last = ()
            self.num_tokens += num_tokens * self._is_open

    def _add_mark(self, token_id: int) -> None:
        """A token that may be in a tag."""
        self._last = (*self._last, token_id)[-self._longest :]
        if token_id in self._closings and self._is_open:
            self._is_open = False
            if self._is_first_only:
                self._openings = ()
        elif any(self._last[-len(opening) :] == opening for opening in self._openings):
            self._is_open = True
        elif self._is_open:
            self.num_tokens += 1
