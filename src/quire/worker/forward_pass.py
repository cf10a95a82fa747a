"""Runs the forward pass of a model over the rows and the KV cache of a worker, or repeats a captured pass.

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
from quire.worker.target_streams import TargetStreams


class ForwardPass:
    """The forward passes of one model.

    Args:
        captured: forward passes that are repeated instead of run; None: every kernel is launched by itself.
        before: the link from the pipeline stage before, which gives the residual stream; None: this is the first stage.
        behind: the link to the next pipeline stage, which takes the residual stream; None: this is the last stage.
        streams: go from stage to stage with the residual stream, for a head in the last one; None: there is no head.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: list[LayerCache],
        inputs: InputBatch,
        captured: CapturedSteps | None = None,
        before: Link | None = None,
        behind: Link | None = None,
        streams: TargetStreams | None = None,
    ) -> None:
        self.model, self.captured, self._before, self._behind = model, captured, before, behind
        self._caches, self._inputs, self._streams = caches, inputs, streams

    def stage(self, step: StepRows, parameters: Sequence[NDArray[Any]] = ()) -> StagedStep:
        """See InputBatch.stage. The step is padded to the size of a captured pass, if one fits."""
        return self._inputs.stage(step, parameters, None if self.captured is None else self.captured.size_for(step))

    @property
    def num_captured(self) -> int:
        """The number of passes that were captured so far."""
        return 0 if self.captured is None else self.captured.num_captured

    def hidden(self, staged: StagedStep, hidden_TD: Tensor | None = None) -> Tensor:
        """Compute hidden_TD of the step that was staged last. The next pass overwrites the result.

        Args:
            hidden_TD: the input of a drafter's head: see ForwardBatch.
        """
        # A captured pass holds no transfer between stages: no graph of a GPU waits for a graph of another stage.
        if self._before is not None:
            config = self.model.config
            hidden_TD = self._before.receive(staged.num_tokens, config.hidden_size, self.model.dtype)
            if self._streams is not None:
                self._streams.receive(self._before, staged.num_tokens)
        if self.captured is None or staged.padding is None:
            found_TD = self.model.forward(self._inputs.forward_batch(staged, self._caches, hidden_TD))
        else:
            found_TD = self.captured.run(staged.padding, staged, hidden_TD)[: staged.num_tokens]
        if self._behind is not None:
            self._behind.send(found_TD)
            if self._streams is not None:
                self._streams.send(self._behind, staged.num_tokens)
        return found_TD

    def logits(
        self, staged: StagedStep, hidden_TD: Tensor, owners_R: Tensor | None = None, is_joined: bool = True
    ) -> Tensor:
        """Compute logits_RV, float32, of the tokens that need logits.

        Args:
            owners_R: see CausalLM.compute_logits.
            is_joined: whether the logits of all ranks are joined; False: each rank has its part of the vocabulary.
        """
        indices_R = staged.logits_indices_R
        everything = len(indices_R) == len(hidden_TD)
        hidden_RD = hidden_TD if everything else hidden_TD.index_select(0, indices_R)
        if owners_R is None and is_joined:
            return self.model.compute_logits(hidden_RD, staged.adapter_slots_R)
        if not is_joined:
            assert isinstance(self.model, Decoder), "modelling code computes all logits"
            return self.model.own_logits(hidden_RD, staged.adapter_slots_R)
        return self.model.compute_logits(hidden_RD, staged.adapter_slots_R, owners_R)
