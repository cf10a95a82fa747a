"""Finds the tokens that would complete a forbidden word after the output so far."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from quire.sampling_params import SpelledWord, SpelledWords


class BadWords:
    """Follows one request's output through the spellings of its forbidden words.

    Args:
        words: words in text, spelled by the front end; None: there are none.
        sequences: token ids that are forbidden at every place.
        output_token_ids: the output so far.
        vocab_size: larger token ids have no logits, so they need not be forbidden.
    """

    def __init__(
        self,
        words: SpelledWords | None,
        sequences: Sequence[Sequence[int]],
        output_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        spelled = [] if words is None else words.words
        self._words = [*spelled, *map(_one_spelling, sequences)]
        self._inside_word = b"" if words is None else words.inside_word
        self._is_inside = False
        self._counts: list[set[int]] = [set() for _ in self._words]  # how many of its bytes or tokens the output has
        self._last_steps = [[_last_of(step, word, vocab_size) for step in word.steps] for word in self._words]
        self.always = sorted({last for word in self._words for last in _last_of(word.anywhere, word, vocab_size)})
        longest = max((len(word.steps) for word in self._words), default=0)
        for token_id in output_token_ids[-longest:] if longest else ():  # a token has at least one byte of a word
            self.append(token_id)

    @property
    def needs_tokens(self) -> bool:
        """Whether the forbidden tokens depend on the output so far."""
        return any(any(word.steps) for word in self._words)

    def append(self, token_id: int) -> None:
        """Record a token of the output."""
        for word, counts in zip(self._words, self._counts, strict=True):
            began = [] if self._is_inside else word.steps[0].get(token_id, [])
            went_on = [after for count in counts for after in word.steps[count].get(token_id, ())]
            counts.clear()
            counts.update(word.anywhere.get(token_id, ()), began, went_on)
            counts.discard(len(word.steps))
        byte = token_id // 8
        self._is_inside = byte < len(self._inside_word) and bool(self._inside_word[byte] >> token_id % 8 & 1)

    def forbidden_after(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens, besides `always`, that would complete a word after the output so far and `token_ids`."""
        if not token_ids:
            return self._forbidden_now()
        later = copy(self)
        later._counts = [set(counts) for counts in self._counts]
        for token_id in token_ids:
            later.append(token_id)
        return later._forbidden_now()

    def _forbidden_now(self) -> list[int]:
        forbidden: list[int] = []
        for last_steps, counts in zip(self._last_steps, self._counts, strict=True):
            if not self._is_inside:
                forbidden += last_steps[0]
            for count in counts:
                forbidden += last_steps[count]
        return forbidden


def _one_spelling(token_ids: Sequence[int]) -> SpelledWord:
    rest = [{token_id: [count]} for count, token_id in enumerate(token_ids[1:], 2)]
    return SpelledWord({token_ids[0]: [1]}, [{}, *rest])


def _last_of(step: dict[int, list[int]], word: SpelledWord, vocab_size: int) -> list[int]:
    """The tokens of a step after which the whole word is out."""
    return [token_id for token_id, counts in step.items() if len(word.steps) in counts and token_id < vocab_size]
