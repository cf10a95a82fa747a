"""Decode steps of few rows from recorded kernel calls: see kernels/recording.py.

Dimensions: T tokens, S sequences, M blocks in the longest table, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.forward_batch import ForwardBatch, LayerCache
from quire.kernels import cpu
from quire.kernels.recording import Arena, record
from quire.logs import get_logger

logger = get_logger(__name__)

MAX_ROWS = 32  # with more, what Python costs is lost in the kernels' time
_MIN_TABLE_WIDTH = 64

Run = Callable[[Tensor, ForwardBatch], Tensor]


@dataclass(frozen=True)
class _Recording:
    """Calls on fixed memory: the residual stream and the batch they read, the result they write."""

    residual_TD: Tensor
    batch: ForwardBatch
    result_TD: Tensor
    calls: list[Callable[[], Any]]

    def fits(self, batch: ForwardBatch) -> bool:
        return batch.block_tables_SM.shape[1] <= self.batch.block_tables_SM.shape[1]


class DecodeReplay:
    """The blocks of one model, for whoever calls it: the same results and the same bits."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._caches: list[LayerCache] | None = None
        self._recordings: dict[int, _Recording] = {}  # on these caches, by number of rows
        self._is_possible = True

    def __call__(self, run: Run, residual_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """What `run` makes of the residual stream [T, D]: all blocks and the last norm."""
        num_rows = batch.num_tokens
        is_decode = num_rows == batch.seq_lens_S.shape[0]  # a token of each sequence
        if not (self._is_possible and is_decode and num_rows <= MAX_ROWS and cpu.takes(residual_TD)):
            return run(residual_TD, batch)
        if batch.caches is not self._caches:
            self._caches = batch.caches
            self._recordings.clear()
        recording = self._recordings.get(num_rows)
        if recording is None or not recording.fits(batch):
            return self._record(run, residual_TD, batch)
        recording.residual_TD.copy_(residual_TD)
        _copy_inputs(batch, recording.batch)
        for call in recording.calls:
            call()
        return recording.result_TD.clone()

    def _record(self, run: Run, residual_TD: Tensor, batch: ForwardBatch) -> Tensor:
        num_rows, width = batch.block_tables_SM.shape
        width = max(_MIN_TABLE_WIDTH, 1 << (width - 1).bit_length())
        with torch.inference_mode(False):  # they are written to whatever the mode of a later caller
            own = replace(
                batch,
                positions_T=torch.empty_like(batch.positions_T),
                slot_mapping_T=torch.empty_like(batch.slot_mapping_T),
                cu_seqlens_q_S1=torch.empty_like(batch.cu_seqlens_q_S1),
                seq_lens_S=torch.empty_like(batch.seq_lens_S),
                block_tables_SM=torch.zeros((num_rows, width), dtype=torch.int32),
            )
            own_residual_TD = residual_TD.clone()
        _copy_inputs(batch, own)
        result_TD, calls = record(lambda: run(own_residual_TD, own), self._arena)
        if calls is None:
            logger.debug("decode steps are not recorded: the model does more than kernel calls")
            self._is_possible = False
        else:
            self._recordings[num_rows] = _Recording(own_residual_TD, own, result_TD, calls)
        return result_TD.clone()


def _copy_inputs(batch: ForwardBatch, to: ForwardBatch) -> None:
    """What a layer reads that changes from step to step."""
    to.positions_T.copy_(batch.positions_T)
    to.slot_mapping_T.copy_(batch.slot_mapping_T)
    to.cu_seqlens_q_S1.copy_(batch.cu_seqlens_q_S1)
    to.seq_lens_S.copy_(batch.seq_lens_S)
    to.block_tables_SM[:, : batch.block_tables_SM.shape[1]].copy_(batch.block_tables_SM)
