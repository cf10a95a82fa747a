"""Drafts from the logits of a model that drafts: drawn as the target would draw them, and brought to the host.

They are drawn with the target's random numbers of the row and place, so both draw the same token where their
probabilities are alike.

Dimensions: S rows that draft, R rows of one pass, V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.distributed.group import Group
from quire.sampling.sampler import Sampler
from quire.worker.accelerator import Device
from quire.worker.drafter import Drafted
from quire.worker.input_batch import InputBatch, StagedStep, StepRows

_NO_DISTRIBUTION = "The drafter's logits are not numbers (NaN) or infinite, or no token is left to draft"


class DraftDraws:
    """Draws tokens for the rows of an InputBatch.

    Args:
        is_greedy: whether it draws the likeliest token even if the request samples.
        group: ranks that draft together: the first one draws, and sends the draws to the others.
    """

    def __init__(self, inputs: InputBatch, device: Device, *, is_greedy: bool, group: Group | None = None) -> None:
        self._inputs, self._device, self._is_greedy, self._group = inputs, device, is_greedy, group
        self._sampler = Sampler(inputs.sampling)

    def parameters(self, rows_R: NDArray[np.int64], offset: int) -> Sequence[NDArray[Any]]:
        """To be staged with a pass for the drafts behind `offset` others."""
        return () if self._is_greedy else self._sampler.host_parameters(rows_R, np.full(len(rows_R), offset))

    def draw(self, logits_RV: Tensor, step: StepRows, staged: StagedStep, earlier: list[Tensor]) -> Tensor:
        """token_ids_R behind the tokens of the step, which become inputs of the next one.

        -1: there is none, because a logit is NaN, or because no token can be sampled.

        Args:
            earlier: the earlier draws for the same rows, and for some rows behind them.
        """
        group = self._group
        if group is None:
            token_ids_R = self._chosen(logits_RV, step, staged, earlier)
        else:
            own_R1 = torch.empty((len(logits_RV), 0), dtype=torch.int64)
            if group.rank == 0:
                own_R1 = self._chosen(logits_RV, step, staged, earlier)[:, None]
            token_ids_R = group.gather(own_R1, [1] + [0] * (group.size - 1))[:, 0]
        self._inputs.place_guesses(step, staged, token_ids_R)
        return token_ids_R

    def _chosen(self, logits_RV: Tensor, step: StepRows, staged: StagedStep, earlier: list[Tensor]) -> Tensor:
        state = self._inputs.sampling
        before: Sequence[Sequence[int]] = ()
        if earlier and (state.filters or state.penalties):
            columns = [tokens.clamp(min=0).tolist() for tokens in self._on_host(earlier)]
            before = [[column[index] for column in columns] for index in range(len(logits_RV))]
        return self._sampler.draw(logits_RV, step.rows_S.tolist(), staged.parameters, before)

    def collect(self, drafted: Drafted, indices: Sequence[int], found: list[Tensor]) -> None:
        """Fill in what was drawn, a tensor per place, for these of the rows that were asked for."""
        for offset, tokens_R in enumerate(self._on_host(found)):
            for index, token_id in zip(indices, tokens_R.tolist(), strict=False):
                if token_id < 0:
                    drafted.failures.setdefault(index, _NO_DISTRIBUTION)
                else:
                    drafted.token_ids[index][offset] = token_id

    def _on_host(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(self._device.download(tensors).wait())
