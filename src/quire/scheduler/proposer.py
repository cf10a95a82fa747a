"""Where drafts come from: the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.request import Request


class Proposer(Protocol):
    """Guesses at the next tokens of requests, on the scheduler's side, where tokens are integers.

    A proposer that searches text works here. One that needs a model, in a worker, is the other half of one here, which
    hands on what came with the results.

    The scheduler asks for a running request that lacks only its newest token, and only if that one is known. With two
    batches in flight it mostly is not, because the step that samples it is under way: the request then goes on with one
    token and is not held up. While its drafts are being verified it waits for the result.
    """

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to `most` guesses at the tokens behind the request's known ones; none is the answer that costs nothing.

        They are token ids that the model has. Does not raise, and changes nothing of the request.
        """
        ...
