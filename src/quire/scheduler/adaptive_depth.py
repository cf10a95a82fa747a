"""Depths of drafts that follow what held and what steps cost, while a scheduler runs. No torch.

Where drafts do not pay (draft_depth.py), a request tries one from time to time, as often as a small share of the time
allows: texts change, and so do the chances of drafts. A trial that holds is followed by another one at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.logs import RateLimited, get_logger
from quire.request import Request
from quire.scheduler.draft_depth import MIN_GAIN, Acceptance, best_depths, chances

logger = get_logger(__name__)

# Drafts of a position that count in the rates of a request, and in those of all: a text changes sooner than traffic.
MEMORY, MEMORY_OF_ALL = 32, 256
PRIOR_WEIGHT, PRIOR_WEIGHT_OF_ALL = 8, 16
TRIAL_SHARE = 1 / 128  # of the time of steps, for trials
MOST_SAVED = 16  # steps whose time this share may have left over, or one trial that takes longer
MOST_BORROWED = 8  # trials behind others that held
MOST_WAITED = 64  # steps of a request between two trials that failed
NEWS_SHARE = 1 / 4  # of the running requests: after so many results, depths are chosen anew
COST_STEPS = 64  # between two looks at what steps cost: contexts grow
LEAST_MISSED = 32  # tokens that a drafter has not read: fewer it reads beside its drafts
READ_TOKENS = 16  # a 0.6B model with two cores: 17 ms a token, and 1.1 ms for each more in a prompt
DRAFTER_MEMORY = 8  # steps that count in what a drafter takes
HIDDEN_SHARE = 0.1  # of a step: what the host does meanwhile, with two steps in flight
FOUND_MEMORY = 8  # steps that count in the share of drafts that are found where they are asked for
HORIZON = 1024  # tokens of a request, at most, that have to pay for what its drafter must read first


class StepSeconds(Protocol):
    """What speculation asks of whoever knows how long steps take: CostModel.with_drafts."""

    def __call__(self, starts: Sequence[int], most: int, /) -> list[float]:
        """The seconds of a step with one token of each request behind `starts`, alone and with 1 to `most` drafts."""
        ...


class DrafterTime:
    """Seconds in which a drafter in the worker computes a step of so many tokens, learned from its steps.

    Reading `READ_TOKENS` tokens at once takes about twice the time of one token: weights are read once.

    Args:
        seconds: of one token, before any step.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, num_tokens: int) -> float:
        return self._seconds * _units(num_tokens)

    def observe(self, seconds: float, depths: Sequence[int]) -> None:
        """It took so long to draft as many tokens of each row."""
        units = sum(_units(sum(depth > at for depth in depths)) for at in range(max(depths)))
        self._seconds += (seconds / units - self._seconds) / DRAFTER_MEMORY


def _units(num_tokens: int) -> float:
    return (READ_TOKENS - 1 + num_tokens) / READ_TOKENS


@dataclass(slots=True)
class _Drafting:
    """What is known of a request."""

    depth: int
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(MEMORY, PRIOR_WEIGHT))
    num_read: int = 0  # tokens that a drafter in the worker has computed, as far as is known here
    is_read: bool = False  # it has drafted with the blocks that it has
    is_trial: bool = False  # what it drafted last
    is_over: bool = False  # it drafts no more
    wait: int = 1  # steps to the next trial, after one that failed
    next_trial: int = 0  # not before this step


class AdaptiveDepth:
    """Chooses how many tokens each request drafts.

    Args:
        step_seconds: what a step costs.
        draft_seconds: of a drafter in the worker; None: drafts cost no time.
        steps_in_flight: with more than one, drafts cost the time of the host too, which is not hidden then.
        reads_late: that drafter reads what it has not seen of a request when it drafts for it.

    Attributes:
        waits: steps with drafts are worth waiting for the tokens that they begin with.
    """

    def __init__(
        self,
        step_seconds: StepSeconds,
        draft_seconds: DrafterTime | None = None,
        steps_in_flight: int = 1,
        *,
        reads_late: bool = True,
    ) -> None:
        self._step_seconds, self._draft_seconds = step_seconds, draft_seconds
        self._reads_late = draft_seconds is not None and reads_late
        self._hidden_share = HIDDEN_SHARE if steps_in_flight > 1 else 0.0
        self.waits = self._is_reading = False
        self._gain, self._found_share = 0.0, 1.0  # of tokens per second, if all drafts are found; and how many are
        self._num_asked = self._num_found = 0  # drafts of this step
        self._requests: dict[str, _Drafting] = {}
        self._of_all = Acceptance(MEMORY_OF_ALL, PRIOR_WEIGHT_OF_ALL)
        self._promising: set[str] = set()  # requests whose last trial held
        self._num_running = self._num_news = self._step = 0
        self._depth_of_new, self._most_depth = 0, 0
        self._seconds: list[float] = []  # of a step, by its drafts
        self._looked_at, self._next_look = (0, 0), 0  # requests and drafts; in which step again
        self._credit = self._trial_seconds = self._wait_seconds = 0.0
        self._cheapest = 0.0  # seconds of a trial that somebody lacks, its waiting included
        self._log = RateLimited(logger)

    def begin_step(self, running: Sequence[Request], most_each: int, most: int) -> bool:
        """Whether anybody may draft in this step.

        Args:
            running: at least one.
            most_each: drafts of a request, at least 1, and `most` of the step.
        """
        self._step += 1
        has_waited = self.waits
        if self._seconds:
            if self._credit < max(MOST_SAVED * self._seconds[0], self._cheapest):
                self._credit += TRIAL_SHARE * self._seconds[0]
            if has_waited and not self._pays():
                self._credit -= self._wait_seconds
        if self._num_asked:
            self._found_share += (self._num_found / self._num_asked - self._found_share) / FOUND_MEMORY
            self._num_asked = self._num_found = 0
        num_running = len(running)
        self._num_news += abs(num_running - self._num_running)
        self._num_running = num_running
        if self._num_news and self._num_news >= NEWS_SHARE * num_running:
            self._choose([r for r in running if r.output_token_ids], most_each, most)
        if self._most_depth > 0:
            self.waits = self._pays() or self._credit >= self._wait_seconds
            return True
        self.waits = not has_waited and self._is_trial_due(running)
        return self.waits or has_waited

    def depth(self, request: Request) -> int:
        """How many tokens to draft for this request now."""
        drafting = self._drafting(request)
        if drafting.depth:
            self._num_asked += drafting.depth
            return drafting.depth
        if request.request_id in self._promising and self._may_try_again():
            self._promising.remove(request.request_id)  # until this one holds
            return 1
        may_try = self._credit >= self._trial_seconds + self._read_seconds(request, drafting)
        return 1 if may_try and self._step >= drafting.next_trial else 0

    def drafted(self, request: Request, num_drafts: int) -> None:
        """The request has so many drafts in this step."""
        drafting = self._requests[request.request_id]
        read_seconds = self._read_seconds(request, drafting)
        self._is_reading |= read_seconds > 0 or not drafting.is_read
        drafting.is_trial = not drafting.depth
        if drafting.is_trial:
            self._credit -= self._trial_seconds + read_seconds
            self.waits = True  # for what becomes of it
        else:
            self._num_found += num_drafts
        drafting.num_read, drafting.is_read = request.num_tokens, True

    def admit(self, request: Request, num_cached: int) -> None:
        """The request has new blocks; those of the first tokens come from others, whose drafter has read them too.

        Where nobody drafts, it has not.
        """
        if not self._reads_late:
            return
        drafting = self._drafting(request)
        drafting.num_read, drafting.is_read = num_cached if self._most_depth else 0, False

    def settle(self, request: Request, num_drafts: int, num_held: int) -> None:
        """So many of its drafts were verified; the first `num_held` of them held."""
        drafting = self._requests[request.request_id]
        drafting.acceptance.add(num_drafts, num_held)
        self._of_all.add(num_drafts, num_held)
        self._num_news += 1
        if drafting.is_trial and num_held:
            self._promising.add(request.request_id)
            drafting.wait = 1
            # Its cost is given back, as far as its token is worth that.
            cost = self._trial_seconds + 2 * self._wait_seconds
            self._credit += min(cost, self._seconds[0] / self._num_running)
        elif drafting.is_trial:
            drafting.wait = min(2 * drafting.wait, MOST_WAITED)
            drafting.next_trial = self._step + drafting.wait

    def read_later(self, request: Request, num_unread: int) -> None:
        """Its drafter has yet to read so many of its tokens, and has made no drafts."""
        drafting = self._requests[request.request_id]
        drafting.num_read, drafting.is_read = drafting.num_read - num_unread, False
        if drafting.is_trial:
            self._credit += self._read_seconds(request, drafting)

    def stop(self, request: Request) -> None:
        """It drafts no more."""
        drafting = self._drafting(request)
        drafting.depth, drafting.is_over = 0, True
        self._num_news += 1
        self._promising.discard(request.request_id)

    def settle_drafter(self, seconds: float, depths: Sequence[int]) -> None:
        """The worker's drafter took so long for a step with as many drafts of each row."""
        if self._draft_seconds is not None and not self._is_reading:
            self._draft_seconds.observe(seconds, depths)
        self._is_reading = False

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._requests.pop(request_id, None)
        self._promising.discard(request_id)

    def _pays(self) -> bool:
        """Whether drafts gain more than the time of the host that waiting for their requests' newest tokens costs."""
        return self._gain * self._found_share > self._hidden_share

    def _is_trial_due(self, running: Sequence[Request]) -> bool:
        """Whether some request may try a draft once its newest token is known."""
        if self._promising and self._may_try_again(self._wait_seconds):
            return True
        seconds = self._trial_seconds + self._wait_seconds
        if self._credit < seconds:
            return False
        answering = ((request, self._drafting(request)) for request in running if request.output_token_ids)
        due = [
            self._read_seconds(request, known)
            for request, known in answering
            if self._step >= known.next_trial and not known.is_over
        ]
        self._cheapest = seconds + min(due, default=0.0)
        return bool(due) and self._credit >= self._cheapest

    def _may_try_again(self, seconds: float = 0.0) -> bool:
        """A trial may be borrowed from the time to come, but not more and more of them.

        Args:
            seconds: that are lost before the trial.
        """
        return self._credit - seconds >= -MOST_BORROWED * (self._trial_seconds + self._wait_seconds)

    def _choose(self, requests: Sequence[Request], most_each: int, most: int) -> None:
        """The depths until there is more news."""
        if not requests:
            return  # their prompts are computed: they are still news
        self._num_news = 0
        most = min(most, most_each * len(requests))
        if self._step >= self._next_look or self._looked_at != (len(requests), most):
            self._looked_at = len(requests), most
            self._seconds = self._step_seconds([request.num_computed_tokens for request in requests], most)
            self._trial_seconds = self._seconds[1] - self._seconds[0]
            self._wait_seconds = self._hidden_share * self._seconds[0]
            if self._draft_seconds is not None:
                self._trial_seconds += self._draft_seconds(1)
            self._next_look = self._step + COST_STEPS
        prior = self._of_all.rates_of_all(most_each)
        known = [self._drafting(request) for request in requests]
        chances_of = [[] if drafting.is_over else chances(drafting.acceptance.rates(prior)) for drafting in known]
        gain = self._hidden_share + (0.0 if self._most_depth else MIN_GAIN)
        depths = best_depths(chances_of, self._seconds, self._draft_seconds, gain)
        if self._reads_late and any(depths):
            for index in self._too_far_behind(requests, known, chances_of, depths):
                chances_of[index] = []
            depths = best_depths(chances_of, self._seconds, self._draft_seconds, gain)
        least = min((row[depth - 1] for row, depth in zip(chances_of, depths, strict=True) if depth), default=2.0)
        self._depth_of_new = sum(chance >= least for chance in chances(prior)) if not self._reads_late else 0
        for request, drafting, depth in zip(requests, known, depths, strict=True):
            drafting.depth = depth
            if depth:
                self._promising.discard(request.request_id)
        self._gain = self._gain_of(chances_of, depths)
        was_on, self._most_depth = self._most_depth > 0, max(depths)
        if was_on != (self._most_depth > 0):
            self._tell(len(requests), prior[0])

    def _too_far_behind(
        self,
        requests: Sequence[Request],
        known: Sequence[_Drafting],
        chances_of: Sequence[Sequence[float]],
        depths: Sequence[int],
    ) -> list[int]:
        """Those requests whose drafts gain less than the time in which their drafter reads what it has missed."""
        num_drafts, found = sum(depths), []
        more = self._seconds_with(depths) - self._seconds[0]
        price = len(requests) / self._seconds[0]  # tokens of a second
        for index, (request, depth) in enumerate(zip(requests, depths, strict=True)):
            held = sum(chances_of[index][:depth])
            gain = held - price * more * depth / num_drafts
            num_left = min(request.max_tokens - len(request.output_token_ids), HORIZON)
            if depth and gain * num_left / (1 + held) < price * self._read_seconds(request, known[index]):
                found.append(index)
        return found

    def _seconds_with(self, depths: Sequence[int]) -> float:
        """Of a step with these drafts."""
        seconds = self._seconds[sum(depths)]
        if self._draft_seconds is not None:
            seconds += sum(self._draft_seconds(sum(depth > at for depth in depths)) for at in range(max(depths)))
        return seconds

    def _gain_of(self, chances_of: Sequence[Sequence[float]], depths: Sequence[int]) -> float:
        """The share by which these depths raise the tokens per second."""
        held = sum(sum(row[:depth]) for row, depth in zip(chances_of, depths, strict=True))
        return (1 + held / len(depths)) * self._seconds[0] / self._seconds_with(depths) - 1

    def _drafting(self, request: Request) -> _Drafting:
        drafting = self._requests.get(request.request_id)
        if drafting is None:
            drafting = self._requests[request.request_id] = _Drafting(self._depth_of_new)
        return drafting

    def _read_seconds(self, request: Request, drafting: _Drafting) -> float:
        """In which the drafter reads what it has missed of a request; what it reads at every turn does not count."""
        num_missed = request.num_tokens - drafting.num_read
        if self._draft_seconds is None or not self._reads_late or num_missed <= LEAST_MISSED:
            return 0.0
        return self._draft_seconds(num_missed)

    def _tell(self, num_requests: int, rate: float) -> None:
        seconds = self._seconds
        self._log.info(
            "Drafts are %s with %d running requests: %.0f %% of the first drafts hold, and a step that takes %.3g ms "
            "takes %.3g ms with %d drafts.",
            "on" if self._most_depth else "off",
            num_requests,
            100 * rate,
            1e3 * seconds[0],
            1e3 * seconds[min(num_requests, len(seconds) - 1)],
            min(num_requests, len(seconds) - 1),
        )
