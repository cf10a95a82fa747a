"""The contract of forward passes that are captured once and repeated: CUDA graphs on a GPU, recorded calls on a CPU."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.worker.input_batch import Padding, StagedStep, StepRows


class CapturedSteps(Protocol):
    """Forward passes of one model on one KV cache, by the size of a step. They give the bits of the pass run anew.

    Attributes:
        num_captured: the passes that were captured until now.
    """

    num_captured: int

    def size_for(self, step: StepRows) -> Padding | None:
        """The size to bring a step to, so that it can be repeated; None: the step has to be run."""
        ...

    def run(self, size: Padding, staged: StagedStep, hidden_TD: Tensor | None = None) -> Tensor:
        """hidden_TD of a step that was staged with this padding; overwritten by the next run.

        Args:
            hidden_TD: see ForwardBatch.
        """
        ...
