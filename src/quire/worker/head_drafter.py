"""A drafter with a head. The head reads hidden states of the target, and then its own.

To compute a position, the head needs the target's hidden state at this position and the token of the next position. So
the newest positions of a row wait: their hidden states are kept until the next drafts, or until too many are kept.
Longer pieces, of prompts for example, are computed as soon as the target has computed them. After the known tokens, the
head goes on with its own hidden states. When the target has computed these positions, the head computes its keys and
values there again.

The head's keys and values lie in the pages of the target. If another request has computed a page, its last position may
belong to another token. If that request did not draft, all positions that waited may be missing, 16 as a rule. This can
make drafts wrong, and has no other effect.

Dimensions: S rows, C row capacity, W positions kept of a row, T tokens of a step, N positions, R rows of one pass,
A streams, X elements of all streams of a position, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import gpu
from quire.models.head import Head
from quire.schedule import ScheduledBatch
from quire.worker.captured_steps import CapturedSteps
from quire.worker.draft_draws import DraftDraws
from quire.worker.drafter import ANY_TOKEN, Drafted
from quire.worker.forward_pass import ForwardPass
from quire.worker.input_batch import InputBatch, StepRows
from quire.worker.kv_cache import PagedCache
from quire.worker.target_streams import TargetStreams


class HeadDrafter:
    """A Drafter with a head.

    Args:
        cache: the KV cache of the target, which also has the layers of the head.
        inputs: the rows of the target.
        captured: captured forward passes of the head; None: every pass is run.
        max_tokens: the most tokens that the head reads in one pass.
        num_kept: the most hidden states that are kept for a row: at least those of the newest token and all drafts.
        runs_ahead: whether the device may not have done its work when a call returns.
    """

    def __init__(
        self,
        head: Head,
        streams: TargetStreams,
        cache: PagedCache,
        inputs: InputBatch,
        draws: DraftDraws,
        captured: CapturedSteps | None = None,
        *,
        max_tokens: int,
        num_kept: int,
        runs_ahead: bool,
    ) -> None:
        self._head, self._streams, self._inputs, self._draws = head, streams, inputs, draws
        self._caches = cache.drafter_layers
        self.forward_pass = ForwardPass(head, self._caches, inputs, captured)
        self._max_tokens, self._max_length = max_tokens, head.config.max_model_len
        self._num_kept = num_kept
        capacity = len(inputs.num_tokens)
        # For each row: the first position that the head has not computed, and the end of the kept hidden states.
        self._num_computed_C = np.zeros(capacity, dtype=np.int64)
        self._num_seen_C = np.zeros(capacity, dtype=np.int64)
        # The target's steps since its last drafts, counted from 1 before it has any.
        self._num_steps_C = np.ones(capacity, dtype=np.int64)
        width = self._streams.kept_TX.shape[1]
        self._kept_CWX = torch.empty((capacity, self._num_kept, width), dtype=head.dtype, device=head.device)
        assert self._kept_CWX.dtype == self._streams.kept_TX.dtype, "streams are copied word by word"
        self._picked_TX = torch.empty_like(self._streams.kept_TX)  # the result of _picked
        # The memory of both as numpy has it; None: only the device may write it.
        self._kept_on_host = None if runs_ahead else _words(self._kept_CWX)
        self._given_on_host = None if runs_ahead else _words(self._streams.kept_TX)

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory for hidden states."""
        return sum(each.nbytes for each in (self._kept_CWX, self._streams.kept_TX, self._picked_TX))

    def follow(self, batch: ScheduledBatch) -> None:
        """See Drafter. A new row begins after the positions that other requests have computed."""
        inputs = self._inputs
        while len(self._num_computed_C) < len(inputs.num_tokens):
            self._num_computed_C, self._num_seen_C, self._num_steps_C = (
                np.concatenate([of_C, np.zeros_like(of_C)])
                for of_C in (self._num_computed_C, self._num_seen_C, self._num_steps_C)
            )
            self._kept_CWX = torch.cat([self._kept_CWX, torch.empty_like(self._kept_CWX)])
            self._kept_on_host = None if self._kept_on_host is None else _words(self._kept_CWX)
        if not batch.new_rows:
            return
        starts = dict(zip(batch.request_ids, batch.num_computed_tokens, strict=True))
        for new in batch.new_rows:
            row = inputs.row_of[new.request_id]
            self._num_computed_C[row] = self._num_seen_C[row] = starts[new.request_id]
            self._num_steps_C[row] = 1

    def learn(self, step: StepRows) -> None:
        """See Drafter. Long pieces are computed, and the hidden states of the positions after them are kept."""
        rows_S, starts_S, ends_S = step.rows_S, step.starts_S, step.starts_S + step.lens_S
        if (lost_S := self._num_seen_C[rows_S] < starts_S).any():
            self._num_computed_C[rows_S[lost_S]] = starts_S[lost_S]
        leaving_S = ends_S - self._num_kept
        computed_S = self._num_computed_C[rows_S]
        if (computed_S < leaving_S).any():
            self._read_leaving(step)
            computed_S = np.maximum(self._num_computed_C[rows_S], leaving_S)
            self._num_computed_C[rows_S] = computed_S
        self._keep(step, np.maximum(computed_S, starts_S), ends_S)
        self._num_seen_C[rows_S] = ends_S
        self._num_steps_C[rows_S] += 1

    def _read_leaving(self, step: StepRows) -> None:
        """Compute the positions whose hidden states will not be kept any longer."""
        inputs, rows_S, starts_S, ends_S = self._inputs, step.rows_S, step.starts_S, step.starts_S + step.lens_S
        # A position can be computed if its next token is known, and is no unverified draft.
        known_S = np.minimum(np.minimum(ends_S, inputs.num_tokens[rows_S]) - 1, self._max_length)
        # Some ranks learn a sampled token before others, and all must read the same positions: so the one before waits.
        behind_S = np.minimum(starts_S, known_S) - (known_S <= starts_S)
        self._read(rows_S, behind_S)
        long_S = np.flatnonzero((ends_S - self._num_computed_C[rows_S] > self._num_kept) & (known_S > starts_S))
        if len(long_S):
            long = _without_logits(rows_S[long_S], starts_S[long_S], known_S[long_S] - starts_S[long_S])
            given_TD = self._head.hidden_of(self._picked(_ranges(_firsts(step)[long_S], long.lens_S)))
            self._read_positions(long, given_TD)

    def draft(self, rows: Sequence[int], counts: Sequence[int]) -> Drafted:
        """See Drafter. There is one pass of the head per place.

        If a row had no drafts in the last step, all its positions but the newest one are read before. So its first pass
        takes as long as in the next steps, and this is the time that tells whether drafts pay.
        """
        drafted = Drafted([[ANY_TOKEN] * count for count in counts])
        rows_S, counts_S = np.array(rows), np.array(counts)
        lens_S = self._inputs.num_tokens[rows_S]
        is_ready_S = (self._num_computed_C[rows_S] < lens_S - 1) & (self._num_seen_C[rows_S] >= lens_S - 1)
        drafted.unread = dict.fromkeys(np.flatnonzero(~is_ready_S).tolist(), 1)
        # Rows with the most drafts come first, so the rows of each pass are the first rows of the pass before.
        order_S = np.argsort(-counts_S, kind="stable")
        order_S = order_S[is_ready_S[order_S]]
        if not len(order_S):
            return drafted
        rows_S, counts_S, lens_S = rows_S[order_S], counts_S[order_S], lens_S[order_S]
        started = time.perf_counter()
        is_long = int((lens_S - 1 - self._num_computed_C[rows_S]).sum()) > self._max_tokens
        is_late_S = (self._num_steps_C[rows_S] > 1) | is_long
        self._read(rows_S[is_late_S], lens_S[is_late_S] - 2)
        drafted.read_seconds = time.perf_counter() - started
        starts_S, found = self._num_computed_C[rows_S], list[Tensor]()
        hidden_SD: Tensor | None = None
        for offset in range(int(counts_S[0])):
            num_rows = int((counts_S > offset).sum())
            rows_R, starts_R, ends_R = rows_S[:num_rows], starts_S[:num_rows], lens_S[:num_rows] - 1 + offset
            step = StepRows(rows_R, starts_R, ends_R - starts_R, np.arange(num_rows), ahead=1)
            staged = self.forward_pass.stage(step, self._draws.parameters(rows_R, offset))
            given_TD = self._kept(step) if hidden_SD is None else hidden_SD[:num_rows]
            hidden_TD = self.forward_pass.hidden(staged, given_TD)
            is_one_each = len(hidden_TD) == num_rows
            hidden_SD = hidden_TD if is_one_each else hidden_TD.index_select(0, staged.logits_indices_R)
            logits_RV = self._head.compute_logits(hidden_SD)
            found.append(self._draws.draw(logits_RV, step, staged, found))
            starts_S = ends_R
        self._num_computed_C[rows_S], self._num_steps_C[rows_S] = lens_S - 1, 0
        self._draws.collect(drafted, order_S.tolist(), found)
        return drafted

    def _read(self, rows_S: NDArray[np.int64], ends_S: NDArray[np.int64]) -> None:
        """Compute the rows up to these positions, from the kept hidden states."""
        while (missing_S := (ends_S - self._num_computed_C[rows_S]).clip(min=0)).any():
            lens_S = np.diff(np.minimum(np.cumsum(missing_S), self._max_tokens), prepend=0)
            is_read_S = lens_S > 0
            rows_R, lens_R = rows_S[is_read_S], lens_S[is_read_S]
            step = _without_logits(rows_R, self._num_computed_C[rows_R], lens_R)
            self._read_positions(step, self._kept(step))

    def _read_positions(self, step: StepRows, hidden_TD: Tensor) -> None:
        """Compute the keys and values of a step.

        Args:
            hidden_TD: the target's hidden states at its positions.
        """
        inputs = self._inputs
        self._head.read(inputs.forward_batch(inputs.stage(step), self._caches, hidden_TD))
        self._num_computed_C[step.rows_S] = step.starts_S + step.lens_S

    def _keep(self, step: StepRows, begins_S: NDArray[np.int64], ends_S: NDArray[np.int64]) -> None:
        """Keep the hidden states of these positions. They are the last ones of the rows of the target's step."""
        lens_S = ends_S - begins_S
        num_kept = int(lens_S.sum())
        # Usually all tokens of the step are kept: then no index is needed.
        is_whole = num_kept == int(step.lens_S.sum())
        index_N = None if is_whole else _ranges(_firsts(step) + begins_S - step.starts_S, lens_S)
        places_N = self._places(step.rows_S, begins_S, lens_S)
        if self._kept_on_host is not None and self._given_on_host is not None:
            # The weights have just driven all else out of the caches: then numpy takes 10 us here, and torch 50.
            given = self._given_on_host
            self._kept_on_host[places_N] = given[:num_kept] if index_N is None else given[index_N]
            return
        streams_NX = self._streams.kept_TX[:num_kept] if index_N is None else self._picked(index_N)
        self._kept_CWX.flatten(0, 1).index_copy_(0, self._placed(places_N), streams_NX)

    def _kept(self, step: StepRows) -> Tensor:
        """The kept hidden states of the tokens of a pass, [T, D]."""
        places_T = self._placed(self._places(step.rows_S, step.starts_S, step.lens_S))
        return self._head.hidden_of(self._kept_CWX.flatten(0, 1).index_select(0, places_T))

    def _picked(self, index_N: NDArray[np.int64]) -> Tensor:
        """The target's streams [N, X] of these tokens of its step. The next call overwrites them."""
        return torch.index_select(self._streams.kept_TX, 0, self._placed(index_N), out=self._picked_TX[: len(index_N)])

    def _placed(self, index_N: NDArray[np.int64]) -> Tensor:
        """An index on the device."""
        return gpu.place(torch.from_numpy(index_N), self._kept_CWX.device)

    def _places(
        self, rows_S: NDArray[np.int64], begins_S: NDArray[np.int64], lens_S: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The indices at which these positions of the rows are kept. Each row has a ring buffer."""
        if (lens_S == 1).all():
            return rows_S * self._num_kept + begins_S % self._num_kept
        places_N: NDArray[np.int64] = np.repeat(rows_S, lens_S) * self._num_kept
        return places_N + _ranges(begins_S, lens_S) % self._num_kept


def _words(streams_X: Tensor) -> NDArray[np.int16]:
    """The memory of streams [..., X] on the host, as one row of words for each position."""
    words_NY: NDArray[np.int16] = streams_X.view(-1, streams_X.shape[-1]).view(torch.int16).numpy()
    return words_NY


def _without_logits(rows_R: NDArray[np.int64], starts_R: NDArray[np.int64], lens_R: NDArray[np.int64]) -> StepRows:
    return StepRows(rows_R, starts_R, lens_R, np.zeros(0, dtype=np.int64), ahead=1)


def _firsts(step: StepRows) -> NDArray[np.int64]:
    """The index in a step of each row's first token."""
    firsts_S: NDArray[np.int64] = np.cumsum(step.lens_S) - step.lens_S
    return firsts_S


def _ranges(begins_S: NDArray[np.int64], lens_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers begin, begin + 1, ... of each range, one range after the other."""
    ends_S = np.cumsum(lens_S)
    found_N: NDArray[np.int64] = np.arange(int(ends_S[-1])) + np.repeat(begins_S - (ends_S - lens_S), lens_S)
    return found_N
