"""The contract of forward passes that are captured once and repeated: CUDA graphs on a GPU, recorded calls on a CPU."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.worker.input_batch import Padding, StagedStep, StepRows


class CapturedSteps(Protocol):
    """Forward passes of one model on one KV cache, by the size of a step.

    A repeated pass gives the same bits as a pass that is run anew.

    Attributes:
        num_captured: the number of passes that were captured so far.
    """

    num_captured: int

    def size_for(self, step: StepRows) -> Padding | None:
        """The size to which a step must be padded, so that a captured pass fits; None: no captured pass fits."""
        ...

    def run(self, size: Padding, staged: StagedStep, hidden_TD: Tensor | None = None) -> Tensor:
        """Compute hidden_TD of a step that was staged with this padding. The next run overwrites the result.

        Args:
            hidden_TD: see ForwardBatch. Its rows are those of the step, without padding.
        """
        ...
