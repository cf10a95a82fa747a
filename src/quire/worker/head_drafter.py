"""A head that drafts: it reads hidden states of the target, one position behind, and its own behind those.

To compute a position, the head needs the target's hidden state there and the token behind it. So the newest
positions of a row wait: their hidden states are kept until the next drafts, or until there are too many of them. Longer
pieces are computed when the target has computed them. After the true positions the head goes on with its own hidden
states; its keys and values there are computed again when the target has computed these positions.

Its keys and values lie in the pages of the target. The last ones of a page that another request has computed may be
missing, or of another token: this costs a draft, and never more.

Dimensions: S rows, C row capacity, W positions kept of a row, T tokens of a step, N positions, R rows of one pass,
A streams, X elements of all streams of a position, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.distributed.group import Group
from quire.kernels import gpu
from quire.models.decoder import Decoder
from quire.models.head import Head
from quire.schedule import ScheduledBatch
from quire.worker.accelerator import Device
from quire.worker.captured_steps import CapturedSteps
from quire.worker.draft_draws import DraftDraws
from quire.worker.drafter import ANY_TOKEN, Drafted
from quire.worker.forward_pass import ForwardPass
from quire.worker.input_batch import InputBatch, StagedStep, StepRows
from quire.worker.kv_cache import PagedCache


class TargetStreams:
    """The hidden states of the target's last step, which a head reads.

    Args:
        max_tokens: the most tokens of a step.
    """

    def __init__(self, target: Decoder, head: Head, max_tokens: int) -> None:
        shape = (max_tokens, len(head.head.streams), head.head.stream_size)
        kept_TAD = torch.empty(shape, dtype=head.dtype, device=head.device)
        target.keep_streams(head.head.streams, kept_TAD)
        self.kept_TX = kept_TAD.view(max_tokens, -1)
        self.picked_TX = torch.empty_like(self.kept_TX)  # some of them, side by side

    def of(self, index_N: NDArray[np.int64]) -> Tensor:
        """The streams of these tokens, in memory that the next call overwrites."""
        at_N = gpu.place(torch.from_numpy(index_N), self.kept_TX.device)
        return torch.index_select(self.kept_TX, 0, at_N, out=self.picked_TX[: len(index_N)])


class HeadDrafter:
    """See Drafter.

    Args:
        cache: the cache of the target, with the layers of the head.
        inputs: the inputs of the target.
        captured: forward passes of the head that are repeated instead of run.
        max_tokens: the most tokens that it reads in one pass.
        num_kept: positions of a row whose hidden states may wait: at least for the newest token and all drafts.
        is_greedy: whether it drafts its likeliest token even if the request samples.
        group: the ranks that share the target.
    """

    def __init__(
        self,
        head: Head,
        streams: TargetStreams,
        cache: PagedCache,
        inputs: InputBatch,
        device: Device,
        captured: CapturedSteps | None = None,
        *,
        max_tokens: int,
        num_kept: int,
        is_greedy: bool,
        group: Group | None = None,
    ) -> None:
        self._head, self._streams, self._inputs = head, streams, inputs
        self._draws = DraftDraws(inputs, device, is_greedy=is_greedy, group=group)
        self.forward_pass = ForwardPass(head, cache.drafter_layers, inputs, captured)
        self._max_tokens, self._max_length = max_tokens, head.config.max_model_len
        self._num_kept = num_kept
        capacity = len(inputs.num_tokens)
        # Of each row: the first position that is not computed, and the position after the last hidden state.
        self._num_computed_C = np.zeros(capacity, dtype=np.int64)
        self._num_seen_C = np.zeros(capacity, dtype=np.int64)
        width = self._streams.kept_TX.shape[1]
        self._kept_CWX = torch.empty((capacity, self._num_kept, width), dtype=head.dtype, device=head.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all hidden states that are kept."""
        return sum(each.nbytes for each in (self._kept_CWX, self._streams.kept_TX, self._streams.picked_TX))

    def follow(self, batch: ScheduledBatch) -> None:
        """See Drafter: a new row has the positions that others have computed."""
        inputs = self._inputs
        while len(self._num_computed_C) < len(inputs.num_tokens):
            self._num_computed_C, self._num_seen_C = (
                np.concatenate([of_C, np.zeros_like(of_C)]) for of_C in (self._num_computed_C, self._num_seen_C)
            )
            self._kept_CWX = torch.cat([self._kept_CWX, torch.empty_like(self._kept_CWX)])
        if not batch.new_rows:
            return
        starts = dict(zip(batch.request_ids, batch.num_computed_tokens, strict=True))
        for new in batch.new_rows:
            row = inputs.row_of[new.request_id]
            self._num_computed_C[row] = self._num_seen_C[row] = starts[new.request_id]

    def learn(self, step: StepRows) -> None:
        """See Drafter: long pieces are computed, and the hidden states of the positions behind are kept."""
        inputs = self._inputs
        rows_S, starts_S, ends_S = step.rows_S, step.starts_S, step.starts_S + step.lens_S
        computed_C, num_kept = self._num_computed_C, self._num_kept
        firsts_S = np.cumsum(step.lens_S) - step.lens_S
        lost_S = self._num_seen_C[rows_S] < starts_S
        computed_C[rows_S[lost_S]] = starts_S[lost_S]
        if (ends_S - computed_C[rows_S] > num_kept).any():
            # Positions whose token behind them is known to be true.
            known_S = np.minimum(np.minimum(ends_S, inputs.num_tokens[rows_S]) - 1, self._max_length)
            behind_S = np.minimum(starts_S, known_S)
            behind_S -= inputs.token_ids[rows_S, behind_S] < 0  # sampled, and not known on the host
            self._read(rows_S, behind_S)
            long_S = np.flatnonzero((ends_S - computed_C[rows_S] > num_kept) & (known_S > starts_S))
            if len(long_S):
                self._read_step(rows_S[long_S], starts_S[long_S], known_S[long_S], firsts_S[long_S])
        begins_S = np.maximum(np.maximum(computed_C[rows_S], starts_S), ends_S - num_kept)
        self._keep(rows_S, begins_S, ends_S, firsts_S + begins_S - starts_S, int(step.lens_S.sum()))
        computed_C[rows_S] = np.maximum(computed_C[rows_S], ends_S - num_kept)
        self._num_seen_C[rows_S] = ends_S

    def draft(self, rows: Sequence[int], counts: Sequence[int]) -> Drafted:
        """See Drafter: a pass per place."""
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
        if int((lens_S - 1 - self._num_computed_C[rows_S]).sum()) > self._max_tokens:
            self._read(rows_S, lens_S - 2)
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
        self._num_computed_C[rows_S] = lens_S - 1
        self._draws.collect(drafted, order_S.tolist(), found)
        return drafted

    def _read(self, rows_S: NDArray[np.int64], ends_S: NDArray[np.int64]) -> None:
        """Compute the rows up to these positions, from hidden states that are kept."""
        while (missing_S := (ends_S - self._num_computed_C[rows_S]).clip(min=0)).any():
            lens_S = np.diff(np.minimum(np.cumsum(missing_S), self._max_tokens), prepend=0)
            is_read_S = lens_S > 0
            rows_R, lens_R = rows_S[is_read_S], lens_S[is_read_S]
            step, staged = self._stage(rows_R, self._num_computed_C[rows_R], lens_R)
            self.forward_pass.hidden(staged, self._kept(step))
            self._num_computed_C[rows_R] += lens_R

    def _read_step(
        self,
        rows_R: NDArray[np.int64],
        starts_R: NDArray[np.int64],
        ends_R: NDArray[np.int64],
        firsts_R: NDArray[np.int64],
    ) -> None:
        """Compute these positions from the hidden states of the target's step, where each row begins at `firsts_R`."""
        step, staged = self._stage(rows_R, starts_R, ends_R - starts_R)
        given_TD = self._head.hidden_of(self._streams.of(_ranges(firsts_R, step.lens_S)))
        self.forward_pass.hidden(staged, given_TD)
        self._num_computed_C[rows_R] = ends_R

    def _stage(
        self, rows_R: NDArray[np.int64], starts_R: NDArray[np.int64], lens_R: NDArray[np.int64]
    ) -> tuple[StepRows, StagedStep]:
        step = StepRows(rows_R, starts_R, lens_R, np.zeros(0, dtype=np.int64), ahead=1)
        return step, self.forward_pass.stage(step)

    def _keep(
        self,
        rows_S: NDArray[np.int64],
        begins_S: NDArray[np.int64],
        ends_S: NDArray[np.int64],
        firsts_S: NDArray[np.int64],
        num_tokens: int,
    ) -> None:
        """Keep the hidden states of these positions.

        Args:
            firsts_S: the first of each row in the target's step, which has `num_tokens` tokens.
        """
        lens_S = ends_S - begins_S
        num_kept = int(lens_S.sum())
        # The usual step is kept as a whole.
        streams_NX = (
            self._streams.kept_TX[:num_kept] if num_kept == num_tokens else self._streams.of(_ranges(firsts_S, lens_S))
        )
        self._kept_CWX.view(-1, streams_NX.shape[1]).index_copy_(0, self._places(rows_S, begins_S, lens_S), streams_NX)

    def _kept(self, step: StepRows) -> Tensor:
        """hidden_TD of the tokens of a pass, from the kept ones."""
        places_T = self._places(step.rows_S, step.starts_S, step.lens_S)
        return self._head.hidden_of(self._kept_CWX.flatten(0, 1).index_select(0, places_T))

    def _places(self, rows_S: NDArray[np.int64], begins_S: NDArray[np.int64], lens_S: NDArray[np.int64]) -> Tensor:
        """Where these positions of the rows are kept: each row has a ring."""
        places_N = np.repeat(rows_S, lens_S) * self._num_kept + _ranges(begins_S, lens_S) % self._num_kept
        return gpu.place(torch.from_numpy(places_N), self._kept_CWX.device)


def _ranges(begins_S: NDArray[np.int64], lens_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ranges of these lengths from each of these numbers, one after the other."""
    ends_S = np.cumsum(lens_S)
    found_N: NDArray[np.int64] = np.arange(int(ends_S[-1])) + np.repeat(begins_S - (ends_S - lens_S), lens_S)
    return found_N
