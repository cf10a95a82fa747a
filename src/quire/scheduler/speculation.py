"""Which requests draft how far, and what became of their drafts. Integers only, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.logs import RateLimited, get_logger
from quire.request import Request
from quire.scheduler.proposer import Proposer

logger = get_logger(__name__)


@dataclass(slots=True)
class DraftCounts:
    """What became of the drafts of some steps."""

    num_drafts: int = 0  # rows with drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # drafts that held
    accepted_per_position: list[int] = field(default_factory=list)  # rows whose draft there held, up to the longest run
    num_failures: int = 0  # requests whose drafter failed

    def add(self, num_drafts: int, num_held: int) -> None:
        """A row with so many drafts, the first of which held."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_held
        accepted = self.accepted_per_position
        accepted.extend([0] * (num_held - len(accepted)))
        for position in range(num_held):
            accepted[position] += 1


class Speculation:
    """The drafter of a scheduler, and for each request how many tokens it is asked for.

    Args:
        most: drafts of one request in one step.
    """

    def __init__(self, proposer: Proposer, most: int) -> None:
        self.most = most
        self._proposer = proposer
        self._counts = DraftCounts()
        self._failed: set[str] = set()  # requests without drafts from now on
        self._failure_log = RateLimited(logger)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to `most` drafts behind the request's newest token: what the next step verifies."""
        most = min(most, self.most)
        if most <= 0 or request.request_id in self._failed:
            return ()
        return self._proposer.propose(request, most)[:most]

    def settle(self, num_drafts: int, num_held: int) -> None:
        """So many drafts of a request were verified; the first `num_held` were what the target sampled."""
        self._counts.add(num_drafts, num_held)

    def fail(self, request: Request, why: str) -> None:
        """The drafter could not draft for this request: it goes on without."""
        self._failed.add(request.request_id)
        self._counts.num_failures += 1
        self._failure_log.warning("Request %s goes on without drafts: %s", request.request_id, why)

    def forget(self, request_id: str) -> None:
        """The request has ended; unknown ids are fine."""
        self._failed.discard(request_id)
        self._proposer.forget(request_id)

    def take_counts(self) -> DraftCounts:
        """Counts since the last call."""
        counts, self._counts = self._counts, DraftCounts()
        return counts
