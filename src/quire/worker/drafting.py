"""Fills the places for drafts in a batch, before a step verifies them. An error of a drafter costs drafts only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

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
    ) -> None:
        self.drafter = drafter
        self._inputs, self._device, self._vocab_size = inputs, device, vocab_size
        self._is_alone, self._learn_tokens = is_alone, learn_tokens

    def fill(self, batch: ScheduledBatch, result: StepResult) -> ScheduledBatch:
        """The batch with drafts in place of UNDRAFTED. The fate of the drafts is written to the result.

        The host must know the drafts before they are verified. So on a GPU this waits, once per step.
        """
        self.drafter.follow(batch)
        asked = [position for position, drafts in enumerate(batch.draft_token_ids) if UNDRAFTED in drafts]
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
        draft_token_ids = list(batch.draft_token_ids)
        for position, row, token_ids in zip(asked, rows, drafted.token_ids, strict=True):
            draft_token_ids[position] = token_ids
            self._inputs.place_drafts(row, token_ids)
        result.draft_error = drafted.error
        result.draft_failures = {asked[index]: why for index, why in drafted.failures.items()}
        result.unread = {asked[index]: count for index, count in drafted.unread.items()}
        result.draft_seconds = time.perf_counter() - started
        return replace(batch, draft_token_ids=draft_token_ids)

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
