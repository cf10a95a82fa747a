"""The contract of sources of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.request import Request


class Proposer(Protocol):
    """Guesses the next tokens of requests, in the scheduler's process, where tokens are integers.

    A proposer that searches texts does its work here. A method that needs a model leaves the drafts to the worker,
    which drafts in the step that verifies them. The proposer of such a method answers schedule.UNDRAFTED in place of
    tokens.

    The scheduler asks only for a running request that has one token left to compute, its newest one, and only if this
    token is known. While the drafts of a request are being verified, the request waits for the result.
    """

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to `most` guesses at the tokens that follow the request's known tokens. An empty answer costs nothing.

        The guesses are token ids of the model, or UNDRAFTED. The method does not raise and does not change the request.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended. It may be unknown here, and a later request may have the same id."""
        ...


class NoDrafts:
    """The Proposer of an engine without speculation."""

    def propose(self, request: Request, most: int) -> Sequence[int]:
        return ()

    def forget(self, request_id: str) -> None:
        """There is nothing to forget."""
