"""Adapts the number of drafts of each request (its depth) to acceptance and to the times of steps. No torch.

Drafts are on if they probably save time (draft_depth.py), and off otherwise. Such a decision may be wrong, and it may
become wrong when texts change. So there is a credit, in seconds. It limits the time that is lost by drafting:

- A small share of the time of steps is added to the credit, and half of it while many trials in a row were in vain.
  For each draft that held, the time of a token is added, up to a small amount. If too few drafts hold to pay, and that
  is sure, a trial adds only what it held beyond its chance: so trials cost no more than the share.
- The cost of drafts, and of waiting for them, is subtracted from it. This holds for drafts that are on and for trials.
- While there is credit, drafts may stay on even if they pay only with slightly higher chances than the measured ones.
- While drafts are off, some requests try one draft together as soon as the credit covers all these trials.
- While they are on, all of them try one more draft from time to time, if no step of that size has run lately. Otherwise
  a size that is believed to take too long would never run, so the belief would never be corrected.
- A step that computes prompts has only the drafts that fit in a small share of its time: a request waits for its first
  token.
- While drafts are off and nobody can try one, a step only counts: deciding costs time in each step, too.

A drafter that is often right pays for its own trials. A drafter that is always wrong costs no more than the share.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Protocol

from quire.cost.correct import size_of_step
from quire.logs import RateLimited, get_logger
from quire.request import Request
from quire.scheduler.draft_depth import (
    LEAST_WEIGHT,
    MIN_GAIN,
    Acceptance,
    best_depths,
    chances,
    prior_weight,
)

logger = get_logger(__name__)

# The number of drafts of a position that count in the rates of one request, and in the rates of all requests. One text
# changes sooner than all texts together.
MEMORY, MEMORY_OF_ALL = 32, 256
PRIOR_WEIGHT_OF_ALL = 8
TRIAL_SHARE = 1 / 128  # the share of the time of steps that is added to the credit
# After this number of trials in a row of which no draft held, half of that share is added. They were probably enough to
# know, and a text that becomes predictable is found later, but it is found.
MANY_IN_VAIN = 16
READING_SHARE = 1 / 72  # at most, if a drafter in the worker needs it to read missing tokens
MOST_SAVED, MOST_OWED = 8, 4  # bounds of the credit, in steps; it may be saved for one trial that takes longer
# Drafts that gain time add credit up to this, in steps. More would be lost if more requests come and drafts do not pay.
MOST_EARNED = 0.5
FIRST_SAVED, FIRST_TRIALS = 3, 16  # the credit at the start, in steps; or in trials, where these take less
# What is kept of the credit, in steps, when the number of requests changes. What others have saved would be spent at
# once on trials of new requests, which would lose much of a short answer's time. The rest is kept apart, up to
# MOST_SAVED or what the longest trial takes. A request may spend of it what it has added since its last drafts.
MOST_KEPT = 1
MOST_TRIALS = 8  # trials of a step: a drafter reads its weights for several at once
DOUBT_SAVED = 4  # steps of credit with which chances are taken to be higher by a standard deviation
SEARCH_STEPS = 16  # steps between two searches for a request that may try, if none may
MOST_WAITED = 64  # steps of a request between two trials that say nothing new
FIRST_WAIT = 16  # steps of a new request to its first trial, if others have tried some
LIKELY, FEW_TRIED = 0.5, 24  # after this number of trials, one that holds with this chance or more says nothing new
SURE = 1.5  # standard deviations by which the rate of all requests must be below the chance that pays, to be known
NEWS_SHARE = 1 / 4  # share of the running requests: after results of this share, depths are chosen anew
# Between two looks at what steps cost: at first the engine learns what steps with drafts take, and later contexts grow.
FIRST_COST_STEPS, COST_STEPS = 4, 64
FURTHER_STEPS = 64  # steps without a step of the size of one more draft for each request: then one tries it
LEAST_MISSED = 32  # tokens that a drafter has not read: fewer it reads beside its drafts
READ_TOKENS = 16  # before any step: a 0.6B model with two cores takes 17 ms a token, and 1.1 ms for a further one
# The first pass of a drafter reads the tokens of a request that held in the last step too: about this number more.
READ_MORE = 2
DRAFTER_MEMORY, READING_MEMORY = 9, 5  # steps that count in what a drafter takes
HIDDEN_SHARE = 0.1  # share of a step: the host's work meanwhile, with two steps in flight
FOUND_MEMORY = 8  # steps that count in the share of drafts that are found where they are asked for
PROMPT_SHARE = 1 / 100  # share of the time of a step that computes prompts: so much longer its drafts may make it
HORIZON = 1024  # tokens of a request, at most, that have to pay for what its drafter must read first


class StepSeconds(Protocol):
    """Predicts the time of steps for speculation: see CostModel.with_drafts."""

    def __call__(self, starts: Sequence[int], most: int, /) -> list[float]:
        """The seconds of a step with 0, 1, ..., `most` drafts in all.

        Args:
            starts: for each request, the number of tokens before the one token that it computes.
        """
        ...


class DrafterTime:
    """The seconds that a drafter in the worker needs for a step. They are learned from its steps.

    Weights are read once for all tokens of a step, so a further token takes only a share of the time of one. A step
    that is recorded takes several times as long as the same step later, so the median of the last steps counts.

    Args:
        seconds: the assumed time of one token, until the first step.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._further = seconds, 1 / READ_TOKENS  # of one token; of a further one, over that
        self._last = deque([self._seconds], maxlen=DRAFTER_MEMORY)
        self._last_further = deque([self._further], maxlen=READING_MEMORY)

    def __call__(self, num_tokens: int) -> float:
        """The time of one pass."""
        return self._seconds * self._units(num_tokens)

    def reading(self, num_requests: int) -> float:
        """What the first pass of a step takes longer than the others, if it drafts for this number of requests."""
        return self._seconds * READ_MORE * num_requests * self._further

    def of_step(self, depths: Sequence[int]) -> float:
        """The seconds in which it drafts this number of tokens of each row."""
        return self._seconds * self._units_of_step(depths)

    def observe(self, seconds: float, depths: Sequence[int]) -> None:
        """Learn how long it took to draft these numbers of tokens, one for each row."""
        self._last.append(seconds / self._units_of_step(depths))
        self._seconds = median_low(self._last)

    def observe_reading(self, seconds: float, depths: Sequence[int], num_tokens: int) -> None:
        """Learn how long it took to read this number of missing tokens too."""
        further = (seconds - self.of_step(depths)) / num_tokens
        self._last_further.append(max(further, 0.0) / self._seconds)
        self._further = median_low(self._last_further)

    def _units(self, num_tokens: int) -> float:
        return 1 + (num_tokens - 1) * self._further

    def _units_of_step(self, depths: Sequence[int]) -> float:
        passes = [sum(depth > at for depth in depths) for at in range(max(depths, default=0))]
        more = READ_MORE * passes[0] * self._further if passes else 0.0
        return sum(map(self._units, passes)) + more


@dataclass(slots=True)
class _Drafting:
    """The state of a request."""

    depth: int
    is_chosen: bool = False  # whether its depth was chosen, also if it is 0
    longest: int = 0  # the most drafts that pay if no drafts are found for other requests
    is_finding: bool = False  # whether the last search found drafts for it
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(MEMORY))
    num_read: int = 0  # the number of its tokens that a drafter in the worker has computed, as far as is known here
    is_read: bool = False  # whether the drafter has drafted with its present blocks
    is_trial: bool = False  # whether its last drafts were a trial
    is_over: bool = False  # whether it drafts no more
    saves_since: int = 0  # the step of its last drafts, or its first step
    wait: int = 1  # the steps between a trial that says nothing new and the next one
    next_trial: int = 0  # the first step in which it may try again


class AdaptiveDepth:
    """Chooses how many tokens each request drafts.

    Args:
        step_seconds: predicts the time of a step.
        draft_seconds: the time of a drafter in the worker; None: drafts cost no time.
        steps_in_flight: if there are several, they hide the time of the host. A step with drafts cannot hide it,
            because it waits for the tokens of the step before.
        num_stages: the number of pipeline stages. If there are several, steps without drafts have only a part of the
            requests, and a step with drafts has all of them.
        reads_late: whether the drafter reads missing tokens of a request only when it drafts for this request.
        beside_prompts: predicts the time of a step with this number of tokens of a prompt, and the time of one more
            row in it; None: prompts set no limit to drafts.

    Attributes:
        waits: whether the next step should wait for the tokens of the step before, so that it can have drafts.
        reading_seconds: the time in which the drafter reads missing tokens in the step that is being made.
    """

    def __init__(
        self,
        step_seconds: StepSeconds,
        draft_seconds: DrafterTime | None = None,
        steps_in_flight: int = 1,
        *,
        num_stages: int = 1,
        reads_late: bool = True,
        beside_prompts: Callable[[int], tuple[float, float]] | None = None,
    ) -> None:
        self._step_seconds, self._draft_seconds = step_seconds, draft_seconds
        self._beside_prompts = beside_prompts
        # Beside prompts: the seconds that drafts may still add to this step, and those of one more row.
        self._room, self._row_seconds = math.inf, 0.0
        self._num_stages, self._reads_late = num_stages, draft_seconds is not None and reads_late
        self._hidden_share = HIDDEN_SHARE if steps_in_flight > 1 else 0.0
        self.waits = self._is_reading = False
        self._num_missed = 0  # tokens that the drafter reads in this step
        self.reading_seconds = 0.0
        self._charged_reading = 0.0  # what the credit paid, or will pay, for the tokens read in the last step
        # The gain of tokens per second if all drafts are found, and the share of drafts that is found.
        self._gain, self._found_share = 0.0, 1.0
        # In this step: drafts that were asked for, drafts that were found, and requests for which some were found.
        self._num_asked = self._num_found = self._num_finding = 0
        # Further drafts for each request for which drafts are found. They replace drafts not found in the last step.
        self._more_each = 0
        self._depths: list[int] = []  # for each row of this step with drafts, their number
        self._requests: dict[str, _Drafting] = {}
        self._of_all = Acceptance(MEMORY_OF_ALL)
        self._prior_weight: float = LEAST_WEIGHT  # of the rates of all requests in those of one
        self._due: set[str] = set()  # requests that may try a draft
        self._num_running = self._num_news = self._step = 0
        self._depth_of_new, self._most_depth = 0, 0
        self._chosen_for = 0  # the requests of the last choice
        self._seconds: list[float] = []  # seconds of a step, by its drafts
        self._looked_at, self._next_look = (0, 0), 0  # requests and drafts; in which step again
        self._look_steps = FIRST_COST_STEPS  # between the last look and the next one
        self._next_search = 0  # for requests that may try: not before this step
        self._further = 0  # drafts of each request in this step beyond the chosen ones
        self._last_steps: dict[int, int] = {}  # size of a step without prompts -> the last one
        self._has_prompts = False
        self._may_pay = True  # if all drafts held
        self._is_idle = False  # whether nothing happens until the next look or search, or until requests come or end
        self._credit = 0.0  # see the module
        # The share of the time of steps that reading missing tokens needs; 0: too much, not needed, or not known yet.
        self._reading_share = 0.0
        self._needed = 0.0  # the chance with which one draft for each request pays
        self._num_vain = 0  # trials since the last one of which a draft held
        self._earned = 0.0  # the worth of the drafts that held since the last step began
        self._saved_for = 0.0  # seconds of a trial that somebody lacks
        self._dearest = 0.0  # seconds of the trial that takes longest
        self._kept_apart = 0.0  # credit from before the number of requests changed
        self._log, self._log_of_depths = RateLimited(logger), RateLimited(logger)

    def begin_step(
        self, running: Sequence[Request], most_each: int, most: int, count_prompt_tokens: Callable[[], int] = lambda: 0
    ) -> bool:
        """Begin a step. Returns whether any request may draft in it.

        Args:
            running: the running requests, at least one.
            most_each: the most drafts of one request, at least 1.
            most: the most drafts of the step.
            count_prompt_tokens: counts the tokens of prompts that the step computes, if drafts depend on them.
        """
        next_event = min(self._next_look, self._next_search) if self._may_pay else self._next_look
        if self._is_idle and len(running) == self._num_running and self._step + 1 < next_event:
            self._step += 1
            self._account(False)
            return False
        self._is_idle, num_prompt_tokens = False, count_prompt_tokens()
        if self._num_running and not self._has_prompts:
            self._last_steps[size_of_step(self._num_running + sum(self._depths))] = self._step
        self._step += 1
        self._has_prompts, self._further = num_prompt_tokens > 0, 0
        self._limit_beside(num_prompt_tokens)
        has_waited = self.waits
        self._account(has_waited)
        if self._num_asked:
            self._found_share += (self._num_found / self._num_asked - self._found_share) / FOUND_MEMORY
        num_spare = self._num_asked - self._num_found if self._draft_seconds is None else 0
        self._more_each = math.ceil(num_spare / max(self._num_finding, 1))
        self._num_asked = self._num_found = self._num_finding = 0
        num_running = len(running)
        self._num_news += abs(num_running - self._num_running)
        # The number stays the same if a request takes the place of another one. Such a request counts in each step
        # until its depth is chosen. So even one among many does not wait for long.
        self._num_news += sum(bool(r.output_token_ids) and not self._drafting(r).is_chosen for r in running)
        self._num_running = num_running
        if self._step >= self._next_look or (self._num_news and self._num_news >= NEWS_SHARE * num_running):
            self._choose([r for r in running if r.output_token_ids], most_each, most)
        if not self._has_room:
            self.waits, self._due = False, set()
            return has_waited
        is_on = self._most_depth > 0
        if is_on or not has_waited:
            self._due = self._trials(running)
        if is_on:
            self._further = self._one_further(running, most)
            self.waits = self._pays() or self._credit >= self._hidden_share * self._seconds[0]
            return True
        self.waits = bool(self._due) and not has_waited
        self._is_idle = not (self.waits or has_waited) and all(self._drafting(r).is_chosen for r in running)
        return self.waits or has_waited

    def depth(self, request: Request, most: int) -> int:
        """The number of tokens to draft for this request now, at most `most`. There is room for at least one."""
        drafting = self._drafting(request)
        if drafting.depth:
            longest = max(drafting.longest, drafting.depth)
            depth = min(drafting.depth + self._more_each * drafting.is_finding, longest)
            depth = min(max(depth, drafting.depth + self._further), most)
            drafting.is_finding = False
            depth = self._fitting(request, drafting, depth)
            self._num_asked += depth
            return depth
        return self._fitting(request, drafting, int(request.request_id in self._due))

    def drafted(self, request: Request, num_drafts: int) -> None:
        """Note how many drafts the request has in this step."""
        drafting = self._requests[request.request_id]
        self._room -= self._added_seconds(request, drafting, num_drafts)
        read_seconds = self._read_seconds(request, drafting)
        self._is_reading |= read_seconds > 0 or (self._reads_late and not drafting.is_read)
        self._num_missed += (request.num_tokens - drafting.num_read) * (read_seconds > 0)
        self.reading_seconds += read_seconds
        self._charged_reading += read_seconds
        self._depths.append(num_drafts)
        drafting.is_trial, drafting.saves_since = not drafting.depth, self._step
        if drafting.is_trial:
            self._due.discard(request.request_id)
            self.waits = True  # the next step waits for the result of the trial
        else:
            self._num_found += num_drafts
            self._num_finding += 1
            drafting.is_finding = True
        drafting.num_read, drafting.is_read = request.num_tokens, True

    def admit(self, request: Request, num_cached: int) -> None:
        """Note that a request has new blocks. Other requests have computed its first `num_cached` tokens.

        If drafts are on, the drafter has read these tokens too.
        """
        self._is_idle = False
        if not self._reads_late:
            return
        drafting = self._drafting(request)
        drafting.num_read, drafting.is_read = num_cached if self._most_depth else 0, False

    def settle(self, request: Request, num_drafts: int, num_held: int) -> None:
        """Note that this number of a request's drafts was verified, and that the first `num_held` of them held."""
        drafting = self._requests[request.request_id]
        prior = self._of_all.rates_of_all(1, PRIOR_WEIGHT_OF_ALL)
        (chance,) = drafting.acceptance.rates(prior, self._prior_weight)
        drafting.acceptance.add(num_drafts, num_held)
        self._of_all.add(num_drafts, num_held)
        self._num_news += 1
        (highest,) = self._of_all.rates(prior, PRIOR_WEIGHT_OF_ALL, SURE)
        worth = num_held - chance if drafting.is_trial and highest < self._needed else num_held
        self._earned += worth * self._seconds[0] / self._num_running
        self._is_idle = False
        if num_held:
            self._next_search = 0
        if num_held or drafting.is_trial:
            self._num_vain = 0 if num_held else self._num_vain + 1
        if num_held and (not drafting.is_trial or chance < LIKELY or self._of_all.num_tried < FEW_TRIED):
            drafting.wait = 1
        elif drafting.is_trial:
            drafting.wait = min(2 * drafting.wait, MOST_WAITED)
            drafting.next_trial = self._step + drafting.wait

    def read_later(self, request: Request, num_unread: int) -> None:
        """Note that the drafter made no drafts for a request, because it must first read this number of its tokens."""
        drafting = self._requests[request.request_id]
        drafting.num_read, drafting.is_read = drafting.num_read - num_unread, False
        self._num_missed -= num_unread
        unread_seconds = self._read_seconds(request, drafting)
        self._credit += unread_seconds
        self._charged_reading -= unread_seconds

    def stop(self, request: Request) -> None:
        """End the drafts of a request."""
        drafting = self._drafting(request)
        drafting.depth, drafting.is_over, self._is_idle = 0, True, False
        self._num_news += 1
        self._due.discard(request.request_id)

    def settle_drafter(self, seconds: float | None, depths: Sequence[int]) -> None:
        """Learn how long the worker's drafter took for a step with these numbers of drafts, one for each row.

        The credit pays this time in place of the predicted one: a pass that is recorded takes several times as long.
        None: the drafter raised, so its time is unknown.
        """
        if self._draft_seconds is not None and seconds is not None:
            if not self._is_reading:
                self._draft_seconds.observe(seconds, depths)
            elif self._num_missed >= READ_TOKENS:
                self._draft_seconds.observe_reading(seconds, depths, self._num_missed)
            # `_account` subtracts what is predicted now, also after this observation.
            self._credit -= seconds - self._draft_seconds.of_step(depths) - self._charged_reading
        self._is_reading, self._num_missed, self._charged_reading = False, 0, 0.0

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._requests.pop(request_id, None)
        self._due.discard(request_id)
        self._is_idle = False

    def _pays(self) -> bool:
        """Whether drafts gain more than the host's time, which is not hidden when a step waits for its tokens."""
        return self._gain * self._found_share > self._hidden_share

    @property
    def _share(self) -> float:
        """The share of the time of steps that is added to the credit."""
        return max(TRIAL_SHARE / 2 if self._num_vain >= MANY_IN_VAIN else TRIAL_SHARE, self._reading_share)

    def _account(self, has_waited: bool) -> None:
        """Subtract the cost of the last step's drafts from the credit, and add the share of the step's time."""
        if not self._seconds:
            return
        base = self._seconds[0]
        self._credit += self._share * base - has_waited * self._hidden_share * base
        gain, self._earned = self._earned, 0.0
        if self._depths:
            gain -= self._more_seconds(self._depths) + self.reading_seconds
            self._depths.clear()
        self._credit = min(self._credit + gain, max(self._credit, MOST_EARNED * base))
        self.reading_seconds = 0.0
        self._credit = min(max(self._credit, -MOST_OWED * base), max(MOST_SAVED * base, self._saved_for))

    def _trials(self, running: Sequence[Request]) -> set[str]:
        """The requests that may try a draft now. A request with tokens that the drafter must read first tries alone."""
        base = self._seconds[0] if self._seconds else 0.0
        if not base or not self._may_pay or self._step < self._next_search:
            return set()
        waiting, saved = self._hidden_share * base, self._credit + self._kept_apart
        if (lacking := waiting + self._more_seconds([1]) - saved) > 0:
            self._next_search = self._step + self._steps_to_save(lacking)
            return set()
        due, self._next_search = list[tuple[float, str]](), self._step + SEARCH_STEPS
        for request in running:
            known = self._drafting(request)
            if known.depth or known.is_over or not request.output_token_ids:
                continue
            if known.next_trial > self._step:
                self._next_search = min(self._next_search, known.next_trial)
            else:
                due.append((self._read_seconds(request, known), request.request_id))
        if not due:
            return set()
        due.sort()
        self._dearest = waiting + due[-1][0] + self._more_seconds([1])
        num_read = sum(seconds == 0.0 for seconds, _ in due)
        together = max(min(num_read, MOST_TRIALS), 1)
        for tried in (due[:together], *([each] for each in due[together:])):
            needed = waiting + tried[0][0] + self._more_seconds([1] * len(tried))
            lacking = max(needed - self._credit, 0.0)
            if lacking == 0 or lacking <= min(self._own_savings(tried), self._kept_apart):
                self._credit, self._kept_apart = self._credit + lacking, self._kept_apart - lacking
                self._saved_for, self._next_search = needed, 0
                return {request_id for _, request_id in tried}
            if tried[0] is due[0]:
                self._saved_for = needed
        self._next_search = self._step + self._steps_to_save(self._saved_for - self._credit)
        return set()

    def _steps_to_save(self, seconds: float) -> int:
        """The steps that add these seconds to the credit, at most SEARCH_STEPS."""
        return min(math.ceil(seconds / (self._share * self._seconds[0])), SEARCH_STEPS)

    def _one_further(self, running: Sequence[Request], most: int) -> int:
        """1 if all requests that draft should draft one more token in this step, to learn what such a step takes."""
        depths = [depth for request in running if (depth := self._drafting(request).depth)]
        further, num_running = [depth + 1 for depth in depths], self._num_running
        size = size_of_step(num_running + sum(further))
        last = self._last_steps.get(size, -FURTHER_STEPS)
        is_known = size == size_of_step(num_running + sum(depths)) or self._step - last < FURTHER_STEPS
        if is_known or self._has_prompts or sum(further) > min(most, len(self._seconds) - 1):
            return 0
        if self._credit < self._more_seconds(further) - self._more_seconds(depths):
            return 0
        self._next_look = self._step + 1
        self._last_steps[size] = self._step  # also if a drafter finds fewer in the text
        return 1

    def _own_savings(self, due: Sequence[tuple[float, str]]) -> float:
        """The credit that these requests have added since their last drafts, if as many requests ran as now."""
        num_steps = sum(self._step - self._requests[request_id].saves_since for _, request_id in due)
        return num_steps / self._num_running * self._share * self._seconds[0]

    def _limit_beside(self, num_prompt_tokens: int) -> None:
        """Note what drafts may add to a step with these tokens of prompts."""
        self._room = math.inf
        if self._beside_prompts is None or not num_prompt_tokens:
            return
        seconds, self._row_seconds = self._beside_prompts(num_prompt_tokens)
        self._room = PROMPT_SHARE * seconds

    @property
    def _has_room(self) -> bool:
        """Whether one draft of any request fits beside the prompts of the step."""
        drafting = 0.0 if self._draft_seconds is None else self._draft_seconds.of_step([1])
        return self._room == math.inf or self._row_seconds + drafting <= self._room

    def _fitting(self, request: Request, drafting: _Drafting, depth: int) -> int:
        """The most drafts of a request, up to `depth`, that fit beside the prompts of the step."""
        if self._room == math.inf:
            return depth
        return next(
            (count for count in range(depth, 0, -1) if self._added_seconds(request, drafting, count) <= self._room), 0
        )

    def _added_seconds(self, request: Request, drafting: _Drafting, depth: int) -> float:
        """The seconds that `depth` drafts of a request add to a step with prompts and the drafts that it has."""
        seconds = depth * self._row_seconds
        if self._draft_seconds is None:
            return seconds
        drafter, others = self._draft_seconds, self._depths
        seconds += drafter.of_step([*others, depth]) - drafter.of_step(others)
        return seconds + self._read_seconds(request, drafting)

    def _more_seconds(self, depths: Sequence[int]) -> float:
        """The seconds that these drafts add to a step."""
        count = min(sum(depths), len(self._seconds) - 1)
        more = self._seconds[count] - self._seconds[0]
        return more if self._draft_seconds is None else more + self._draft_seconds.of_step(depths)

    def _choose(self, requests: Sequence[Request], most_each: int, most: int) -> None:
        """Choose the depths, which stay until there is more news."""
        if not requests:
            return  # all requests compute their prompts now; the news is still used later
        self._num_news = 0
        most = min(most, most_each * len(requests))
        if self._step >= self._next_look or self._looked_at != (len(requests), most):
            is_new = self._looked_at != (len(requests), most)
            self._look_steps = FIRST_COST_STEPS if is_new else min(2 * self._look_steps, COST_STEPS)
            self._looked_at = len(requests), most
            self._look([request.num_computed_tokens for request in requests], most_each, most)
        if 0 < self._chosen_for != len(requests):
            apart = max(self._credit - MOST_KEPT * self._seconds[0], 0.0)
            most_apart = max(MOST_SAVED * self._seconds[0], self._dearest)
            self._credit, self._kept_apart = self._credit - apart, min(self._kept_apart + apart, most_apart)
        known = [self._drafting(request) for request in requests]
        prior = self._of_all.rates_of_all(most_each, PRIOR_WEIGHT_OF_ALL)
        self._prior_weight = prior_weight([each.acceptance for each in known], prior[0])
        depths, chances_of = self._best(requests, known, prior, 0.0)
        if self._credit > 0 and not any(depths):
            doubt = min(self._credit / (DOUBT_SAVED * self._seconds[0]), 1.0)
            depths, chances_of = self._best(requests, known, prior, doubt)
        price = self._price(chances_of, depths)
        for drafting, depth, row in zip(known, depths, chances_of, strict=True):
            drafting.depth, drafting.longest = depth, sum(chance > price for chance in row)
            drafting.is_chosen = True
        least = min((row[depth - 1] for row, depth in zip(chances_of, depths, strict=True) if depth), default=2.0)
        self._depth_of_new = sum(chance >= least for chance in chances(prior)) if not self._reads_late else 0
        self._gain = self._gain_of(chances_of, depths)
        most_before, was_on = self._most_depth, self._most_depth > 0
        self._most_depth, self._chosen_for = max(depths), len(requests)
        if was_on != (self._most_depth > 0):
            self._tell(self._log, len(requests), prior[0])
        elif most_before != self._most_depth:
            self._tell(self._log_of_depths, len(requests), prior[0])

    def _look(self, starts: Sequence[int], most_each: int, most: int) -> None:
        """Ask for the present times of steps."""
        is_first, num_requests = not self._seconds, len(starts)
        self._seconds = self._step_seconds(starts, most)
        if self._num_stages > 1:  # stages side by side complete a step of a part in the time of one stage
            self._hidden_share = 1 - self._step_seconds(starts[:: self._num_stages], 0)[0] / self._seconds[0]
        self._next_look = self._step + self._look_steps
        if self._reads_late and self._draft_seconds is not None:  # each step adds tokens that the drafter must read
            needed = 1.1 * (self._draft_seconds(2) - self._draft_seconds(1)) / self._seconds[0]
            self._reading_share = needed if needed <= READING_SHARE else 0.0
        if is_first:
            trial = self._more_seconds([1] * num_requests) / num_requests
            self._credit = min(FIRST_SAVED * self._seconds[0], FIRST_TRIALS * trial)
        all_hold = [[1.0] * most_each] * num_requests
        gain = self._hidden_share + MIN_GAIN
        self._may_pay = any(self._best_depths(all_hold, gain))
        self._needed = (1 + gain) * (1 + self._more_seconds([1] * num_requests) / self._seconds[0]) - 1

    def _best(
        self, requests: Sequence[Request], known: Sequence[_Drafting], prior: Sequence[float], doubt: float
    ) -> tuple[list[int], list[list[float]]]:
        """The best depths, and the chances from which they follow: higher by `doubt` standard deviations."""
        chances_of = [
            [] if each.is_over else chances(each.acceptance.rates(prior, self._prior_weight, doubt)) for each in known
        ]
        stays_on = self._most_depth > 0 and len(requests) == self._chosen_for
        gain = self._hidden_share + (0.0 if stays_on else MIN_GAIN)
        depths = self._best_depths(chances_of, gain)
        if self._reads_late and any(depths):
            for index in self._too_far_behind(requests, known, chances_of, depths):
                chances_of[index] = []
            depths = self._best_depths(chances_of, gain)
        return depths, chances_of

    def _best_depths(self, chances_of: Sequence[Sequence[float]], gain: float) -> list[int]:
        """The best depths for these chances. They are 0 if the gain is below `gain`."""
        drafter = self._draft_seconds
        first_seconds = 0.0 if drafter is None else drafter.reading(len(chances_of))
        return best_depths(chances_of, self._seconds, drafter, gain, first_seconds)

    def _too_far_behind(
        self,
        requests: Sequence[Request],
        known: Sequence[_Drafting],
        chances_of: Sequence[Sequence[float]],
        depths: Sequence[int],
    ) -> list[int]:
        """Indices of requests whose drafts would save less time than the drafter needs to read their missing tokens."""
        num_drafts, found = sum(depths), []
        more = self._more_seconds(depths)
        price = len(requests) / self._seconds[0]  # tokens per second without drafts
        for index, (request, depth) in enumerate(zip(requests, depths, strict=True)):
            held = sum(chances_of[index][:depth])
            gain = held - price * more * depth / num_drafts
            num_left = min(request.max_tokens - len(request.output_token_ids), HORIZON)
            if depth and gain * num_left / (1 + held) < price * self._read_seconds(request, known[index]):
                found.append(index)
        return found

    def _gain_of(self, chances_of: Sequence[Sequence[float]], depths: Sequence[int]) -> float:
        """The share by which these depths raise the tokens per second. It is negative for a loss."""
        held = sum(sum(row[:depth]) for row, depth in zip(chances_of, depths, strict=True))
        base = self._seconds[0]
        return (1 + held / len(depths)) * base / (base + self._more_seconds(depths)) - 1

    def _price(self, chances_of: Sequence[Sequence[float]], depths: Sequence[int]) -> float:
        """The chance at which the last of these drafts just pays for its time in the step."""
        count = max(sum(depths), 1)
        tokens = len(depths) + sum(sum(row[:depth]) for row, depth in zip(chances_of, depths, strict=True))
        return tokens * (self._seconds[count] - self._seconds[count - 1]) / self._seconds[count]

    def _drafting(self, request: Request) -> _Drafting:
        drafting = self._requests.get(request.request_id)
        if drafting is None:
            drafting = self._requests[request.request_id] = _Drafting(self._depth_of_new, saves_since=self._step)
            if self._of_all.num_tried >= FEW_TRIED:
                drafting.next_trial = self._step + FIRST_WAIT
        return drafting

    def _read_seconds(self, request: Request, drafting: _Drafting) -> float:
        """The seconds in which the drafter reads the missing tokens of a request; 0 if it lacks only a few."""
        num_missed = request.num_tokens - drafting.num_read
        is_beside = num_missed <= LEAST_MISSED and (drafting.is_read or num_missed <= READ_MORE)
        if self._draft_seconds is None or not self._reads_late or is_beside:
            return 0.0
        return self._draft_seconds(num_missed)

    def _tell(self, log: RateLimited, num_requests: int, rate: float) -> None:
        seconds, most = self._seconds, self._most_depth
        count = min(num_requests * max(most, 1), len(seconds) - 1)
        log.info(
            "Drafts are %s with %d running requests: %.0f %% of the first drafts hold, and a step that takes %.3g ms "
            "takes %.3g ms with %d drafts.",
            f"on, up to {most} each," if most else "off",
            num_requests,
            100 * rate,
            1e3 * seconds[0],
            1e3 * seconds[count],
            count,
        )
