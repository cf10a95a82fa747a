"""The drafter of a scheduler: the depths of requests' drafts, and the fate of these drafts. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.logs import RateLimited, get_logger
from quire.request import Request
from quire.scheduler.adaptive_depth import AdaptiveDepth, DrafterTime
from quire.scheduler.proposer import Proposer

logger = get_logger(__name__)

MOST_ERRORS = 6  # steps without drafts in which the drafter raised, before a request drafts no more


@dataclass(slots=True)
class DraftCounts:
    """The fate of the drafts of some steps."""

    num_drafts: int = 0  # rows with drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # accepted drafts
    accepted_per_position: list[int] = field(default_factory=list)  # rows with an accepted draft there
    num_failures: int = 0  # rows whose drafter failed

    def add(self, num_drafts: int, num_held: int) -> None:
        """Count a row with drafts. `num_held`: the number of first drafts that held."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_held
        accepted = self.accepted_per_position
        accepted.extend([0] * (num_held - len(accepted)))
        for position in range(num_held):
            accepted[position] += 1


@dataclass(slots=True)
class _Errors:
    """The state of a request whose drafter raised."""

    count: int = 0
    next_step: int = 0  # the next step in which it drafts


class Speculation:
    """Asks a proposer for drafts, as far as a request should draft now.

    If a drafter in the worker raises, all rows of the step are without drafts, and the row to blame is not known. So
    each of these requests waits, longer every time, and then drafts again in a step without the others.

    Args:
        most: drafts of one request in one step; may be moved.
        most_by_rows: (first, last, most): at most `most` drafts each, while `first` to `last` requests run.
        adaptive: chooses depths; without it all requests draft as far as they may.
        max_tokens: the most tokens of a request that drafts, with all its drafts but the last: the drafter can read no
            more. None: any.
        waits: requests that may draft are in no step before their newest token is known, unless `adaptive` says that
            this does not pay. Otherwise they draft only where it happens to be known.
        drafter_time: the time of a drafter in the worker; `adaptive` has the same object. None: drafts cost no time.
    """

    def __init__(
        self,
        proposer: Proposer,
        most: int,
        most_by_rows: Sequence[tuple[int, int, int]] = (),
        adaptive: AdaptiveDepth | None = None,
        *,
        max_tokens: int | None = None,
        waits: bool = False,
        drafter_time: DrafterTime | None = None,
    ) -> None:
        self.most = most
        self.drafter_time = drafter_time
        self._proposer, self._most_by_rows, self._adaptive = proposer, most_by_rows, adaptive
        self._max_tokens, self._waits, self._may_draft = max_tokens, waits, False
        self._most_now = most  # drafts of a request in the step that is being made
        self._counts = DraftCounts()
        self._stopped: set[str] = set()  # requests without drafts from now on
        self._errors: dict[str, _Errors] = {}
        self._step = self._last_error_step = 0
        self._failure_log = RateLimited(logger)

    def admit(self, request: Request, num_cached: int) -> None:
        """The request has new blocks. The blocks of its first `num_cached` tokens were computed for others."""
        if self._adaptive is not None:
            self._adaptive.admit(request, num_cached)

    def begin_step(self, running: Sequence[Request], most: int) -> int:
        """The number of drafts that the next step may have, at most `most`. 0: no request need be asked."""
        self._step += 1
        self._most_now = min([self.most, *(k for low, high, k in self._most_by_rows if low <= len(running) <= high)])
        has_drafting = any(request.request_id not in self._stopped for request in running)
        self._may_draft = most > 0 and self._most_now > 0 and has_drafting
        if self._may_draft and self._adaptive is not None:
            self._may_draft = self._adaptive.begin_step(running, self._most_now, most)
        return most if self._may_draft else 0

    @property
    def waits(self) -> bool:
        """Whether the next step should begin when the tokens of the last one are known."""
        return self._waits and self._may_draft and (self._adaptive is None or self._adaptive.waits)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to `most` drafts behind the request's newest token. `take` says that they are in the step."""
        depth = min(most, self._most_now)
        if depth <= 0 or request.request_id in self._stopped:
            return ()
        if self._errors and (errors := self._errors.get(request.request_id)) and self._step < errors.next_step:
            return ()
        if self._max_tokens is not None and (depth := min(depth, self._max_tokens + 1 - request.num_tokens)) <= 0:
            self._stop(request)
            return ()
        if self._adaptive is not None and (depth := self._adaptive.depth(request, depth)) == 0:
            return ()
        return self._proposer.propose(request, depth)[:depth]

    def take(self, request: Request, num_drafts: int) -> None:
        """Note how many of the proposed drafts the step verifies."""
        if self._adaptive is not None:
            self._adaptive.drafted(request, num_drafts)

    def settle(self, request: Request, num_drafts: int, num_held: int) -> None:
        """Drafts of a request were verified; the first `num_held` equal the target's samples."""
        self._counts.add(num_drafts, num_held)
        self._errors.pop(request.request_id, None)
        if self._adaptive is not None:
            self._adaptive.settle(request, num_drafts, num_held)

    def read_later(self, request: Request, num_unread: int) -> None:
        """The worker's drafter made no drafts of a request, because it has yet to read this number of tokens."""
        if self._adaptive is not None:
            self._adaptive.read_later(request, num_unread)

    def drafter_seconds(self, drafts: Sequence[Sequence[int]]) -> float:
        """The predicted time of the worker's drafter for the step that is being made."""
        if self.drafter_time is None:
            return 0.0
        seconds = 0.0 if self._adaptive is None else self._adaptive.reading_seconds
        return seconds + self.drafter_time.of_step([len(row) for row in drafts])

    def settle_drafter(self, seconds: float, drafts: Sequence[Sequence[int]]) -> None:
        """Note how long the worker's drafter took for the drafts of a step."""
        depths = [len(row) for row in drafts]
        if self._adaptive is not None:
            self._adaptive.settle_drafter(seconds, depths)
        elif self.drafter_time is not None:
            self.drafter_time.observe(seconds, depths)

    def fail(self, request: Request, why: str) -> None:
        """The request goes on without drafts, because the drafter cannot draft for it."""
        if request.request_id in self._stopped:
            return
        self._stop(request)
        self._counts.num_failures += 1
        self._failure_log.warning("Request %s goes on without drafts: %s", request.request_id, why)

    def fail_for_now(self, request: Request, num_drafts: int, why: str) -> None:
        """The drafter raised in a step that had this number of places for drafts of this request."""
        errors = self._errors.setdefault(request.request_id, _Errors())
        errors.count += 1
        if errors.count > MOST_ERRORS:
            self.fail(request, why)
            return
        self._counts.num_failures += 1
        self._failure_log.warning("Request %s waits before its next draft: %s", request.request_id, why)
        self._last_error_step = max(self._step + 2**errors.count, self._last_error_step + 1)
        errors.next_step = self._last_error_step
        if self._adaptive is not None:
            self._adaptive.settle(request, num_drafts, 0)

    def forget(self, request_id: str) -> None:
        """The request has ended; unknown ids are fine."""
        self._stopped.discard(request_id)
        self._errors.pop(request_id, None)
        self._proposer.forget(request_id)
        if self._adaptive is not None:
            self._adaptive.forget(request_id)

    def take_counts(self) -> DraftCounts:
        """Counts since the last call."""
        counts, self._counts = self._counts, DraftCounts()
        return counts

    def _stop(self, request: Request) -> None:
        """No more drafts for this request."""
        self._stopped.add(request.request_id)
        if self._adaptive is not None:
            self._adaptive.stop(request)
