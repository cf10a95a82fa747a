"""Short steps and full steps on a CPU from recorded kernel calls: see kernels/recording.py.

Dimensions: T tokens, S sequences, C the most sequences, M blocks in the longest table, N block tables of a sequence,
D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.forward_batch import ForwardBatch, LayerCache, StepTable
from quire.kernels import cpu
from quire.kernels.recording import Arena, record
from quire.logs import get_logger
from quire.models.decoder import Decoder
from quire.schedule import MAX_RECORDED_BUDGET, MAX_RECORDED_TOKENS
from quire.worker.input_batch import InputBatch, Padding, StagedStep, StepRows

logger = get_logger(__name__)

Inputs = TypeVar("Inputs", ForwardBatch, StepTable)

# These fields of ForwardBatch need not be tensors. If one is no tensor, it must be the same object as in the recording.
# All other fields are copied.
_UNCOPIED_FIELDS = frozenset({"adapter_slots_T", "caches", "host", "hidden_TD"})
_MOST_RECORDINGS = 256  # without lanes at most 130 are possible: every number of tokens, with and without adapters

# The number of tokens, whether a row has an adapter, and the number of tokens of each lane.
_Size = tuple[int, bool, tuple[int, ...]]


@dataclass(frozen=True)
class _Recording:
    """Recorded kernel calls on fixed memory: the residual stream and the batch that they read, and the result."""

    residual_TD: Tensor
    batch: ForwardBatch
    result_TD: Tensor
    calls: list[Callable[[], Any]]


class RecordedSteps:
    """CapturedSteps of one model on one KV cache, as recordings of kernel calls.

    A recording belongs to a number of tokens, to steps with or without adapters, and to the tokens of each lane. A step
    of T tokens is padded to T sequences, at most MAX_RECORDED_TOKENS; the sequences of the padding have no tokens. So
    one recording serves T decodes and every other step of T tokens.

    Block tables of all recordings are in one memory, with room for the longest. So contexts may grow.

    Args:
        full_step: the tokens of a step with the whole token budget at the start. If the budget changes while serving,
            full steps are run as written.
    """

    def __init__(self, model: Decoder, inputs: InputBatch, caches: list[LayerCache], full_step: int) -> None:
        self._model, self._inputs, self._caches = model, inputs, caches
        self._full_step = full_step if full_step <= MAX_RECORDED_BUDGET else 0
        self._arena = Arena()
        self._recordings: dict[_Size, _Recording] = {}
        with torch.inference_mode(False):
            self._tables_NCM = torch.zeros(
                (inputs.num_tables, MAX_RECORDED_TOKENS, inputs.max_blocks), dtype=torch.int32
            )
        self._is_possible = cpu.available()
        self.num_captured = 0

    def size_for(self, step: StepRows) -> Padding | None:
        """See CapturedSteps."""
        num_tokens, num_rows = int(step.lens_S.sum()), len(step.lens_S)
        # With lanes there are too many ways to divide the tokens of a full step.
        is_full = num_tokens == self._full_step and num_rows <= MAX_RECORDED_TOKENS and not step.lane_tokens
        if not self._is_possible or not (num_tokens <= MAX_RECORDED_TOKENS or is_full):
            return None
        return Padding(num_tokens, min(num_tokens, MAX_RECORDED_TOKENS), step.adapter_slots_S is not None)

    def run(self, size: Padding, staged: StagedStep, hidden_TD: Tensor | None = None) -> Tensor:
        """See CapturedSteps."""
        return self.forward(self._inputs.forward_batch(staged, self._caches, hidden_TD))

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute hidden_TD of a step that was padded as `size_for` says."""
        recording = self._recordings.get(_size_of(batch))
        if recording is None or not _copy_inputs(batch, recording.batch):
            return self._record(batch)
        recording.residual_TD.copy_(self._model.embed_step(batch))
        for call in recording.calls:
            call()
        return recording.result_TD

    def _record(self, batch: ForwardBatch) -> Tensor:
        own = _with_own_inputs(batch, self._tables_NCM)
        if own is None or not _copy_inputs(batch, own):
            return self._model.forward(batch)
        residual_TD = self._model.embed_step(batch)
        with torch.inference_mode(False):  # later callers may write to these tensors in any mode
            residual_TD = residual_TD.clone()
        result_TD, calls = record(lambda: self._model.run_blocks(residual_TD, own), self._arena)
        if calls is None:
            logger.debug("steps are not recorded: the model does more than kernel calls")
            self._is_possible = False
        else:
            size = _size_of(batch)
            if size not in self._recordings and len(self._recordings) >= _MOST_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
            self._recordings[size] = _Recording(residual_TD, own, result_TD, calls)
            self.num_captured += 1
        return result_TD


def _size_of(batch: ForwardBatch) -> _Size:
    return batch.num_tokens, batch.adapter_slots_T is not None, () if batch.lanes is None else batch.lanes.counts


def _with_own_inputs(batch: Inputs, tables: Tensor) -> Inputs | None:
    """A copy of the batch with tensors at fixed addresses; None: the batch has a value that is no tensor.

    Args:
        tables: the memory of block tables: NCM for a ForwardBatch, CM for a StepTable.
    """
    own: dict[str, Any] = {}
    for name, value in _inputs_of(batch):
        if name == "tables":
            own[name] = tuple(_with_own_inputs(*each) for each in zip(value, tables, strict=True))
            if any(table is None for table in own[name]):
                return None
        elif name == "block_tables_SM":
            own[name] = tables[: len(value)]
        elif isinstance(value, Tensor):
            with torch.inference_mode(False):
                own[name] = torch.zeros(value.shape, dtype=value.dtype)
        elif name not in _UNCOPIED_FIELDS:
            logger.debug("steps are not recorded: %s.%s is no tensor", type(batch).__name__, name)
            return None
    return replace(batch, **own)


def _copy_inputs(batch: ForwardBatch | StepTable, to: ForwardBatch | StepTable) -> bool:
    """Copy all inputs of layers that change from step to step; False: an input does not fit.

    A tensor may be smaller than its copy, because the copies of block tables have the width of the longest table.
    """
    for name, value in _inputs_of(batch):
        target = getattr(to, name)
        if value is target:
            continue
        if name == "tables":
            if len(value) != len(target) or not all(map(_copy_inputs, value, target)):
                return False
            continue
        if not isinstance(value, Tensor) or not isinstance(target, Tensor) or value.dim() != target.dim():
            return False
        if value.shape != target.shape:
            if any(size > room for size, room in zip(value.shape, target.shape, strict=True)):
                return False
            target = target[tuple(slice(size) for size in value.shape)]
        target.copy_(value)
    return True


def _inputs_of(batch: ForwardBatch | StepTable) -> list[tuple[str, Any]]:
    # Lanes are the same in all steps of a size.
    return [(name, getattr(batch, name)) for name in batch.__dataclass_fields__ if name != "lanes"]
