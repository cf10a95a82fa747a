"""Fills the places for drafts in a batch, before a step verifies them. An error of a drafter costs drafts only.

The drafter is in the last stage. It sends the drafts back to the stages before, which wait for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import torch

from quire.distributed.group import Link
from quire.logs import get_logger
from quire.schedule import UNDRAFTED, ScheduledBatch, StepResult
from quire.worker.accelerator import Device
from quire.worker.drafter import ANY_TOKEN, Drafted, Drafter
from quire.worker.input_batch import InputBatch, StepRows

logger = get_logger(__name__)


class Drafting:
    """Asks a worker's drafter, and writes its drafts to the rows.

    Args:
        vocab_size: the number of tokens of the target.
        is_alone: whether no other rank drafts with this one. Ranks that draft together must leave a step together, so
            an error of the drafter is raised then.
        learn_tokens: takes in the tokens of all steps in flight. Rows that draft must know their tokens.
        before: the link from the stage before; None: there is none.
    """

    def __init__(
        self,
        drafter: Drafter,
        inputs: InputBatch,
        device: Device,
        vocab_size: int,
        *,
        is_alone: bool,
        learn_tokens: Callable[[], None],
        before: Link | None = None,
    ) -> None:
        self.drafter = drafter
        self._inputs, self._device, self._vocab_size = inputs, device, vocab_size
        self._is_alone, self._learn_tokens, self._before = is_alone, learn_tokens, before

    def fill(self, batch: ScheduledBatch, result: StepResult) -> ScheduledBatch:
        """The batch with drafts in place of UNDRAFTED. The fate of the drafts is written to the result.

        The host must know the drafts before they are verified. So on a GPU this waits, once per step.
        """
        self.drafter.follow(batch)
        asked = _asked(batch)
        if not asked:
            return batch
        self._learn_tokens()
        started = time.perf_counter()
        rows = [self._inputs.row_of[batch.request_ids[position]] for position in asked]
        counts = [len(batch.draft_token_ids[position]) for position in asked]
        try:
            drafted = self.drafter.draft(rows, counts)
        except Exception as error:
            drafted = Drafted([[ANY_TOKEN] * count for count in counts], error=self._cost_in_drafts(error))
        for index, token_ids in enumerate(drafted.token_ids):
            if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
                drafted.failures[index] = f"The drafter chose {token_ids}, and the model has {self._vocab_size} tokens"
                drafted.token_ids[index] = [ANY_TOKEN] * len(token_ids)
        if self._before is not None:
            self._before.send_back(torch.tensor([[*chain(*drafted.token_ids)]]))  # [1, N]: the drafts of all rows
        result.draft_error = drafted.error
        result.draft_failures = {asked[index]: why for index, why in drafted.failures.items()}
        result.unread = {asked[index]: count for index, count in drafted.unread.items()}
        result.draft_seconds, result.draft_read_seconds = time.perf_counter() - started, drafted.read_seconds
        return _filled(self._inputs, batch, drafted.token_ids)

    def learn(self, step: StepRows, result: StepResult) -> None:
        """Let the drafter read what the target computes: see Drafter.learn."""
        try:
            self.drafter.learn(step)
        except Exception as error:
            result.draft_error = self._cost_in_drafts(error)

    def _cost_in_drafts(self, error: Exception) -> str:
        """StepResult.draft_error for an error that costs drafts only. Raises an error that costs more."""
        if isinstance(error, torch.AcceleratorError) or not self._is_alone:
            raise error
        self._device.synchronize()  # raises if the error is a failure of the device
        logger.warning("The drafter failed: %s", error, exc_info=error)
        return f"The drafter failed ({type(error).__name__})"


class DraftsOfLastStage:
    """Takes the place of Drafting in a stage before the last one: it gets the drafts.

    Args:
        before: the link from the stage before, which gets the drafts too; None: this is the first stage.
        behind: the link to the next stage.
    """

    def __init__(self, inputs: InputBatch, device: Device, before: Link | None, behind: Link) -> None:
        self._inputs, self._device, self._before, self._behind = inputs, device, before, behind

    def fill(self, batch: ScheduledBatch, result: StepResult) -> ScheduledBatch:
        """See Drafting. The last stage reports the fate of the drafts, and has their time."""
        counts = [len(batch.draft_token_ids[position]) for position in _asked(batch)]
        if not counts:
            return batch
        (found_1N,) = self._device.download([self._behind.receive_back(1, sum(counts), torch.int64)]).wait()
        if self._before is not None:
            self._before.send_back(found_1N)
        return _filled(self._inputs, batch, [drafts.tolist() for drafts in torch.split(found_1N[0], counts)])

    def learn(self, step: StepRows, result: StepResult) -> None:
        """There is no drafter here."""


def _asked(batch: ScheduledBatch) -> list[int]:
    """The positions in the batch of rows that a drafter in a worker drafts for."""
    return [position for position, drafts in enumerate(batch.draft_token_ids) if UNDRAFTED in drafts]


def _filled(inputs: InputBatch, batch: ScheduledBatch, drafts: Sequence[list[int]]) -> ScheduledBatch:
    """The batch with these drafts in the places of UNDRAFTED. They are written to the rows too."""
    draft_token_ids = list(batch.draft_token_ids)
    for position, token_ids in zip(_asked(batch), drafts, strict=True):
        draft_token_ids[position] = token_ids
        inputs.place_drafts(inputs.row_of[batch.request_ids[position]], token_ids)
    return replace(batch, draft_token_ids=draft_token_ids)
