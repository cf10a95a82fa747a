"""The requests of a worker on a GPU. Block tables and newest tokens live on the GPU; a step sends only changes.

If the host does not know a token of a step yet, the device fills it in.

Dimensions: T tokens of a step, S rows of a step, R rows of logits, C row capacity, M blocks of a table,
N block tables of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.distributed.layout import ALL_PAGES, PageShare
from quire.forward_batch import ForwardBatch, LayerCache, StepTable
from quire.kernels import gpu
from quire.speculative_config import LEAST_LOGITS_ROWS
from quire.worker.accelerator import Accelerator
from quire.worker.input_batch import ExpectedTokens, InputBatch, Padding, StagedStep, StepRows
from quire.worker.staging import ALIGNMENT, Staging

# Bytes per token, bytes per row, and the number of arrays of a step: see InputBatch.stage.
_TOKEN_BYTES, _ROW_BYTES, _NUM_ARRAYS = 2 * 8 + 4, 3 * 8 + 3 * 4 + 4 * 4 + 8, 17
_SLOT_BYTES = 8  # per token and block table


class DeviceInputBatch(InputBatch):
    """An InputBatch for a GPU. The arrays on the host hold everything, except tokens that the host does not know yet.

    Args:
        max_num_rows: the most rows at once. The arrays never grow.
        max_tokens: the most tokens of one step, with padding.
        steps_in_flight: the number of steps that may be launched before the result of the first one is taken in.

    The other arguments are InputBatch's.
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
        max_tokens: int,
        accelerator: Accelerator,
        steps_in_flight: int,
        pages: PageShare = ALL_PAGES,
        has_grammars: bool = True,
    ) -> None:
        num_bytes = (_TOKEN_BYTES + _SLOT_BYTES * num_tables) * max_tokens + _ROW_BYTES * max(
            max_num_rows, LEAST_LOGITS_ROWS
        )
        num_bytes += 4 + ALIGNMENT * (_NUM_ARRAYS + num_tables)
        staging = Staging(accelerator, num_bytes, steps_in_flight + 1)
        sizes = max_num_rows, max_model_len, block_size, vocab_size, num_tables
        super().__init__(*sizes, adapters, arrays=staging, pages=pages, has_grammars=has_grammars)
        device = accelerator.device
        self._block_tables_NCM = torch.zeros(self.block_tables_NCM.shape, dtype=torch.int32, device=device)
        self._newest_C = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        self._new_blocks: list[tuple[int, int, int]] = []  # (row, begin, end) in the tables, not on the device yet

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        begin = int(self.num_blocks[row])
        super()._append_blocks(row, block_ids)
        self._new_blocks.append((row, begin, int(self.num_blocks[row])))

    def _grow(self) -> None:
        raise AssertionError(f"memory was planned for {len(self.num_tokens)} rows, and more are needed")

    def stage(
        self, step: StepRows, parameters: Sequence[NDArray[Any]] = (), pad_to: Padding | None = None
    ) -> StagedStep:
        """See InputBatch. The block tables on the device are brought up to date too."""
        self._write_new_blocks()
        return super().stage(step, parameters, pad_to)

    def forward_batch(
        self,
        staged: StagedStep,
        caches: list[LayerCache],
        hidden_TD: Tensor | None = None,
        *,
        is_prepared: bool = False,
    ) -> ForwardBatch:
        """The inputs of the forward pass. This method only launches kernels, so it can be captured.

        Block tables have their full width, however long the rows are, because kernels are compiled for a stride.

        Args:
            is_prepared: the model's `prepare` has been called for the step.
        """
        token_ids_T = staged.token_ids_T
        tables_NSM = self._block_tables_NCM.index_select(1, staged.rows_S)
        newest_T = self._newest_C.index_select(0, (-1 - token_ids_T).clamp(min=0))
        return ForwardBatch(
            token_ids_T=torch.where(token_ids_T < 0, newest_T, token_ids_T),
            positions_T=staged.positions_T,
            cu_seqlens_q_S1=staged.cu_seqlens_q_S1,
            seq_lens_S=staged.seq_lens_S,
            tables=tuple(map(StepTable, staged.slot_mappings_T, tables_NSM.unbind(0))),
            caches=caches,
            adapter_slots_T=staged.adapter_slots_T,
            host=None if is_prepared else staged.host,
            hidden_TD=hidden_TD,
        )

    def _write_new_blocks(self) -> None:
        """Bring the tables on the device up to date. A row may have a new request: its present table counts."""
        if not self._new_blocks:
            return
        indices, values = [], []
        num_rows = len(self.num_tokens)
        for row, begin, end in self._new_blocks:
            for table in range(self.num_tables):
                first = (table * num_rows + row) * self.max_blocks
                indices.append(np.arange(first + begin, first + end))
                values.append(self.block_tables_NCM[table, row, begin:end])
        self._new_blocks.clear()
        both = torch.from_numpy(np.stack((np.concatenate(indices), np.concatenate(values).astype(np.int64))))
        at_N, blocks_N = gpu.place(both, self._block_tables_NCM.device)
        self._block_tables_NCM.view(-1).scatter_(0, at_N, blocks_N.to(torch.int32))

    def place_guesses(self, step: StepRows, staged: StagedStep, token_ids_S: Tensor) -> None:
        """See InputBatch. Only the device knows the tokens: it keeps each as the newest token of its row."""
        self._newest_C.index_copy_(0, staged.expecting_rows, token_ids_S.clamp(min=0))
        self.token_ids[step.rows_S, step.starts_S + step.lens_S + step.ahead] = -1 - step.rows_S

    def expect_tokens(self, staged: StagedStep, step: StepRows, token_ids_R: Tensor) -> ExpectedTokens:
        """See InputBatch. The device keeps each token as the newest token of its row."""
        newest = token_ids_R.clamp(min=0)
        if step.drafts is not None:
            newest = newest.index_select(0, gpu.place(torch.from_numpy(step.drafts.plain_R), newest.device))
        self._newest_C.index_copy_(0, staged.expecting_rows, newest)
        return super().expect_tokens(staged, step, token_ids_R)
