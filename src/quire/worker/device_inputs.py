"""The requests a worker holds on a GPU: block tables and newest tokens live there, and a step sends only numbers.

A token that was sampled and has not come back yet is a negative number on the host, which names the row whose newest
token it is; the device puts the token in its place. So a step can be launched before the tokens of the one before it
are known.

Dimensions: T tokens of a step, S rows of a step, R rows that sample, C row capacity, M blocks of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.forward_batch import ForwardBatch, HostStep, LayerCache
from quire.kernels import gpu
from quire.schedule import NewRow
from quire.worker.accelerator import Accelerator
from quire.worker.input_batch import InputBatch, StepRows
from quire.worker.staging import ALIGNMENT, Staging

# Bytes per token and per row of a step, and how many arrays there are: see DeviceInputBatch.stage.
_TOKEN_BYTES, _ROW_BYTES, _NUM_ARRAYS = 3 * 8, 3 * 8 + 2 * 4 + 4 * 4 + 8, 16


@dataclass(frozen=True, slots=True)
class Padding:
    """The size that a step is brought to: of decodes, as many rows as tokens."""

    tokens: int
    rows: int


@dataclass(slots=True)
class StagedStep:
    """One step's numbers on the device. Those before `logits_indices_R` are where every step of the size has them."""

    token_ids_T: Tensor  # int64; -1 - row: the newest token of the row
    positions_T: Tensor  # int64
    slot_mapping_T: Tensor  # int64; -1: padding
    rows_S: Tensor  # int64
    cu_seqlens_q_S1: Tensor  # int32
    seq_lens_S: Tensor  # int32
    logits_indices_R: Tensor  # int64
    sampled_rows_R: Tensor  # int64
    parameters: tuple[Tensor, ...]  # of ops.sample; empty: all rows are greedy
    host: HostStep


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """Where the tokens belong that a step is sampling."""

    rows_R: NDArray[np.int64]
    occupants_R: NDArray[np.int64]  # which of the requests that have had the row
    positions_R: NDArray[np.int64]


class DeviceInputBatch(InputBatch):
    """See InputBatch; the arrays on the host are the truth, but for tokens that are not known yet.

    Args:
        max_num_rows: rows that are ever held at once; there is no growing.
        max_tokens: of one step, padding included.
        steps_in_flight: how many are launched before the first one's result is taken in.
    """

    def __init__(
        self,
        max_num_rows: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        *,
        max_tokens: int,
        accelerator: Accelerator,
        steps_in_flight: int,
    ) -> None:
        super().__init__(max_num_rows, max_model_len, block_size, vocab_size)
        device = accelerator.device
        self._block_tables_CM = torch.zeros((max_num_rows, self.max_blocks), dtype=torch.int32, device=device)
        self._newest_C = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        self._occupant_C = np.zeros(max_num_rows, dtype=np.int64)
        self._new_blocks: list[tuple[int, int, int]] = []  # (row, begin, end) in the tables, not on the device yet
        num_bytes = _TOKEN_BYTES * max_tokens + _ROW_BYTES * max_num_rows + 4 + ALIGNMENT * _NUM_ARRAYS
        self._staging = Staging(accelerator, num_bytes, steps_in_flight + 1)

    def _add(self, new: NewRow) -> None:
        super()._add(new)
        self._occupant_C[self.row_of[new.request_id]] += 1

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        begin = int(self.num_blocks[row])
        super()._append_blocks(row, block_ids)
        self._new_blocks.append((row, begin, begin + len(block_ids)))

    def _grow(self) -> None:
        raise AssertionError(f"more than the {len(self.num_tokens)} rows that memory was planned for")

    def stage(
        self, step: StepRows, parameters: Sequence[NDArray[Any]] = (), pad_to: Padding | None = None
    ) -> StagedStep:
        """Start to bring one step's numbers to the device.

        Args:
            parameters: Sampler.host_parameters of the rows that sample.
            pad_to: tokens and rows behind the step's own write and read nothing.
        """
        rows_S, starts_S, lens_S = step.rows_S, step.starts_S, step.lens_S
        num_rows = len(rows_S)
        ends_S = starts_S + lens_S
        cu_S = np.cumsum(lens_S, dtype=np.int32)
        num_tokens = int(cu_S[-1]) if num_rows else 0
        if num_tokens == num_rows:  # one token each
            row_T, positions_T = rows_S, starts_S
        else:
            row_T = np.repeat(rows_S, lens_S)
            positions_T = np.arange(num_tokens) - np.repeat(cu_S - lens_S - starts_S, lens_S)
        block_T = self.block_tables[row_T, positions_T // self.block_size].astype(np.int64)
        slots_T = block_T * self.block_size + positions_T % self.block_size

        self._write_new_blocks()
        staging = self._staging
        staging.begin()
        width_T, width_S = (num_tokens, num_rows) if pad_to is None else (pad_to.tokens, pad_to.rows)

        def put(values: NDArray[Any], width: int, dtype: type, padding: int) -> Tensor:
            array, view = staging.array(width, dtype)
            array[: len(values)] = values
            array[len(values) :] = padding
            return view

        token_ids = put(self.token_ids[row_T, positions_T], width_T, np.int64, 0)
        positions = put(positions_T, width_T, np.int64, 0)
        slots = put(slots_T, width_T, np.int64, -1)
        rows = put(rows_S, width_S, np.int64, 0)
        seq_lens = put(ends_S, width_S, np.int32, 0)
        sums, cu_seqlens = staging.array(width_S + 1, np.int32)
        sums[0], sums[1 : num_rows + 1], sums[num_rows + 1 :] = 0, cu_S, num_tokens
        sampled = step.samples_S
        staged = StagedStep(
            token_ids_T=token_ids,
            positions_T=positions,
            slot_mapping_T=slots,
            rows_S=rows,
            cu_seqlens_q_S1=cu_seqlens,
            seq_lens_S=seq_lens,
            logits_indices_R=staging.put(cu_S[sampled].astype(np.int64) - 1),
            sampled_rows_R=staging.put(rows_S[sampled]),
            parameters=tuple(staging.put(values) for values in parameters),
            host=HostStep(rows_S, lens_S, ends_S, self.block_tables, None if pad_to is None else pad_to.rows),
        )
        staging.send()
        return staged

    def on_device(self, staged: StagedStep, caches: list[LayerCache], is_prepared: bool = False) -> ForwardBatch:
        """What the forward pass reads. Launches only: it can be captured.

        Args:
            is_prepared: the model's `prepare` has been called for the step.

        Tables have their full width whatever is in use: kernels are compiled for a stride.
        """
        token_ids_T = staged.token_ids_T
        newest_T = self._newest_C.index_select(0, (-1 - token_ids_T).clamp(min=0))
        return ForwardBatch(
            token_ids_T=torch.where(token_ids_T < 0, newest_T, token_ids_T),
            positions_T=staged.positions_T,
            slot_mapping_T=staged.slot_mapping_T,
            cu_seqlens_q_S1=staged.cu_seqlens_q_S1,
            seq_lens_S=staged.seq_lens_S,
            block_tables_SM=self._block_tables_CM.index_select(0, staged.rows_S),
            logits_indices_R=staged.logits_indices_R,
            caches=caches,
            host=None if is_prepared else staged.host,
        )

    def forward_batch(self, step: StepRows, caches: list[LayerCache]) -> ForwardBatch:
        """Pack one step's rows into the tensors a forward pass reads."""
        return self.on_device(self.stage(step), caches)

    def _write_new_blocks(self) -> None:
        """Bring the tables on the device up to date. Where a row was given again, what is in the table now counts."""
        if not self._new_blocks:
            return
        indices, values = [], []
        for row, begin, end in self._new_blocks:
            indices.append(np.arange(row * self.max_blocks + begin, row * self.max_blocks + end))
            values.append(self.block_tables[row, begin:end])
        self._new_blocks.clear()
        both = torch.from_numpy(np.stack((np.concatenate(indices), np.concatenate(values).astype(np.int64))))
        at_N, blocks_N = gpu.place(both, self._block_tables_CM.device)
        self._block_tables_CM.view(-1).scatter_(0, at_N, blocks_N.to(torch.int32))

    def expect_tokens(self, staged: StagedStep, step: StepRows, token_ids_R: Tensor) -> ExpectedTokens:
        """Each sampling row has one more token, which only the device knows: `token_ids_R` (-1: there is none)."""
        self._newest_C.index_copy_(0, staged.sampled_rows_R, token_ids_R.clamp(min=0))
        rows_R = step.rows_S[step.samples_S]
        positions_R = self.num_tokens[rows_R]
        self.token_ids[rows_R, positions_R] = -1 - rows_R
        self.num_tokens[rows_R] += 1
        self.sampling.count_tokens(rows_R)
        return ExpectedTokens(rows_R, self._occupant_C[rows_R], positions_R)

    def learn_tokens(self, expected: ExpectedTokens, token_ids_R: NDArray[np.int64]) -> None:
        """The tokens have come back (-1: there was none). Requests may be gone, and others have their rows."""
        is_here_R = (self._occupant_C[expected.rows_R] == expected.occupants_R) & (token_ids_R >= 0)
        rows, token_ids = expected.rows_R[is_here_R], token_ids_R[is_here_R]
        self.token_ids[rows, expected.positions_R[is_here_R]] = token_ids
        if self.sampling.filters or self.sampling.penalties:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                self.sampling.learn_token(row, token_id)
