"""Speculation on the side of the scheduler: it asks for drafts and follows their results. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from quire.logs import RateLimited, get_logger
from quire.request import Request
from quire.schedule import ScheduledBatch, StepResult
from quire.scheduler.adaptive_depth import AdaptiveDepth, DrafterTime
from quire.scheduler.proposer import Proposer

logger = get_logger(__name__)

MOST_ERRORS = 6  # after this number of steps in which the drafter raised, a request drafts no more
MOST_UNFORGOTTEN = 1000  # the most ids that are kept of requests that the drafter could not forget: the newest ones


@dataclass(slots=True)
class DraftCounts:
    """Counts of the drafts of some steps."""

    num_drafts: int = 0  # rows with drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # accepted drafts
    accepted_per_position: list[int] = field(default_factory=list)  # by position: rows with an accepted draft there
    num_failures: int = 0  # rows for which the drafter failed

    def add(self, num_drafts: int, num_held: int) -> None:
        """Count a row with drafts. `num_held`: the number of first drafts that held."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_held
        accepted = self.accepted_per_position
        accepted.extend([0] * (num_held - len(accepted)))
        for position in range(num_held):
            accepted[position] += 1

    def join(self, other: DraftCounts) -> None:
        """Add the counts of another lane."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_failures += other.num_failures
        both = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        self.accepted_per_position = [own + its for own, its in both]


@dataclass(slots=True)
class _Errors:
    """The state of a request for which the drafter raised."""

    count: int = 0
    next_step: int = 0  # the next step in which it drafts


class Speculation:
    """Asks a proposer for drafts, for the requests that should draft now.

    If a drafter in the worker raises, no row of the step has drafts, and the row to blame is not known. So each of
    these requests waits, longer every time, and then drafts again in a step in which the others do not draft.

    Args:
        most: the most drafts of one request in one step. It may change while serving.
        most_by_rows: entries (first, last, most): while `first` to `last` requests run, each has at most `most` drafts.
        adaptive: chooses the depths; None: all requests draft as many tokens as they may.
        max_tokens: the most tokens of a request, with all its drafts except the last one, that the drafter can read;
            None: there is no limit.
        waits: whether a request that may draft waits for its newest token before its next step, unless `adaptive` says
            that this does not pay. If not, a request drafts only if its newest token happens to be known.
        drafter_time: the time of a drafter in the worker, the same object as in `adaptive`. None: drafts cost no time.
        vocab_size: the number of tokens of the model. A request for which the proposer guesses others drafts no more.
            None: the worker drafts.
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
        vocab_size: int | None = None,
    ) -> None:
        self.most = most
        self._vocab_size = vocab_size
        self.drafter_time = drafter_time
        self._proposer, self._most_by_rows, self._adaptive = proposer, most_by_rows, adaptive
        self._max_tokens, self._waits, self._may_draft = max_tokens, waits, False
        self._most_now = most  # the most drafts of a request in the step that is being made
        self._counts = DraftCounts()
        self._stopped: set[str] = set()  # requests without drafts from now on
        self._unforgotten: dict[str, None] = {}  # ended ones that the drafter could not forget, in order
        self._errors: dict[str, _Errors] = {}
        self._step = self._last_error_step = 0
        self._failure_log = RateLimited(logger)

    def admit(self, request: Request, num_cached: int) -> None:
        """Note that a request has new blocks. Other requests have computed its first `num_cached` tokens."""
        if self._adaptive is not None:
            self._adaptive.admit(request, num_cached)

    def begin_step(
        self, running: Sequence[Request], most: int, count_prompt_tokens: Callable[[], int] = lambda: 0
    ) -> int:
        """Begin a step. Returns the number of drafts that it may have, at most `most`. 0: no request drafts.

        Args:
            count_prompt_tokens: counts the tokens of prompts that the step computes, if adaptive depths ask for them.
        """
        self._step += 1
        self._most_now = min([self.most, *(k for low, high, k in self._most_by_rows if low <= len(running) <= high)])
        has_drafting = any(request.request_id not in self._stopped for request in running)
        self._may_draft = most > 0 and self._most_now > 0 and has_drafting
        if self._may_draft and self._adaptive is not None:
            self._may_draft = self._adaptive.begin_step(running, self._most_now, most, count_prompt_tokens)
        return most if self._may_draft else 0

    @property
    def waits(self) -> bool:
        """Whether the next step should wait until the tokens of the last step are known."""
        return self._waits and self._may_draft and (self._adaptive is None or self._adaptive.waits)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to `most` drafts after the request's newest token. The caller reports the used ones with `take`."""
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
        try:
            drafts = self._proposer.propose(request, depth)[:depth]
        except Exception as error:  # any error only costs drafts: the request does not need them
            self.fail(request, f"The drafter failed ({type(error).__name__})", error)
            return ()
        if drafts and self._vocab_size is not None and not 0 <= min(drafts) <= max(drafts) < self._vocab_size:
            self.fail(request, f"The drafter chose {list(drafts)}, and the model has {self._vocab_size} tokens")
            return ()
        return drafts

    def take(self, request: Request, num_drafts: int) -> None:
        """Note how many of the proposed drafts the step verifies."""
        if self._adaptive is not None:
            self._adaptive.drafted(request, num_drafts)

    def settle(self, request: Request, row: int, num_drafts: int, result: StepResult) -> bool:
        """Take in the result of a row that had `num_drafts` places for drafts. Returns whether drafts were made there.

        As many drafts held as the row has tokens before its last one.
        """
        if row in result.draft_failures:
            self.fail(request, result.draft_failures[row])
        elif result.draft_error:
            self._fail_for_now(request, num_drafts, result.draft_error)
        elif row in result.unread:
            if self._adaptive is not None:
                self._adaptive.read_later(request, result.unread[row])
        else:
            num_held = max(len(result.token_ids[row]) - 1, 0)
            self._counts.add(num_drafts, num_held)
            self._errors.pop(request.request_id, None)
            if self._adaptive is not None:
                self._adaptive.settle(request, num_drafts, num_held)
            return True
        return False

    def drafter_seconds(self, batch: ScheduledBatch) -> float:
        """The predicted time of the worker's drafter for the step that is being made."""
        if self.drafter_time is None:
            return 0.0
        seconds = 0.0 if self._adaptive is None else self._adaptive.reading_seconds
        return seconds + self.drafter_time.of_step([len(row) for row in batch.draft_token_ids])

    def end_step(self, batch: ScheduledBatch, result: StepResult) -> None:
        """Note how long the worker's drafter took for the drafts of a step. If it raised, its time is unknown."""
        if not (result.draft_seconds or result.draft_error):
            return
        seconds = None if result.draft_error else result.draft_seconds - result.draft_read_seconds
        depths = [len(row) for row in batch.draft_token_ids]
        if self._adaptive is not None:
            self._adaptive.settle_drafter(seconds, depths)
        elif self.drafter_time is not None and seconds is not None:
            self.drafter_time.observe(seconds, depths)

    def fail(self, request: Request, why: str, error: Exception | None = None) -> None:
        """Let the request go on without drafts, because the drafter cannot draft for it.

        Args:
            error: what the drafter raised in this process; its traceback is logged. None: it raised nothing here.
        """
        if request.request_id in self._stopped:
            return
        self._stop(request)
        self._counts.num_failures += 1
        self._failure_log.warning("Request %s goes on without drafts: %s", request.request_id, why, error=error)

    def _fail_for_now(self, request: Request, num_drafts: int, why: str) -> None:
        """Let the request wait before its next draft. The drafter raised in a step with `num_drafts` places for it."""
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
        """Forget a request that has ended. Unknown ids are allowed.

        If the drafter cannot forget it, a later request with this id has no drafts: it could get those of this one.
        Such drafts would only be refused, so the newest MOST_UNFORGOTTEN of these ids are enough.
        """
        self._stopped.discard(request_id)
        self._errors.pop(request_id, None)
        self._unforgotten.pop(request_id, None)  # if it fails again, it is the newest one
        try:
            self._proposer.forget(request_id)
        except Exception as error:  # nobody needs the drafter: the engine goes on
            self._stopped.add(request_id)
            self._unforgotten[request_id] = None
            if len(self._unforgotten) > MOST_UNFORGOTTEN:
                oldest = next(iter(self._unforgotten))
                del self._unforgotten[oldest]
                self._stopped.discard(oldest)
            self._counts.num_failures += 1
            self._failure_log.warning("The drafter could not forget request %s", request_id, error=error)
        if self._adaptive is not None:
            self._adaptive.forget(request_id)

    def take_counts(self) -> DraftCounts:
        """Counts since the last call."""
        counts, self._counts = self._counts, DraftCounts()
        return counts

    def _stop(self, request: Request) -> None:
        """End the drafts of a request."""
        self._stopped.add(request.request_id)
        if self._adaptive is not None:
            self._adaptive.stop(request)
