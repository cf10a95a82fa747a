"""Logprobs in vLLM's form: one dictionary per position, with the text of each token at its place."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

from quire.frontend.tokenizer import Tokenizer
from quire.messages import unpack
from quire.outputs import Logprob, PositionLogprobs
from quire.schedule import TokenLogprobs


class LogprobDecoder:
    """Follows one token sequence. The token that completes a character shows the whole character.

    A token that leaves a character incomplete shows the text before it, or "".
    """

    __slots__ = ("_pending", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._pending = b""  # bytes of an incomplete character before the next position

    def skip(self, token_id: int) -> None:
        """Pass a position without logprobs."""
        if self._tokenizer is not None:
            self._pending = self._decode(self._tokenizer, token_id)[1]

    def position(self, entry: TokenLogprobs) -> PositionLogprobs:
        """The dictionary of the next position: the token there first, then the others as given."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            triples = zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)
            return {token_id: Logprob(logprob, rank) for token_id, logprob, rank in triples}
        result: PositionLogprobs = {}
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True):
            if token_id not in result:
                result[token_id] = Logprob(logprob, rank, self._decode(tokenizer, token_id)[0])
        self.skip(entry.token_ids[0])
        return result

    def _decode(self, tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
        """The text that the token completes here, and the bytes that it leaves incomplete."""
        data = self._pending + tokenizer.token_bytes(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        return text, data[used:]


class PromptLogprobs(Sequence[PositionLogprobs | None]):
    """One entry per prompt token. The first is None, because it has no prediction.

    Entries are made while it is iterated, and not kept: a long prompt's are seconds of work and hundreds of megabytes.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], packed: Sequence[msgspec.Raw]
    ) -> None:
        self._tokenizer, self._first_token_id, self._packed = tokenizer, prompt_token_ids[0], packed

    def __len__(self) -> int:
        return 1 + len(self._packed)

    def __iter__(self) -> Iterator[PositionLogprobs | None]:
        decoder = LogprobDecoder(self._tokenizer)
        decoder.skip(self._first_token_id)
        yield None
        for packed in self._packed:
            yield decoder.position(unpack(packed))

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[PositionLogprobs | None]: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | list[PositionLogprobs | None] | None:
        """Make all entries and return one or some. Make a list to use several."""
        return list(self)[index]
