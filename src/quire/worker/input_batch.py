"""The requests a worker holds, as rows of persistent arrays: a step touches only the rows that changed.

Dimensions: T tokens of a step, S rows of a step, M blocks of the longest table of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.forward_batch import ForwardBatch, LayerCache
from quire.sampling.batch_params import SamplingState
from quire.schedule import NewRow, RowsFailedError, ScheduledBatch


@dataclass(slots=True)
class StepRows:
    """The rows of one step: index in the persistent arrays, and which of them sample."""

    rows_S: np.ndarray  # int64
    samples_S: np.ndarray  # bool: the step reaches the row's last known token
    starts_S: np.ndarray  # int64: tokens computed before this step
    lens_S: np.ndarray  # int64: tokens of this step


class InputBatch:
    """Token ids, block tables and sampling state of every request the scheduler has not removed.

    Capacity grows by doubling, because max_num_seqs may move while serving.
    """

    def __init__(self, max_num_rows: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        # One slot more than the context: the token sampled at the limit is stored too.
        self.token_ids = np.zeros((max_num_rows, max_model_len + 1), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_rows, dtype=np.int64)
        self.block_tables = np.zeros((max_num_rows, self.max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_rows, dtype=np.int64)
        self.num_prompt_logprobs: dict[int, int] = {}  # row -> top-n wanted for the prompt
        self.sampling = SamplingState(max_num_rows, vocab_size)
        self.row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_rows - 1, -1, -1))

    def apply(self, batch: ScheduledBatch) -> None:
        """Remove, add and extend rows, in the order ScheduledBatch prescribes.

        Raises RowsFailedError naming the request that cannot be added: its parameters are read here and nowhere else.
        """
        for request_id in batch.removed_request_ids:
            row = self.row_of.pop(request_id, None)
            if row is not None:
                self.sampling.remove_row(row)
                self.num_prompt_logprobs.pop(row, None)
                self._free_rows.append(row)
        for new in batch.new_rows:
            try:
                self._add(new)
            except Exception as error:
                message = f"The request could not be prepared ({type(error).__name__})."
                raise RowsFailedError([new.request_id], message) from error
        for request_id, block_ids in zip(batch.request_ids, batch.new_block_ids, strict=True):
            if block_ids:
                self._append_blocks(self.row_of[request_id], block_ids)

    def _add(self, new: NewRow) -> None:
        assert new.request_id not in self.row_of, f"row of {new.request_id} is added twice"
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self.row_of[new.request_id] = row
        count = len(new.token_ids)
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row], self.num_prompt_tokens[row] = count, new.num_prompt_tokens
        self.num_blocks[row] = 0
        self._append_blocks(row, new.block_ids)
        params = new.sampling_params
        prompt, output = new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :]
        if params.prompt_logprobs is not None and not output:  # with output, they were reported with its first token
            self.num_prompt_logprobs[row] = params.prompt_logprobs
        self.sampling.add_row(row, params, prompt, output, new.stop_token_ids)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        begin = self.num_blocks[row]
        self.block_tables[row, begin : begin + len(block_ids)] = block_ids
        self.num_blocks[row] = begin + len(block_ids)

    def _grow(self) -> None:
        capacity = len(self.num_tokens)
        self.token_ids = np.concatenate([self.token_ids, np.zeros_like(self.token_ids)])
        self.block_tables = np.concatenate([self.block_tables, np.zeros_like(self.block_tables)])
        for name in ("num_tokens", "num_prompt_tokens", "num_blocks"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self.sampling.grow(2 * capacity)
        self._free_rows = list(range(2 * capacity - 1, capacity - 1, -1))

    def step_rows(self, batch: ScheduledBatch) -> StepRows:
        """The arrays' view of one scheduled batch."""
        rows_S = np.fromiter((self.row_of[r] for r in batch.request_ids), dtype=np.int64, count=len(batch.request_ids))
        starts_S = np.array(batch.num_computed_tokens, dtype=np.int64)
        lens_S = np.array(batch.num_scheduled_tokens, dtype=np.int64)
        return StepRows(rows_S, starts_S + lens_S == self.num_tokens[rows_S], starts_S, lens_S)

    def forward_batch(self, step: StepRows, caches: list[LayerCache]) -> ForwardBatch:
        """Pack one step's rows into the tensors a forward pass reads."""
        rows_S, starts_S, lens_S = step.rows_S, step.starts_S, step.lens_S
        ends_S = starts_S + lens_S
        cu_S1 = np.zeros(len(rows_S) + 1, dtype=np.int32)
        np.cumsum(lens_S, out=cu_S1[1:])
        if cu_S1[-1] == len(rows_S):  # one token each
            row_T, positions_T = rows_S, starts_S
        else:
            row_T = np.repeat(rows_S, lens_S)
            positions_T = np.arange(cu_S1[-1]) - np.repeat(cu_S1[:-1] - starts_S, lens_S)
        block_T = self.block_tables[row_T, positions_T // self.block_size].astype(np.int64)
        num_table_blocks = -(-int(ends_S.max()) // self.block_size)
        return ForwardBatch(
            token_ids_T=torch.from_numpy(self.token_ids[row_T, positions_T]),
            positions_T=torch.from_numpy(positions_T),
            slot_mapping_T=torch.from_numpy(block_T * self.block_size + positions_T % self.block_size),
            cu_seqlens_q_S1=torch.from_numpy(cu_S1),
            seq_lens_S=torch.from_numpy(ends_S.astype(np.int32)),
            block_tables_SM=torch.from_numpy(self.block_tables[rows_S, :num_table_blocks]),
            logits_indices_R=torch.from_numpy(cu_S1[1:][step.samples_S].astype(np.int64) - 1),
            caches=caches,
        )

    def append_token(self, row: int, token_id: int) -> None:
        """Record a sampled token, so that the next step can compute it without being told its id."""
        self.token_ids[row, self.num_tokens[row]] = token_id
        self.num_tokens[row] += 1
        self.sampling.append_token(row, token_id)
