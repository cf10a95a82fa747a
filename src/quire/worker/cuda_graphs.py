"""Decoding as CUDA graphs: the forward pass of a batch size is captured once, and replayed with one call.

A graph is a list of launches with their addresses: what it reads lies where it lay, and the numbers there are a step's.
Batches between two captured sizes run on the larger one, with rows that write and read nothing. Dimensions: S rows of
a step, D hidden.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.models.registry import CausalLM
from quire.worker.accelerator import Accelerator, Graph
from quire.worker.device_inputs import DeviceInputBatch, StagedStep
from quire.worker.input_batch import StepRows

# Above it the products of a step take longer than its launches.
LARGEST_BATCH = 256


def capture_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes to capture, ascending: 1, 2, 4, the multiples of 8, and the largest batch itself."""
    largest = min(max_num_seqs, LARGEST_BATCH)
    return sorted({size for size in (1, 2, 4, *range(8, largest + 1, 8), largest) if size <= largest})


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, and the arrays it was captured with: they must stay where they are."""

    graph: Graph
    staged: StagedStep


class DecodeGraphs:
    """The graphs of one model on one cache.

    Args:
        sizes: batch sizes, ascending.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: list[LayerCache],
        inputs: DeviceInputBatch,
        accelerator: Accelerator,
        sizes: Sequence[int],
    ) -> None:
        self._model, self._caches, self._inputs, self._accelerator = model, caches, inputs, accelerator
        self._sizes = list(sizes)
        self._captured: dict[int, _Captured] = {}
        # One place for all sizes: what is left in the graphs' own memory may be overwritten by another graph.
        self._hidden_SD = torch.empty(
            (self._sizes[-1], model.config.hidden_size), dtype=model.dtype, device=accelerator.device
        )

    @torch.inference_mode()
    def capture(self, on_captured: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Capture every size, the largest first: the smaller ones fit into its scratch memory.

        Args:
            on_captured: called with how many are captured, and how many there are.
        """
        nothing = StepRows(*(np.zeros(0, dtype) for dtype in (np.int64, np.bool_, np.int64, np.int64)))
        gc.collect()
        gc.freeze()  # torch collects garbage before each capture, and what is here now stays
        pool = self._accelerator.graph_pool()
        for done, size in enumerate(reversed(self._sizes), 1):
            staged = self._inputs.stage(nothing, pad_to=size)
            self._model.prepare(staged.host, self._caches)
            run = partial(self._forward, staged, size)
            run()  # loads kernels, which cannot be done within a capture
            self._accelerator.synchronize()
            self._captured[size] = _Captured(self._accelerator.capture(run, pool), staged)
            on_captured(done, len(self._sizes))

    def _forward(self, staged: StagedStep, size: int) -> None:
        hidden_SD = self._model.forward(self._inputs.on_device(staged, self._caches, is_prepared=True))
        self._hidden_SD[:size].copy_(hidden_SD)

    def size_for(self, step: StepRows) -> int | None:
        """The size to run a step on; None: it computes more than a token of a row, or has too many rows."""
        num_rows = len(step.lens_S)
        if num_rows > self._sizes[-1] or int(step.lens_S.max()) > 1:
            return None
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def run(self, size: int, staged: StagedStep) -> Tensor:
        """hidden_SD of a step that was staged with this padding; overwritten by the next run."""
        captured = self._captured[size]
        assert captured.staged.token_ids_T.data_ptr() == staged.token_ids_T.data_ptr(), "the step lies elsewhere"
        self._model.prepare(staged.host, self._caches)
        captured.graph.replay()
        return self._hidden_SD[:size]
