"""The contract of a drafter that has a model and runs in a worker. It drafts in the step that verifies its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.schedule import ScheduledBatch
from quire.worker.input_batch import StepRows

ANY_TOKEN = 0  # used if a draft could not be made: the target's sample decides, as always


@dataclass(slots=True)
class Drafted:
    """Drafts of some rows."""

    token_ids: list[list[int]]  # for each row, as many drafts as were asked for
    failures: dict[int, str] = field(default_factory=dict)  # index of a row -> why some of its drafts are ANY_TOKEN
    # index of a row -> how many of its tokens are left to read in later steps; its drafts are ANY_TOKEN
    unread: dict[int, int] = field(default_factory=dict)
    error: str = ""  # why there are none: all of them are ANY_TOKEN


class Drafter(Protocol):
    """Drafts tokens for the rows of an InputBatch, whose tokens are all known.

    Its state of a request can only help: a wrong draft is rejected. So it may keep its state of a page that others hold
    too, and this state may be wrong.
    """

    def follow(self, batch: ScheduledBatch) -> None:
        """The InputBatch has applied a batch: rows have other requests, and pages are handed out anew."""
        ...

    def learn(self, step: StepRows) -> None:
        """The target's forward pass over a step, and its sampling, have been launched.

        An error fails the drafts of these rows, and nothing else.
        """
        ...

    def draft(self, rows: Sequence[int], counts: Sequence[int]) -> Drafted:
        """A number of tokens behind the tokens of each row. An error fails these drafts, and nothing else.

        Args:
            rows: distinct rows of the InputBatch. It may write their tokens after the known ones.
        """
        ...
