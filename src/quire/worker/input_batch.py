"""The requests of a worker, as rows of persistent arrays. A step touches only the rows that changed.

A sampled token that the host does not know yet is the negative number -1 - row: the newest token of this row. So a step
can be launched before the tokens of the step before it are known.

Dimensions: T tokens of a step, S rows of a step, R rows of logits, C row capacity, M blocks of the longest table,
N block tables of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from quire.distributed.layout import ALL_PAGES, PageShare
from quire.forward_batch import ForwardBatch, HostStep, LaneRows, LayerCache, StepTable
from quire.grammar.matchers import Grammars
from quire.sampling.batch_params import SamplingState
from quire.schedule import MAX_FORCED_TOKENS, NewRow, RowsFailedError, ScheduledBatch
from quire.worker.drafts import Drafts

NOBODY = -1  # stands in place of an occupant if the token of the row is known


@dataclass(slots=True)
class StepRows:
    """The rows of one step: their indices in the persistent arrays, and which of them need logits."""

    rows_S: NDArray[np.int64]
    starts_S: NDArray[np.int64]  # the number of tokens of the row that were computed before this step
    lens_S: NDArray[np.int64]  # the number of tokens of the row in this step
    sampling_R: NDArray[np.int64]  # for each row of logits, the position of its row in the batch
    drafts: Drafts | None = None
    ahead: int = 0  # each position reads the token that comes this number of places later; 1: for a head that drafts
    adapter_slots_S: NDArray[np.int32] | None = None  # None: no row has an adapter, or the model takes none
    lane_tokens: Sequence[int] = ()  # the tokens of this step in each lane; empty: there is one lane

    def expecting(self) -> NDArray[np.int64]:
        """Positions in the batch of the rows that sample exactly one token. Rows with drafts may get more."""
        return self.sampling_R if self.drafts is None else self.sampling_R[self.drafts.plain_R]


@dataclass(frozen=True, slots=True)
class Padding:
    """The size to which a step is padded. Tokens and rows of the padding read and write nothing."""

    tokens: int
    rows: int
    has_adapters: bool = False


@dataclass(slots=True)
class StagedStep:
    """The numbers of one step on the device.

    In all steps that are padded to one size, the fields before `logits_indices_R` have the same addresses.
    """

    token_ids_T: Tensor  # int64; -1 - row means the newest token of the row
    positions_T: Tensor  # int64
    slot_mappings_T: list[Tensor]  # one for each block table, int64; -1: padding
    rows_S: Tensor  # int64
    cu_seqlens_q_S1: Tensor  # int32
    seq_lens_S: Tensor  # int32
    adapter_slots_T: Tensor | None  # int32; None: no row has an adapter
    logits_indices_R: Tensor  # int64
    adapter_slots_R: Tensor | None  # int32: the adapters of the rows of logits; None: no row has an adapter
    expecting_rows: Tensor  # int64: the rows of the positions StepRows.expecting
    parameters: tuple[Tensor, ...]  # the parameters of ops.sample; empty: all rows are greedy
    host: HostStep
    num_tokens: int  # without padding
    padding: Padding | None  # None: the step was not padded to a size
    lanes: LaneRows | None = None  # None: there is one lane


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """The places of the tokens that a step samples: for N rows without drafts, and for the rows with drafts.

    An occupant is the number of a request among all requests that have had the row. It shows whether a row still has
    the same request when the tokens come back.
    """

    at_N: NDArray[np.int64]  # positions in the batch
    rows_N: NDArray[np.int64]
    occupants_N: NDArray[np.int64]  # the occupants of the rows, or NOBODY
    positions_N: NDArray[np.int64]
    verifying: list[tuple[int, int, int]]  # of each row with drafts: position in the batch, row, occupant

    def known(self) -> set[int]:
        """Positions in the batch of rows that know their next token already. Samples of these rows mean nothing."""
        return set(self.at_N[self.occupants_N == NOBODY].tolist())

    def owners(self) -> Iterator[tuple[int, int, int]]:
        """For each row that samples: its position in the batch, the row, and its occupant."""
        yield from zip(self.at_N.tolist(), self.rows_N.tolist(), self.occupants_N.tolist(), strict=True)
        yield from self.verifying


class StepArrays(Protocol):
    """The memory where the host writes the numbers of a step for the device: worker.staging, or host memory."""

    def begin(self) -> None:
        """Begin a step, before its first array."""
        ...

    def array(self, count: int, dtype: DTypeLike) -> tuple[NDArray[Any], Tensor]:
        """A new array that the caller fills before `send`, and the tensor that has its numbers afterwards."""
        ...

    def send(self) -> None:
        """Bring all arrays since `begin` to the device. The caller has filled them."""
        ...


class HostArrays:
    """StepArrays of a device that computes in the host's memory. Each array has memory of its own."""

    def begin(self) -> None:
        """There is nothing to begin."""

    def array(self, count: int, dtype: DTypeLike) -> tuple[NDArray[Any], Tensor]:
        values = np.empty(count, dtype=dtype)
        return values, torch.from_numpy(values)

    def send(self) -> None:
        """There is nothing to send: the device reads the memory that the host has written."""


class InputBatch:
    """Token ids, block tables and sampling state of every request that the scheduler has not removed.

    The capacity grows by doubling, because max_num_seqs may change while serving.

    Args:
        max_num_rows: the capacity at the start.
        num_tables: the number of block tables of a request.
        adapters: the slots of the adapters in memory, by digest. They may change between steps.
        arrays: the memory for a step's numbers; None: host memory, where the step is computed too.
        pages: the pages of the KV cache that this rank has.
        has_grammars: whether this rank samples the rows with a grammar. If not, another rank samples them.
    """

    def __init__(
        self,
        max_num_rows: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        num_tables: int = 1,
        adapters: Mapping[str, int] = MappingProxyType({}),
        *,
        arrays: StepArrays | None = None,
        pages: PageShare = ALL_PAGES,
        has_grammars: bool = True,
    ) -> None:
        self.block_size = block_size
        self.num_tables = num_tables
        self.max_blocks = -(-max_model_len // block_size)
        # A row has one place more than the context length: the token that is sampled at the limit is stored too.
        self.token_ids = np.zeros((max_num_rows, max_model_len + 1), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_rows, dtype=np.int64)
        self.block_tables_NCM = np.zeros((num_tables, max_num_rows, self.max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_rows, dtype=np.int64)
        self.rope_offsets = np.zeros(max_num_rows, dtype=np.int64)
        self.num_prompt_logprobs: dict[int, int] = {}  # row -> the number of top logprobs for each prompt token
        self.sampling = SamplingState(max_num_rows, vocab_size)
        self.grammars = Grammars(vocab_size)
        self._has_grammars = has_grammars
        self.row_of: dict[str, int] = {}
        self._pages = pages
        self._arrays: StepArrays = HostArrays() if arrays is None else arrays
        self._adapters = adapters
        self._adapter_slots_C = np.full(max_num_rows, -1, dtype=np.int32)
        self._num_with_adapter = 0
        self._occupant_C = np.zeros(max_num_rows, dtype=np.int64)
        self._free_rows = list(range(max_num_rows - 1, -1, -1))

    def apply(self, batch: ScheduledBatch) -> None:
        """Remove, add and extend rows, in the order that ScheduledBatch prescribes.

        Raises:
            RowsFailedError: a request cannot be added; the error names it. A worker refuses a request here, because it
                reads the request's parameters only here.
        """
        for request_id in batch.removed_request_ids:
            row = self.row_of.pop(request_id, None)
            if row is not None:
                self.sampling.remove_row(row)
                self.num_prompt_logprobs.pop(row, None)
                self._free_rows.append(row)
                self._num_with_adapter -= int(self._adapter_slots_C[row] >= 0)
        for new in batch.new_rows:
            if new.wants_vector:
                raise RowsFailedError([new.request_id], "The model gives tokens, and no vector of a prompt.")
            if new.adapter is not None and new.adapter not in self._adapters:
                raise RowsFailedError([new.request_id], f"The adapter {new.adapter!r} is not in memory.")
            try:
                self._add(new)
            except Exception as error:
                message = f"The request could not be prepared ({type(error).__name__})."
                raise RowsFailedError([new.request_id], message) from error
        for request_id, block_ids in zip(batch.request_ids, batch.new_block_ids, strict=True):
            if block_ids:
                self._append_blocks(self.row_of[request_id], block_ids)
        for request_id, begin, token_ids in batch.forced_tokens:
            row, end = self.row_of[request_id], begin + len(token_ids)
            self.token_ids[row, begin:end], self.num_tokens[row] = token_ids, end
        if any(batch.draft_token_ids):
            for request_id, drafts in zip(batch.request_ids, batch.draft_token_ids, strict=True):
                self.place_drafts(self.row_of[request_id], drafts)

    def _add(self, new: NewRow) -> None:
        assert new.request_id not in self.row_of, f"row of {new.request_id} is added twice"
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self.row_of[new.request_id] = row
        self._occupant_C[row] += 1
        count = len(new.token_ids)
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row], self.num_prompt_tokens[row] = count, new.num_prompt_tokens
        self.num_blocks[row], self.rope_offsets[row] = 0, new.rope_offset
        self._append_blocks(row, new.block_ids)
        slot = -1 if new.adapter is None else self._adapters[new.adapter]
        self._adapter_slots_C[row] = slot
        self._num_with_adapter += int(slot >= 0)
        params = new.sampling_params
        prompt, output = new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :]
        if params.prompt_logprobs is not None and not output:  # a request with output has reported them already
            self.num_prompt_logprobs[row] = params.prompt_logprobs
        grammar = None
        if params.grammar is not None and self._has_grammars:
            grammar = self.grammars.row(params.grammar, output)
        self.sampling.add_row(row, params, prompt, output, new.stop_token_ids, grammar)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        begin = self.num_blocks[row]
        end = begin + len(block_ids) // self.num_tables
        self.block_tables_NCM[:, row, begin:end] = np.reshape(block_ids, (-1, self.num_tables)).T
        self.num_blocks[row] = end

    def _grow(self) -> None:
        capacity = len(self.num_tokens)
        self.token_ids = np.concatenate([self.token_ids, np.zeros_like(self.token_ids)])
        tables_NCM = self.block_tables_NCM
        self.block_tables_NCM = np.concatenate([tables_NCM, np.zeros_like(tables_NCM)], axis=1)
        for name in (
            "num_tokens",
            "num_prompt_tokens",
            "num_blocks",
            "rope_offsets",
            "_adapter_slots_C",
            "_occupant_C",
        ):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self.sampling.grow(2 * capacity)
        self._free_rows = list(range(2 * capacity - 1, capacity - 1, -1))

    def place_drafts(self, row: int, token_ids: Sequence[int]) -> None:
        """Write drafts after the tokens of the row."""
        begin = self.num_tokens[row]
        self.token_ids[row, begin : begin + len(token_ids)] = token_ids

    def place_guesses(self, step: StepRows, staged: StagedStep, token_ids_S: Tensor) -> None:
        """Write the tokens that follow the tokens of a staged step, for the next pass. -1: any token may stand here."""
        ends_S = step.starts_S + step.lens_S + step.ahead
        self.token_ids[step.rows_S, ends_S] = token_ids_S.clamp(min=0).numpy()

    def step_rows(self, batch: ScheduledBatch) -> StepRows:
        """The rows of one scheduled batch."""
        rows_S = np.fromiter((self.row_of[r] for r in batch.request_ids), dtype=np.int64, count=len(batch.request_ids))
        starts_S = np.array(batch.num_computed_tokens, dtype=np.int64)
        lens_S = np.array(batch.num_scheduled_tokens, dtype=np.int64)
        slots_S: NDArray[np.int32] | None = self._adapter_slots_C[rows_S] if self._num_with_adapter else None
        if slots_S is not None and slots_S.max(initial=-1) < 0:
            slots_S = None
        drafts = Drafts.of(batch.num_logits, batch.draft_token_ids) if any(batch.draft_token_ids) else None
        sampling_R = np.flatnonzero(batch.num_logits) if drafts is None else drafts.sampling_R
        lanes = batch.lane_tokens
        return StepRows(rows_S, starts_S, lens_S, sampling_R, drafts, adapter_slots_S=slots_S, lane_tokens=lanes)

    def stage(
        self, step: StepRows, parameters: Sequence[NDArray[Any]] = (), pad_to: Padding | None = None
    ) -> StagedStep:
        """Start to bring the numbers of one step to the device.

        Args:
            parameters: Sampler.host_parameters of the rows of logits.
            pad_to: the size to which the step is padded; None: it is not padded.
        """
        rows_S, lens_S = step.rows_S, step.lens_S
        ends_S, cu_S = step.starts_S + lens_S, np.cumsum(lens_S, dtype=np.int32)
        num_rows, num_tokens = len(rows_S), int(cu_S[-1]) if len(cu_S) else 0
        row_T, positions_T = self._tokens(step, cu_S, num_tokens)
        arrays = self._arrays
        arrays.begin()
        width_T, width_S = (num_tokens, num_rows) if pad_to is None else (pad_to.tokens, pad_to.rows)

        def put(values: NDArray[Any], width: int, dtype: DTypeLike, padding: int = 0) -> Tensor:
            array, tensor = arrays.array(width, dtype)
            array[: len(values)] = values
            array[len(values) :] = padding
            return tensor

        token_ids = put(self.token_ids[row_T, positions_T + step.ahead], width_T, np.int64)
        positions = put(positions_T + self.rope_offsets[row_T], width_T, np.int64)
        slots = [put(slots_T, width_T, np.int64, -1) for slots_T in self._slots(row_T, positions_T)]
        rows = put(rows_S, width_S, np.int64)
        seq_lens = put(ends_S, width_S, np.int32)
        sums, cu_seqlens = arrays.array(width_S + 1, np.int32)
        sums[0], sums[1 : num_rows + 1], sums[num_rows + 1 :] = 0, cu_S, num_tokens
        adapters_S, adapters_T = step.adapter_slots_S, None
        if adapters_S is None and pad_to is not None and pad_to.has_adapters:
            adapters_S = np.full(num_rows, -1, dtype=np.int32)
        if adapters_S is not None:
            adapters_T = adapters_S if num_tokens == num_rows else np.repeat(adapters_S, lens_S)
        adapter_slots = None if adapters_T is None else put(adapters_T, width_T, np.int32, -1)
        last_R, expecting_rows = cu_S[step.sampling_R] - 1, rows_S[step.expecting()]
        if step.drafts is not None:
            last_R -= step.drafts.remaining_R
        staged = StagedStep(
            token_ids_T=token_ids,
            positions_T=positions,
            slot_mappings_T=slots,
            rows_S=rows,
            cu_seqlens_q_S1=cu_seqlens,
            seq_lens_S=seq_lens,
            adapter_slots_T=adapter_slots,
            logits_indices_R=put(last_R, len(last_R), np.int64),
            adapter_slots_R=None if adapters_T is None else put(adapters_T[last_R], len(last_R), np.int32),
            expecting_rows=put(expecting_rows, len(expecting_rows), np.int64),
            parameters=tuple(put(values, len(values), values.dtype) for values in parameters),
            host=HostStep(rows_S, lens_S, ends_S, self.block_tables_NCM, None if pad_to is None else pad_to.rows),
            num_tokens=num_tokens,
            padding=pad_to,
            lanes=LaneRows.of(step.lane_tokens),
        )
        arrays.send()
        return staged

    @staticmethod
    def _tokens(
        step: StepRows, cu_S: NDArray[np.int32], num_tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The row and the position of each token of a step. `cu_S`: the sums of `lens_S`."""
        if num_tokens == len(cu_S):  # each row has one token
            return step.rows_S, step.starts_S
        firsts_S = cu_S - step.lens_S
        positions_T = np.arange(num_tokens) - np.repeat(firsts_S - step.starts_S, step.lens_S)
        return np.repeat(step.rows_S, step.lens_S), positions_T

    def _slots(self, row_T: NDArray[np.int64], positions_T: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """For each block table, the slots of these tokens in this rank's cache; -1: another rank has the page."""
        block_T, offsets_T = np.divmod(positions_T, self.block_size)
        for table_CM in self.block_tables_NCM:
            pages_T = table_CM[row_T, block_T].astype(np.int64)
            if self._pages.num_owners == 1:
                yield pages_T * self.block_size + offsets_T
                continue
            own_T, owners_T = np.divmod(pages_T, self._pages.num_owners)
            yield np.where(owners_T == self._pages.owner, own_T * self.block_size + offsets_T, -1)

    def forward_batch(
        self, staged: StagedStep, caches: list[LayerCache], hidden_TD: Tensor | None = None
    ) -> ForwardBatch:
        """The inputs of the forward pass of a step whose tokens are all known."""
        rows_S = staged.rows_S.numpy()
        num_table_blocks = -(-int(staged.host.seq_lens_S.max()) // self.block_size)
        return ForwardBatch(
            token_ids_T=staged.token_ids_T,
            positions_T=staged.positions_T,
            cu_seqlens_q_S1=staged.cu_seqlens_q_S1,
            seq_lens_S=staged.seq_lens_S,
            tables=tuple(
                StepTable(slots_T, torch.from_numpy(table_CM[rows_S, :num_table_blocks]))
                for slots_T, table_CM in zip(staged.slot_mappings_T, self.block_tables_NCM, strict=True)
            ),
            caches=caches,
            adapter_slots_T=staged.adapter_slots_T,
            hidden_TD=hidden_TD,
            lanes=staged.lanes,
        )

    def expect_tokens(self, staged: StagedStep, step: StepRows, token_ids_R: Tensor) -> ExpectedTokens:
        """Give each row without drafts one more token, which only the device knows.

        A row that knows this token already gets none: a grammar has forced it after the token of the step before.

        Args:
            token_ids_R: the sampled tokens on the device, int64; -1: a row has none.
        """
        at_N = step.expecting()
        rows_N, positions_N = step.rows_S[at_N], step.starts_S[at_N] + step.lens_S[at_N]
        occupants_N, new_rows, new_positions = self._occupant_C[rows_N], rows_N, positions_N
        if (is_known_N := positions_N < self.num_tokens[rows_N]).any():
            occupants_N[is_known_N] = NOBODY
            new_rows, new_positions = rows_N[~is_known_N], positions_N[~is_known_N]
        self.token_ids[new_rows, new_positions] = -1 - new_rows
        self.num_tokens[new_rows] += 1
        self.sampling.count_tokens(new_rows)
        verifying = []
        for at, _, _ in () if step.drafts is None else step.drafts.rows:
            row = int(step.rows_S[at])
            verifying.append((at, row, int(self._occupant_C[row])))
        return ExpectedTokens(at_N, rows_N, occupants_N, positions_N, verifying)

    def learn_tokens(self, expected: ExpectedTokens, token_ids_N: NDArray[np.int64]) -> None:
        """Take in the tokens that have come back (-1: there was none). A row may have another request by now."""
        is_here_N = self._occupant_C[expected.rows_N] == expected.occupants_N
        rows, token_ids = expected.rows_N[is_here_N], token_ids_N[is_here_N]
        # A failed row may be in a batch that is scheduled already. Then its step computes a token that nobody reads.
        self.token_ids[rows, expected.positions_N[is_here_N]] = token_ids.clip(min=0)
        if self.sampling.follows_tokens:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if token_id >= 0:
                    self.sampling.learn_token(row, token_id)

    def learn_step(self, expected: ExpectedTokens, token_ids: Sequence[Sequence[int]]) -> None:
        """Take in the tokens of a step that another worker has sampled.

        Args:
            token_ids: the tokens by position in the batch, as in StepResult.
        """
        at_N = expected.at_N.tolist()
        self.learn_tokens(expected, np.array([token_ids[at][0] if token_ids[at] else -1 for at in at_N]))
        for index, (position, _, _) in enumerate(expected.verifying):
            self.learn_verified(expected, index, token_ids[position])

    def take_forced(self, row: int, occupant: int) -> list[int]:
        """Append the tokens that a grammar forces after the tokens of a row, unless the row has another request now."""
        if self._occupant_C[row] != occupant:
            return []
        begin = self.num_tokens[row]
        token_ids = self.sampling.take_forced(row, min(MAX_FORCED_TOKENS, self.token_ids.shape[1] - int(begin)))
        self.token_ids[row, begin : begin + len(token_ids)] = token_ids
        self.num_tokens[row] += len(token_ids)
        return token_ids

    def learn_verified(self, expected: ExpectedTokens, index: int, token_ids: Sequence[int]) -> None:
        """Take in the tokens of one row with drafts: the drafts that held, and the token after them.

        Args:
            index: the index of the row in `expected.verifying`.
        """
        _, row, occupant = expected.verifying[index]
        if self._occupant_C[row] != occupant:
            return
        begin = self.num_tokens[row]
        self.token_ids[row, begin : begin + len(token_ids)] = token_ids
        self.num_tokens[row] += len(token_ids)
        self.sampling.count_tokens(np.array([row]), len(token_ids))
        for token_id in token_ids:
            self.sampling.learn_token(row, token_id)
