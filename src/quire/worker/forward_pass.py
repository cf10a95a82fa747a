"""A model on the rows and the cache of a worker: its forward pass over a step, captured before or run.

Dimensions: T tokens, R rows of logits, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from quire.distributed.group import Link
from quire.forward_batch import LayerCache
from quire.models.decoder import Decoder
from quire.models.registry import CausalLM
from quire.worker.captured_steps import CapturedSteps
from quire.worker.input_batch import InputBatch, StagedStep, StepRows


class ForwardPass:
    """The forward passes of one model.

    Args:
        captured: forward passes that are repeated instead of run; None: every kernel is launched by itself.
        behind: takes the hidden states to the next stage.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: list[LayerCache],
        inputs: InputBatch,
        captured: CapturedSteps | None = None,
        behind: Link | None = None,
    ) -> None:
        self.model, self.captured, self._behind = model, captured, behind
        self._caches, self._inputs = caches, inputs

    def stage(self, step: StepRows, parameters: Sequence[NDArray[Any]] = ()) -> StagedStep:
        """See InputBatch.stage. The step is padded to the size of a captured pass, if there is one that holds it."""
        return self._inputs.stage(step, parameters, None if self.captured is None else self.captured.size_for(step))

    @property
    def num_captured(self) -> int:
        """The passes that were captured until now."""
        return 0 if self.captured is None else self.captured.num_captured

    def hidden(self, staged: StagedStep, hidden_TD: Tensor | None = None) -> Tensor:
        """hidden_TD of a step, the last one staged; overwritten by the next pass.

        Args:
            hidden_TD: see ForwardBatch.
        """
        if self.captured is None or staged.padding is None:
            found_TD = self.model.forward(self._inputs.forward_batch(staged, self._caches, hidden_TD))
        else:
            found_TD = self.captured.run(staged.padding, staged, hidden_TD)[: staged.num_tokens]
        if self._behind is not None:
            self._behind.send(found_TD)
        return found_TD

    def logits(
        self, staged: StagedStep, hidden_TD: Tensor, owners_R: Tensor | None = None, is_joined: bool = True
    ) -> Tensor:
        """logits_RV of the rows that want some, float32.

        Args:
            owners_R: see Decoder.compute_logits.
            is_joined: False: logits of the tokens that this rank has.
        """
        indices_R = staged.logits_indices_R
        everything = len(indices_R) == len(hidden_TD)
        hidden_RD = hidden_TD if everything else hidden_TD.index_select(0, indices_R)
        if owners_R is None and is_joined:
            return self.model.compute_logits(hidden_RD, staged.adapter_slots_R)
        assert isinstance(self.model, Decoder), "ranks share native models"
        if not is_joined:
            return self.model.own_logits(hidden_RD, staged.adapter_slots_R)
        return self.model.compute_logits(hidden_RD, staged.adapter_slots_R, owners_R)
