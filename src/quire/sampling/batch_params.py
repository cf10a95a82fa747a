"""The sampling state of a worker's rows: dense arrays for common parameters, sparse maps for rare ones.

A step touches only the rows that changed. Dimensions: C row capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.grammar.matchers import RowGrammar
from quire.sampling.filters import RowFilter
from quire.sampling.penalties import RowPenalties
from quire.sampling_params import SamplingParams, SamplingType


class SamplingState:
    """The sampler's state of each row. The caller chooses the rows' numbers, below the capacity.

    If the sparse maps are empty, a batch of greedy rows costs only an argmax.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature_C = np.zeros(max_num_seqs, dtype=np.float32)  # 0: greedy
        self.top_k_C = np.zeros(max_num_seqs, dtype=np.int32)  # 0: no limit
        self.top_p_C = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p_C = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed_C = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_output_tokens_C = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_random = 0
        self.filters: dict[int, RowFilter] = {}
        self.penalties: dict[int, RowPenalties] = {}
        self.grammars: dict[int, RowGrammar] = {}
        self.constrained: set[int] = set()  # rows with a grammar; only one of several ranks has the grammars
        self.num_logprobs: dict[int, int] = {}  # row -> most likely tokens to report; -1: all
        self.logprob_token_ids: dict[int, list[int]] = {}  # row -> report exactly these instead

    def add_row(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        stop_token_ids: Iterable[int],
        grammar: RowGrammar | None = None,
    ) -> None:
        """Fill an empty row with a new request, or with a resumed request and its earlier output.

        Args:
            params: verified; they have a seed unless they are greedy.
            stop_token_ids: forbidden while the output has fewer than `params.min_tokens` tokens.
            grammar: the grammar, in its state after the output; None: the request has none.
        """
        is_random = params.sampling_type is not SamplingType.GREEDY
        assert not is_random or params.seed is not None, "the front end gives every random request a seed"
        self.num_random += is_random
        self.temperature_C[row] = params.temperature if is_random else 0.0
        self.top_k_C[row] = params.top_k if params.top_k < self.vocab_size else 0
        self.top_p_C[row] = params.top_p
        self.min_p_C[row] = params.min_p
        self.seed_C[row] = params.seed or 0
        self.num_output_tokens_C[row] = len(output_token_ids)
        row_filter = RowFilter.of(params, output_token_ids, stop_token_ids, self.vocab_size)
        if row_filter is not None:
            self.filters[row] = row_filter
        if params.grammar is not None:
            self.constrained.add(row)
        if grammar is not None:
            self.grammars[row] = grammar
        penalties = RowPenalties.of(params, prompt_token_ids, output_token_ids)
        if penalties is not None:
            self.penalties[row] = penalties
        if params.logprob_token_ids:
            self.logprob_token_ids[row] = params.logprob_token_ids
        if params.num_logprobs is not None:
            self.num_logprobs[row] = params.num_logprobs

    def remove_row(self, row: int) -> None:
        """Forget a row."""
        self.num_random -= bool(self.temperature_C[row])
        self.temperature_C[row] = 0.0
        for sparse in (self.filters, self.penalties, self.grammars, self.num_logprobs, self.logprob_token_ids):
            sparse.pop(row, None)
        self.constrained.discard(row)

    def count_tokens(self, rows_R: NDArray[np.int64], count: int = 1) -> None:
        """Count more tokens for each of the rows, which are distinct. `learn_token` gives their ids later."""
        self.num_output_tokens_C[rows_R] += count

    def are_greedy(self, rows: Sequence[int]) -> bool:
        """Whether each of these rows takes the highest of its logits, and nothing else is asked of them."""
        asked, others = set(rows), (self.filters, self.penalties, self.constrained, self.num_logprobs)
        return not self.temperature_C[rows].any() and all(asked.isdisjoint(each) for each in others)

    @property
    def follows_tokens(self) -> bool:
        """Whether the state of some row depends on the tokens of its output: see `learn_token`."""
        return bool(self.filters or self.penalties or self.grammars)

    def needs_tokens(self, rows: Iterable[int]) -> bool:
        """Whether one of the rows must know all its earlier tokens before it can be sampled."""
        return self.follows_tokens and any(
            row in self.penalties or row in self.grammars or (row in self.filters and self.filters[row].needs_tokens)
            for row in rows
        )

    def learn_token(self, row: int, token_id: int) -> None:
        """Give a token, which is counted already, to the filters, penalties and grammars."""
        if (row_filter := self.filters.get(row)) is not None:
            row_filter.append(token_id)
        if (grammar := self.grammars.get(row)) is not None:
            grammar.append(token_id)
        if (penalties := self.penalties.get(row)) is not None:
            penalties.append(token_id)

    def take_forced(self, row: int, most: int) -> list[int]:
        """Take in the tokens that must follow the tokens of a row, because its grammar forbids all others.

        If the request asks for logprobs, no token is forced. If the row's filter forbids a forced token, the forced
        tokens end before it, and the sampler reports the conflict.
        """
        token_ids: list[int] = []
        grammar, row_filter = self.grammars.get(row), self.filters.get(row)
        if grammar is None or row in self.num_logprobs:
            return token_ids
        while len(token_ids) < most and (token_id := grammar.forced_token()) is not None:
            if row_filter is not None and not row_filter.allows(token_id):
                break
            self.count_tokens(np.array([row]))
            self.learn_token(row, token_id)
            token_ids.append(token_id)
        return token_ids

    def grow(self, max_num_seqs: int) -> None:
        """Raise the capacity; rows keep their numbers."""
        for name in [name for name in vars(self) if name.endswith("_C")]:
            array = getattr(self, name)
            grown = np.zeros(max_num_seqs, dtype=array.dtype)
            grown[: len(array)] = array
            setattr(self, name, grown)
