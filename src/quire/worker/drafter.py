"""The contract of what drafts in a worker, with a model: in the step that verifies its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.schedule import ScheduledBatch
from quire.worker.input_batch import StepRows

ANY_TOKEN = 0  # in place of a draft that could not be made: what the target samples there decides, as ever


@dataclass(slots=True)
class Drafted:
    """Drafts of some rows."""

    token_ids: list[list[int]]  # of each row as many as were asked for
    failures: dict[int, str] = field(default_factory=dict)  # index of a row -> why some of its drafts are ANY_TOKEN
    # index of a row -> how many of its tokens are left to read in later steps; its drafts are ANY_TOKEN
    unread: dict[int, int] = field(default_factory=dict)
    error: str = ""  # why there are none: all of them are ANY_TOKEN


class Drafter(Protocol):
    """Drafts tokens for the rows of an InputBatch, whose tokens are all known.

    What it keeps of a request is only ever an advantage: a wrong draft is rejected. So it may keep what it has of a
    page that others hold too, and may be wrong about it.
    """

    def follow(self, batch: ScheduledBatch) -> None:
        """The InputBatch has applied a batch: rows are others', and pages are handed out anew."""
        ...

    def learn(self, step: StepRows) -> None:
        """The target's forward pass over a step, and what it samples from there, have been launched.

        What it raises fails the drafts of these rows, and nothing else.
        """
        ...

    def draft(self, rows: Sequence[int], counts: Sequence[int]) -> Drafted:
        """A number of tokens behind the tokens of each row. An error fails these drafts, and nothing else.

        Args:
            rows: of the InputBatch, distinct. Their tokens behind the known ones are its to write.
        """
        ...
