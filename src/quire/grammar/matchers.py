"""Compiled grammars of a worker, and the place of each row in its grammar.

Dimensions: M masks, V vocabulary, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvalidRequestError
from quire.grammar.limits import MAX_KEPT, parser_limits

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer


class RowGrammar:
    """A request's place in its grammar: what its output may go on with."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def append(self, token_id: int) -> None:
        """Take in a sampled token. One that the grammar forbids makes the matcher fail, see `error`."""
        self.matcher.consume_token(token_id)

    @property
    def error(self) -> str | None:
        """Why no token is allowed any more; None: the grammar goes on, or allows the end."""
        return f"The grammar cannot go on: {_first_line(self.matcher.get_error())}" if self.matcher.is_error() else None


class Grammars:
    """Compiles grammars on a thread of its own, so that no step waits for one.

    Args:
        vocab_size: of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-grammars")
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()  # of the compiled grammars
        self._source: tuple[str, list[int]] | None = None
        self._tokenizer: LLTokenizer | None = None

    def use_tokenizer(self, tokenizer: str, eos_token_ids: Sequence[int]) -> None:
        """The vocabulary that grammars are about.

        Args:
            tokenizer: the content of a tokenizer.json.
            eos_token_ids: tokens that end an output. A grammar allows them where the output may end.
        """
        self._source, self._tokenizer = (tokenizer, list(eos_token_ids)), None

    def prepare(self, text: str) -> Future[None]:
        """Compile a grammar, unless it is kept. The future raises InvalidRequestError if it cannot be."""
        return self._thread.submit(self._prepare, text)

    def _prepare(self, text: str) -> None:
        self._compile(text)

    def row(self, text: str, output_token_ids: Sequence[int]) -> RowGrammar:
        """The place behind an output in a grammar that was prepared."""
        matcher = self._compile(text).deep_copy()
        if output_token_ids:
            matcher.consume_tokens(list(output_token_ids))
        return RowGrammar(matcher)

    def _compile(self, text: str) -> LLMatcher:
        """A matcher at the beginning of the grammar: one that is kept, or a new one."""
        with self._lock:
            if (kept := self._compiled.get(text)) is not None:
                self._compiled.move_to_end(text)
                return kept
        from llguidance import LLMatcher, LLTokenizer

        if self._tokenizer is None:
            assert self._source is not None, "a grammar came before the tokenizer"
            tokenizer, eos_token_ids = self._source
            self._tokenizer = LLTokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=eos_token_ids)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # so that the first mask, which is the slowest, is not made in a step
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise InvalidRequestError(
                f"The grammar cannot be used: {_first_line(matcher.get_error()) or 'nothing satisfies it'}",
                param="structured_outputs",
            )
        with self._lock:
            self._compiled[text] = matcher
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return matcher


def token_masks(
    rows: Sequence[tuple[RowGrammar, int, Sequence[int]]], num_masks: int, vocab_size: int
) -> NDArray[np.int32]:
    """masks_MW: a bit for each token, 1: it is allowed.

    Args:
        rows: a grammar, the first of its masks, and its drafts: the j-th mask behind the first is made as if j drafts
            were appended. Behind a draft that the grammar forbids, every token is allowed.
        num_masks: M.
    """
    executor = _executor()
    masks_MW = np.full((num_masks, -(-vocab_size // 32)), -1, dtype=np.int32)
    memory = (masks_MW.ctypes.data, masks_MW.strides[0], num_masks)
    if plain := [(grammar.matcher, first) for grammar, first, drafts in rows if not drafts]:
        executor.unsafe_compute_mask_ptr(plain, *memory)
    if drafted := [(grammar.matcher, first, list(drafts)) for grammar, first, drafts in rows if drafts]:
        executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *memory)
    return masks_MW


@cache
def _executor() -> LLExecutor:
    """Threads for masks of several rows."""
    from llguidance import LLExecutor

    return LLExecutor()


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
