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
    # Index of a row -> the number of its tokens that later steps must read. The drafts of such a row are ANY_TOKEN.
    unread: dict[int, int] = field(default_factory=dict)
    # Seconds in which a head first read what waited, which it must read with or without drafts. On a device that runs
    # ahead: in which this was launched.
    read_seconds: float = 0.0
    error: str = ""  # why there are no drafts at all: then all of them are ANY_TOKEN


class Drafter(Protocol):
    """Drafts tokens for the rows of an InputBatch. All tokens of these rows must be known.

    A wrong draft is rejected, so an error in a drafter's state costs time and never changes a result. A drafter may
    keep the state of a page that other requests hold too, even though this state may be wrong.
    """

    def follow(self, batch: ScheduledBatch) -> None:
        """Follow a batch that the InputBatch has applied: rows may have other requests, and pages other owners."""
        ...

    def learn(self, step: StepRows) -> None:
        """Read what the target computes in a step. The target's pass and its sampling have been launched.

        If it raises an error, only the drafts of these rows fail.
        """
        ...

    def draft(self, rows: Sequence[int], counts: Sequence[int]) -> Drafted:
        """Draft the tokens that follow the tokens of each row. If it raises an error, only these drafts fail.

        Args:
            rows: distinct rows of the InputBatch. The drafter may write to the places after their known tokens.
            counts: the number of tokens to draft for each row.
        """
        ...
