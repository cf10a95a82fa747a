"""A second, smaller model that drafts. It samples from its own logits in the way in which the target samples.

Its keys and values lie in the pages of the target. They are computed when a row drafts for the first time. So prompts
cost nothing while no request speculates.

Dimensions: S rows that draft, C row capacity, K most drafts of a row, B pages, R rows of one pass, V vocabulary of the
target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.models.registry import CausalLM
from quire.schedule import ScheduledBatch
from quire.worker.captured_steps import CapturedSteps
from quire.worker.draft_draws import DraftDraws
from quire.worker.drafter import ANY_TOKEN, Drafted
from quire.worker.forward_pass import ForwardPass
from quire.worker.input_batch import InputBatch, StepRows
from quire.worker.kv_cache import PagedCache


class DraftModel:
    """A Drafter with a draft model.

    Args:
        cache: the KV cache of the target, which also has the layers of the draft model.
        inputs: the rows of the target.
        captured: captured forward passes of the draft model; None: every pass is run.
        max_tokens: the most tokens that the draft model reads in one step.
        max_drafts: the most drafts of one row.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: PagedCache,
        inputs: InputBatch,
        draws: DraftDraws,
        captured: CapturedSteps | None = None,
        *,
        max_tokens: int,
        max_drafts: int,
    ) -> None:
        self._inputs, self._draws = inputs, draws
        self.forward_pass = ForwardPass(model, cache.drafter_layers, inputs, captured)
        self._table = cache.drafter_layers[0].table
        self._max_tokens = max_tokens
        capacity = len(inputs.num_tokens)
        # For each row: the number of true tokens that the model has computed, and the drafts computed after them.
        self._num_computed_C = np.zeros(capacity, dtype=np.int64)
        self._computed_drafts_CK = np.full((capacity, max_drafts), -1, dtype=np.int64)
        self._is_computed_B = np.zeros(len(cache.pages), dtype=np.bool_)  # all tokens of the page

    def follow(self, batch: ScheduledBatch) -> None:
        """See Drafter. The content of a page is forgotten when the page is handed out for other tokens."""
        inputs, block_size = self._inputs, self._inputs.block_size
        while len(self._num_computed_C) < len(inputs.num_tokens):
            self._num_computed_C = np.concatenate([self._num_computed_C, np.zeros_like(self._num_computed_C)])
            drafts_CK = self._computed_drafts_CK
            self._computed_drafts_CK = np.concatenate([drafts_CK, np.full_like(drafts_CK, -1)])
        for block_ids in batch.new_block_ids:
            if block_ids:
                self._is_computed_B[block_ids[self._table :: inputs.num_tables]] = False
        if not batch.new_rows:
            return
        starts = dict(zip(batch.request_ids, batch.num_computed_tokens, strict=True))
        for new in batch.new_rows:
            row, pages = inputs.row_of[new.request_id], new.block_ids[self._table :: inputs.num_tables]
            num_shared = starts[new.request_id] // block_size
            self._is_computed_B[pages[num_shared:]] = False
            is_computed = self._is_computed_B[pages[:num_shared]]
            num_blocks = num_shared if is_computed.all() else int(is_computed.argmin())
            self._num_computed_C[row] = num_blocks * block_size
            self._computed_drafts_CK[row] = -1

    def learn(self, step: StepRows) -> None:
        """See Drafter. There is nothing to do: a draft model reads only tokens, and only when a row drafts."""

    def draft(self, rows: Sequence[int], counts: Sequence[int]) -> Drafted:
        """See Drafter. There is one forward pass per place, over all rows that have no tokens left to read."""
        drafted = Drafted([[ANY_TOKEN] * count for count in counts], self._refusals(rows))
        # Rows with the most drafts come first, so the rows of each pass are the first rows of the pass before.
        accepted = (index for index in range(len(rows)) if index not in drafted.failures)
        indices = sorted(accepted, key=lambda index: -counts[index])
        if not indices:
            return drafted
        rows_S, counts_S = np.array(rows)[indices], np.array(counts)[indices]
        lens_S = self._inputs.num_tokens[rows_S]
        starts_S = self._reusable(rows_S, lens_S)
        if int((lens_S - starts_S).sum()) > self._max_tokens:
            unread_S = self._catch_up(rows_S, starts_S, lens_S)
            drafted.unread = {index: count for index, count in zip(indices, unread_S.tolist(), strict=True) if count}
            indices = [index for index in indices if index not in drafted.unread]
            if not indices:
                return drafted
            rows_S, counts_S, lens_S, starts_S = (of_S[unread_S == 0] for of_S in (rows_S, counts_S, lens_S, starts_S))
        found: list[Tensor] = []
        for offset in range(int(counts_S[0])):
            num_rows = int((counts_S > offset).sum())
            ends_S = lens_S[:num_rows] + offset
            found.append(self._draft_one(rows_S[:num_rows], starts_S[:num_rows], ends_S, offset, found))
            starts_S = ends_S
        self._keep(rows_S, lens_S)
        self._draws.collect(drafted, indices, found)
        for row, index in zip(rows_S.tolist(), indices, strict=True):
            computed = drafted.token_ids[index][:-1]
            self._computed_drafts_CK[row, : len(computed)] = computed
        return drafted

    def _refusals(self, rows: Sequence[int]) -> dict[int, str]:
        """The rows with tokens that the model does not know: their indices, and the reason."""
        inputs, config = self._inputs, self.forward_pass.model.config
        refused: dict[int, str] = {}
        if config.vocab_size >= inputs.sampling.vocab_size:
            return refused
        for index, row in enumerate(rows):
            highest = int(inputs.token_ids[row, self._num_computed_C[row] : inputs.num_tokens[row]].max(initial=0))
            if highest >= config.vocab_size:
                refused[index] = f"The draft model has {config.vocab_size} tokens, and {highest} is not one of them"
        return refused

    def _reusable(self, rows_S: NDArray[np.int64], lens_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each row, the number of its tokens that are computed. Earlier drafts count if they were accepted."""
        inputs, drafts_SK = self._inputs, self._computed_drafts_CK[rows_S]
        places_SK = self._num_computed_C[rows_S, None] + np.arange(drafts_SK.shape[1])
        within_SK = places_SK.clip(max=inputs.token_ids.shape[1] - 1)
        held_SK = inputs.token_ids[rows_S[:, None], within_SK] == drafts_SK
        num_computed_S: NDArray[np.int64] = self._num_computed_C[rows_S] + held_SK.cumprod(axis=1).sum(axis=1)
        return np.minimum(num_computed_S, lens_S - 1)  # the last token is computed again: its logits are needed

    def _catch_up(
        self, rows_S: NDArray[np.int64], starts_S: NDArray[np.int64], lens_S: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Choose the rows that draft in this step, and compute some missing tokens of the next row.

        Rows with the fewest missing tokens come first, as long as the budget of tokens allows. Their first pass reads
        the missing tokens. The rest of the budget is used now for the next row.

        Returns:
            For each row, the number of tokens that it must still read in later steps.
        """
        missing_S = lens_S - starts_S
        order_S = np.argsort(missing_S, kind="stable")
        ends_S = np.cumsum(missing_S[order_S])
        unread_S = np.empty_like(missing_S)
        unread_S[order_S] = np.clip(ends_S - self._max_tokens, 0, missing_S[order_S])
        some_S = (unread_S > 0) & (unread_S < missing_S)
        if some_S.any():
            ends_S = (lens_S - unread_S)[some_S]
            none = np.zeros(0, dtype=np.int64)
            step = StepRows(rows_S[some_S], starts_S[some_S], ends_S - starts_S[some_S], none)
            self.forward_pass.hidden(self.forward_pass.stage(step))
            self._keep(rows_S[some_S], ends_S)
        return unread_S

    def _draft_one(
        self,
        rows_R: NDArray[np.int64],
        starts_R: NDArray[np.int64],
        ends_R: NDArray[np.int64],
        offset: int,
        earlier: list[Tensor],
    ) -> Tensor:
        """Draw the token after the tokens up to `ends_R`. Tokens before `starts_R` are computed. -1: there is none."""
        step = StepRows(rows_R, starts_R, ends_R - starts_R, np.arange(len(rows_R)))
        staged = self.forward_pass.stage(step, self._draws.parameters(rows_R, offset))
        logits_RV = self.forward_pass.logits(staged, self.forward_pass.hidden(staged))
        vocab_size = self._inputs.sampling.vocab_size
        if logits_RV.shape[1] != vocab_size:
            # If one vocabulary is larger, its further tokens are padding.
            own_RV, width = logits_RV, min(logits_RV.shape[1], vocab_size)
            logits_RV = own_RV.new_full((len(own_RV), vocab_size), -torch.inf)
            logits_RV[:, :width] = own_RV[:, :width]
        return self._draws.draw(logits_RV, step, staged, earlier)

    def _keep(self, rows_S: NDArray[np.int64], lens_S: NDArray[np.int64]) -> None:
        """Note that the first `lens_S` tokens of the rows are computed."""
        first_S, behind_S = self._num_computed_C[rows_S] // self._inputs.block_size, lens_S // self._inputs.block_size
        for row, first, behind in zip(rows_S.tolist(), first_S.tolist(), behind_S.tolist(), strict=True):
            if first < behind:
                self._is_computed_B[self._inputs.block_tables_NCM[self._table, row, first:behind]] = True
        self._num_computed_C[rows_S] = lens_S
        self._computed_drafts_CK[rows_S] = -1
