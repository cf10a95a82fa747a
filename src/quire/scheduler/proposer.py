"""The contract of sources of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.request import Request


class Proposer(Protocol):
    """Guesses the next tokens of requests, on the scheduler's side, where tokens are integers.

    A proposer that searches text works here. A method that needs a model leaves the drafts to the worker, which drafts
    within the step that verifies: its proposer answers schedule.UNDRAFTED in place of tokens.

    The scheduler asks for a running request that lacks only its newest token, and only if that one is known. While its
    drafts are being verified the request waits for the result.
    """

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to `most` guesses at the tokens after the request's known ones; an empty answer costs nothing.

        They are token ids of the model, or UNDRAFTED. It does not raise, and does not change the request.
        """
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended or was aborted. It may never have been asked for, and its id may come again."""
        ...
