"""Draws drafts from the logits of a drafter's model, in the way in which the target samples.

A draft and the target's sample in the same place use the same random number. So both are the same token where the
probabilities of drafter and target are alike.

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
        is_greedy: whether the likeliest token is drawn even if the request samples.
        group: the ranks that draft together. The first rank draws, and sends the tokens to the others.
    """

    def __init__(self, inputs: InputBatch, device: Device, *, is_greedy: bool, group: Group | None = None) -> None:
        self._inputs, self._device, self._is_greedy, self._group = inputs, device, is_greedy, group
        self._sampler = Sampler(inputs.sampling)

    def parameters(self, rows_R: NDArray[np.int64], offset: int) -> Sequence[NDArray[Any]]:
        """The sampling parameters to stage with the pass that draws the draft after `offset` earlier drafts."""
        return () if self._is_greedy else self._sampler.host_parameters(rows_R, np.full(len(rows_R), offset))

    def draw(self, logits_RV: Tensor, step: StepRows, staged: StagedStep, earlier: list[Tensor]) -> Tensor:
        """Draw the token after the last token of each row, token_ids_R. These tokens become inputs of the next pass.

        -1 means that there is no token, because a logit is NaN, or because no token may be sampled.

        Args:
            logits_RV: float32.
            earlier: the earlier draws for the same rows. They may have more rows, which come after these.
        """
        group = self._group
        if group is None:
            token_ids_R = self._chosen(logits_RV, step, staged, earlier)
        else:
            own_R1 = logits_RV.new_empty((len(logits_RV), 0), dtype=torch.int64)
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
        """Copy the drawn tokens to `drafted`.

        Args:
            indices: for each row of the tensors, its index in `drafted`.
            found: the draws, one tensor per place.
        """
        for offset, tokens_R in enumerate(self._on_host(found)):
            for index, token_id in zip(indices, tokens_R.tolist(), strict=False):
                if token_id < 0:
                    drafted.failures.setdefault(index, _NO_DISTRIBUTION)
                else:
                    drafted.token_ids[index][offset] = token_id

    def _on_host(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(self._device.download(tensors).wait())
