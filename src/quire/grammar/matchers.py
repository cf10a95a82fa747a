"""Compiled grammars of a worker, and the place of each row in its grammar.

Dimensions: M masks, V vocabulary, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakSet, WeakValueDictionary, ref

import numpy as np
from numpy.typing import NDArray

from quire.grammar.compiled import STACK_BYTES, compiled_matcher, first_line, vocabulary
from quire.grammar.kept import Kept

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer


# All rows of a compiled grammar share its lexer, which grows with their tokens. With [ab]*a[ab]{20}c it grows by 4
# states and 2 KB a token. So a grammar is compiled anew after this number of tokens, and later if its text is long.
_MAX_TOKENS = 10_000
_MAX_BYTES = 256 << 20  # bytes of the compiled grammars of requests; and the same again for the most recently used ones
_BYTES_PER_TOKEN = 2 << 10
_BYTES_OF_FULL_LEXER = 35 << 20
_BYTES_PER_CHARACTER = 90  # for a character of the text; objects need most, an enum needs 30
_TOO_MANY_STATES = "too many states"  # a part of llguidance's message


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Compiled:
    """A matcher at the beginning of a grammar, and the number of tokens that its copies took in."""

    matcher: LLMatcher
    num_tokens: int = 0


class RowGrammar:
    """A request's place in its grammar: the tokens that may come next.

    Args:
        grammars: compile the text again when the lexer that this row shares with others is full.
    """

    def __init__(self, grammars: Grammars, text: str, output_token_ids: Sequence[int]) -> None:
        self._grammars, self._text, self._token_ids = grammars, text, list(output_token_ids)
        self.end_token_ids = grammars.end_token_ids
        self._forces = "no_forcing" not in text  # an option of llguidance, with which masks force nothing
        self._begin()

    def _begin(self) -> None:
        self._compiled = self._grammars.compile(self._text)
        self.matcher = self._compiled.matcher.deep_copy()
        self._compiled.num_tokens += len(self._token_ids)
        if self._token_ids:
            self.matcher.consume_tokens(self._token_ids)

    def append(self, token_id: int) -> None:
        """Take in a sampled token. One that the grammar forbids makes the matcher fail, see `error`."""
        self._token_ids.append(token_id)
        self._compiled.num_tokens += 1
        self.matcher.consume_token(token_id)

    def forced_token(self) -> int | None:
        """The only token that may come next, as a mask would show; None: there are several such tokens, or none."""
        if not self._forces or self.matcher.is_stopped():
            return None
        forced = self.matcher.compute_ff_tokens()  # after the first token, the text may be cut into tokens differently
        return forced[0] if forced else None

    def renew(self) -> bool:
        """Go on with a new lexer, if this one is full. The matcher then has to make its mask again."""
        is_full = self.matcher.is_error() and _TOO_MANY_STATES in self.matcher.get_error()
        if is_full:
            self._grammars.drop(self._text, self._compiled)
            self._begin()
        return is_full

    @property
    def error(self) -> str | None:
        """The reason why no token is allowed any more; None: the grammar goes on, or allows the end."""
        return f"The grammar cannot go on: {first_line(self.matcher.get_error())}" if self.matcher.is_error() else None


class Preparation:
    """A grammar that is being compiled. It stays compiled as long as this object lives, and is not begun after that."""

    def __init__(self, grammars: Grammars, text: str) -> None:
        self._grammars, self.text = grammars, text
        self.work: Future[_Compiled] | None = None  # once it was begun

    @property
    def num_bytes(self) -> int:
        """The bytes that are kept for it."""
        is_compiled = self.work is not None and self.work.done() and self.work.exception() is None
        return _num_bytes(self.text, self.work.result() if is_compiled and self.work is not None else None)

    def done(self) -> bool:
        """Whether `result` would not wait."""
        self._grammars.begin_next(self)
        return self.work is not None and self.work.done()

    def result(self) -> object:
        """Wait for the grammar, after it was begun. Raises InvalidRequestError if it cannot be used."""
        assert self.work is not None, "others are in the way"
        return self.work.result()


def _thread_with_stack() -> ThreadPoolExecutor:
    """A thread with STACK_BYTES, whatever the system gives others: 2 MiB where the limit of stacks is lifted."""
    others = threading.stack_size(STACK_BYTES)
    try:
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-grammars")
        thread.submit(int).result()  # so that the thread starts now
    finally:
        threading.stack_size(others)
    return thread


class Grammars:
    """Compiles grammars on a thread of its own, for requests that wait beside the queue.

    A compiled grammar is kept until its request ends. A further grammar is compiled when the kept ones leave room for
    it: see _MAX_BYTES. Besides, the last ones are kept for requests to come. So a step waits for a grammar only if the
    lexer of a row is full.

    Args:
        vocab_size: the tokens that logits have.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = _thread_with_stack()
        self._kept: Kept[_Compiled] = Kept(_MAX_BYTES, _num_bytes)
        self._alive: WeakValueDictionary[str, _Compiled] = WeakValueDictionary()  # grammars that others keep
        self._waiting: deque[ref[Preparation]] = deque()  # those whose request has left are dead
        self._begun: WeakSet[Preparation] = WeakSet()
        self.end_token_ids: frozenset[int] = frozenset()
        self._tokenizer: LLTokenizer | None = None

    def use_tokenizer(self, tokenizer: str, eos_token_ids: Sequence[int]) -> None:
        """Make the tables of the vocabulary that grammars are about: see compiled.vocabulary.

        Args:
            tokenizer: the content of a tokenizer.json.
            eos_token_ids: tokens that end an output. A grammar allows them where the output may end.
        """
        self._tokenizer = vocabulary(tokenizer, eos_token_ids, self._vocab_size)
        self.end_token_ids = frozenset(eos_token_ids)

    def prepare(self, text: str) -> Preparation:
        """Compile a grammar, unless it is kept."""
        preparation = Preparation(self, text)
        self._waiting.append(ref(preparation))
        self.begin_next()
        return preparation

    def begin_next(self, asking: Preparation | None = None) -> None:
        """Begin waiting grammars, in order, if there is room.

        Args:
            asking: has an effect if it is the first one, because the others come after it; None: as if it were.
        """
        first = self._first()
        if asking is not None and asking is not first:
            return
        while first is not None and self._has_room():
            self._waiting.popleft()
            self._begun.add(first)
            first.work = self._thread.submit(self._prepare, first.text, ref(first))
            first = self._first()

    def _first(self) -> Preparation | None:
        """The first one that somebody waits for."""
        while self._waiting:
            if (first := self._waiting[0]()) is not None:
                return first
            self._waiting.popleft()
        return None

    def _has_room(self) -> bool:
        sizes = {each.text: each.num_bytes for each in self._begun}
        return sum(sizes.values()) < _MAX_BYTES

    def _prepare(self, text: str, asking: ref[Preparation]) -> _Compiled:
        if asking() is None:
            raise CancelledError
        compiled = self.compile(text)
        if compiled.num_tokens > _MAX_TOKENS + len(text):
            self.drop(text, compiled)
            compiled = self.compile(text)
        self._kept.shrink()
        return compiled

    def row(self, text: str, output_token_ids: Sequence[int]) -> RowGrammar:
        """The place after an output, in a grammar that was prepared."""
        return RowGrammar(self, text, output_token_ids)

    def drop(self, text: str, compiled: _Compiled) -> None:
        """Compile the grammar anew when it is needed next."""
        self._kept.drop(text, compiled)
        if self._alive.get(text) is compiled:
            del self._alive[text]

    def compile(self, text: str) -> _Compiled:
        """The beginning of a grammar: one that is kept, or a new one."""
        if (kept := self._kept.get(text) or self._alive.get(text)) is not None:
            return kept
        assert self._tokenizer is not None, "a grammar came before the tokenizer"
        compiled = _Compiled(compiled_matcher(self._tokenizer, text))
        self._alive[text] = compiled
        self._kept.put(text, compiled)
        return compiled


def _num_bytes(text: str, compiled: _Compiled | None) -> int:
    num_tokens = 0 if compiled is None else compiled.num_tokens
    return _BYTES_PER_CHARACTER * len(text) + min(_BYTES_PER_TOKEN * num_tokens, _BYTES_OF_FULL_LEXER)


def token_masks(
    rows: Sequence[tuple[RowGrammar, int, Sequence[int]]], num_masks: int, vocab_size: int
) -> NDArray[np.int32]:
    """The masks [M, W], int32, with a bit for each token. 1: the token is allowed.

    Args:
        rows: a grammar, the first of its masks, and its drafts: the j-th mask behind the first is made as if j drafts
            were appended. Behind a draft that the grammar forbids, every token is allowed.
        num_masks: M.
    """
    masks_MW = np.full((num_masks, -(-vocab_size // 32)), -1, dtype=np.int32)
    _compute(rows, masks_MW)
    for _ in range(2):  # another row may have filled the lexer that a row goes on with
        if full := [row for row in rows if row[0].renew()]:
            for _, first, drafts in full:
                masks_MW[first : first + len(drafts) + 1] = -1
            _compute(full, masks_MW)
    for grammar, first, drafts in rows:
        for index, draft in enumerate(drafts, first + 1):
            if draft in grammar.end_token_ids and (masks_MW[index] == -1).all():  # llguidance stops at the end
                masks_MW[index : first + len(drafts) + 1] = _only(grammar.end_token_ids, masks_MW.shape[1])
                break
    return masks_MW


def _compute(rows: Sequence[tuple[RowGrammar, int, Sequence[int]]], masks_MW: NDArray[np.int32]) -> None:
    executor, memory = _executor(), (masks_MW.ctypes.data, masks_MW.strides[0], len(masks_MW))
    if plain := [(grammar.matcher, first) for grammar, first, drafts in rows if not drafts]:
        executor.unsafe_compute_mask_ptr(plain, *memory)
    if drafted := [(grammar.matcher, first, list(drafts)) for grammar, first, drafts in rows if drafts]:
        executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *memory)


def _only(token_ids: Iterable[int], num_words: int) -> NDArray[np.int32]:
    """The mask that allows these tokens."""
    mask_W = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        mask_W[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask_W.view(np.int32)


@cache
def _executor() -> LLExecutor:
    """Threads for masks of several rows."""
    from llguidance import LLExecutor

    return LLExecutor()
