"""The cost model of one engine. It answers every question about the time of a step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from statistics import NormalDist

from quire.cost.arithmetic import Load, StepArithmetic
from quire.cost.calibrate import Fit
from quire.cost.correct import (
    MAX_COLD_SECONDS,
    MAX_RATIO,
    SHORTEST_PAUSE,
    SPREAD_QUANTILE,
    Pause,
    Tail,
    possible_spread,
)
from quire.cost.overhead import MAX_SECONDS, Overhead, OverheadCorrection
from quire.cost.running_steps import running_steps
from quire.cost.step_time import MIN_SPREAD, StepTime, step_seconds


class CostModel:
    """Step times of one model in one form on one machine.

    Attributes:
        learn: is told each running step and its seconds, as long as the constants are not all measured; else None.
    """

    def __init__(self, arithmetic: StepArithmetic, fit: Fit) -> None:
        self.arithmetic = arithmetic
        self.learn: Callable[[Load, float], None] | None = None
        self._pause, self._overhead = Pause(fit.cold), OverheadCorrection(fit.overhead)
        self.calibrate(fit)

    def calibrate(self, fit: Fit) -> None:
        """Take other constants, and forget what running steps have corrected.

        The costs of a pause and of the front end do not depend on the constants. They are kept, unless the fit brings
        the costs that an earlier start has learnt.
        """
        self.fit = fit
        self._steps, self._tail = running_steps(self.arithmetic, fit), Tail()
        if fit.cold:
            self._pause = Pause(fit.cold)
        self._steps.cold = self._pause.cold
        if fit.overhead is not None:
            self._overhead = OverheadCorrection(fit.overhead)

    def widen(self, spread: float) -> None:
        """Give predictions at least this spread, until running steps change it."""
        self._steps.set_spread(max(spread, self.spread))

    @property
    def num_corrections(self) -> int:
        """The number of running steps that have corrected these constants."""
        return self._steps.num_corrections

    def corrected_fit(self) -> Fit:
        """The constants, corrected by running steps, for later starts."""
        spread, factors = possible_spread(self.spread), dict(self._steps.factors())
        cold, overhead = min(self._pause.cold, MAX_COLD_SECONDS), self.overhead
        if overhead is not None:
            numbers = (overhead.per_request, overhead.per_prompt_token)
            overhead = Overhead(*(min(each, MAX_SECONDS) for each in numbers))
        return replace(self.fit, spread=spread, factors=factors, cold=cold, overhead=overhead)

    @property
    def overhead(self) -> Overhead | None:
        """What the front end takes for a request; None: it has measured none."""
        return self._overhead.overhead

    def observe_overhead(self, num_prompt_tokens: int, seconds: float) -> None:
        """The front end took `seconds` for a request. Impossible ones are ignored."""
        if 0 <= seconds < math.inf and num_prompt_tokens > 0:
            self._overhead.add(num_prompt_tokens, seconds)

    @property
    def spread(self) -> float:
        """Nine of ten steps lie within the ratio 1 + spread of their prediction."""
        return self._steps.spread

    def predict(self, load: Load, pause: float = 0.0) -> StepTime:
        """The time of a step.

        Args:
            pause: seconds that the engine did nothing before it.
        """
        return self._steps.predict(load, pause)

    def predict_rows(
        self, starts: list[int], counts: list[int], num_logits: int, pause: float = 0.0, other_tokens: int = 0
    ) -> tuple[Load, StepTime]:
        """The load of a step's rows (see StepArithmetic.load), and its time (see `predict`).

        Args:
            other_tokens: see Load.
        """
        return self._steps.predict_rows(starts, counts, num_logits, pause, other_tokens)

    def observe(self, load: Load, predicted_seconds: float, seconds: float, pause: float = 0.0) -> None:
        """A step took `seconds`. A step that was not timed, or has no time of its own, is ignored.

        Args:
            predicted_seconds: the prediction, with the time that the pause was expected to cost.
        """
        if seconds <= 0 or predicted_seconds <= 0:
            return
        if is_cold := pause >= SHORTEST_PAUSE:
            alone = max(predicted_seconds - self._pause.seconds(pause), predicted_seconds / MAX_RATIO)
            self._pause.add(pause, alone, seconds)
            self._steps.cold = self._pause.cold
            predicted_seconds = alone + self._pause.seconds(pause)
        self._steps.correct(load.num_tokens, predicted_seconds, seconds)
        if is_cold:
            return  # no running answer waits for such a step, and the constants are those of a busy engine
        if load.num_tokens > load.num_rows:
            self._tail.add(predicted_seconds, seconds)
        if self.learn is not None:
            self.learn(load, seconds)

    def margin(self, attainment: float) -> float:
        """The factor on a prediction that this share of the steps does not exceed.

        It comes from recent steps with prompts. Until there are enough of them, errors are taken as normal.
        """
        deviations = _quantile(attainment) / SPREAD_QUANTILE
        if (needed := self._tail.ratio(attainment)) is None:
            return math.pow(1 + max(self.spread, MIN_SPREAD), deviations)
        return max(needed, math.pow(1 + MIN_SPREAD, deviations))

    def with_drafts(self, starts: Sequence[int], most: int) -> list[float]:
        """The seconds of a step with one token of each request, alone and with 1 to `most` drafts behind them.

        Only some counts are predicted. A border of tiles lies only between predicted counts that follow each other
        directly. Between two predicted counts the time is a line, and more drafts never take less time.

        Args:
            starts: computed tokens of each request, one or more.
        """
        base = self.arithmetic.load(starts, [1] * len(starts), len(starts))
        count, known = 0, [self.predict(base).seconds]
        while count < most:
            same_tiles = self.arithmetic.same_tiles(base.num_rows + count) - base.num_rows
            further = min(count + 1 + count // 3, max(same_tiles, count + 1), most)
            num_tokens = base.num_rows + further
            load = Load(
                num_tokens,
                base.num_rows,
                num_tokens,
                tuple(tokens + further for tokens in base.kv_tokens),
                tuple(pairs * num_tokens // base.num_rows for pairs in base.pairs),
            )
            last = known[-1]
            rise = max(self.predict(load).seconds - last, 0.0) / (further - count)
            known += [last + step * rise for step in range(1, further - count + 1)]
            count = further
        return known

    def beside_prompts(self, num_tokens: int) -> tuple[float, float]:
        """The seconds of a step with this number of tokens of a prompt, and those of one more row that has logits.

        A row takes its share of as many further rows, because a single one may or may not need another tile. Both
        times have the correction of the first step: the corrections of two sizes follow different steps, and their
        difference is no time of a row.
        """
        load = self.arithmetic.load([0], [num_tokens], 1)
        twice = self.arithmetic.load([0, 0], [num_tokens, num_tokens], 1 + num_tokens)
        factor = self._steps.factor(num_tokens)
        seconds, longer = (
            factor * step_seconds(self.arithmetic.demand(each), self.fit.constants) for each in (load, twice)
        )
        return seconds, max(longer - seconds, 0.0) / num_tokens

    def seconds_alone(self, start: int, count: int) -> float:
        """The seconds of a step with `count` new tokens of one request after `start` computed ones."""
        return self.predict(self.arithmetic.load([start], [count], 1)).seconds

    def tokens_beside(self, num_answers: int, context: int, times: float, most: int) -> int:
        """The tokens of a new prompt, at most `most`, with which a step of answers takes at most `times` as long.

        Args:
            context: tokens of each answer.
        """
        answers = self.arithmetic.load([context - 1] * num_answers, [1] * num_answers, num_answers)
        return StepRoom(self, answers, times * self.predict(answers).seconds).fitting(0, most)

    def room_within(
        self, seconds: float, attainment: float, starts: Sequence[int], counts: Sequence[int], num_logits: int
    ) -> StepRoom:
        """The room for prompts beside the rows of a step that takes `seconds`.

        Args:
            attainment: the share of such steps that must take no longer.
            starts, counts: computed and new tokens of each row.
            num_logits: rows of logits of all rows together.
        """
        return StepRoom(self, self.arithmetic.load(starts, counts, num_logits), seconds / self.margin(attainment))


class StepRoom:
    """The remaining time of a step that is being filled. With lanes, it is the room of one lane: see `beside`."""

    def __init__(self, cost: CostModel, load: Load, seconds: float) -> None:
        self._cost, self._load, self._seconds = cost, load, seconds
        self._others: Sequence[StepRoom] = ()
        self._num_later = 0

    def beside(self, others: Sequence[StepRoom], num_later: int) -> None:
        """Share the step with other lanes. Their tokens go to this lane's experts too, and the reverse.

        Call it for all lanes before `take`.

        Args:
            num_later: the number of lanes that are filled later. Each is expected to take as many tokens as this one.
        """
        self._others, self._num_later = others, num_later
        self._load = self._load._replace(other_tokens=sum(other._load.num_tokens for other in others))

    def fitting(self, start: int, most: int) -> int:
        """The number of a prompt's tokens, after its first `start` and at most `most`, that the time allows."""

        def needed(count: int) -> float:
            later = self._num_later * count
            own = self._seconds_with(self._with_prompt(start, count), later)
            others = (other._load for other in self._others if other._load.num_tokens)
            return max([own, *(self._seconds_with(load, count + later) for load in others)])

        return most if needed(most) <= self._seconds else bisect_right(range(1, most + 1), self._seconds, key=needed)

    def take(self, start: int, count: int) -> None:
        """Put `count` tokens of a prompt into the step."""
        self._load = self._with_prompt(start, count)
        for other in self._others:
            other._load = other._load._replace(other_tokens=other._load.other_tokens + count)

    def _seconds_with(self, load: Load, num_more: int) -> float:
        """The time of a lane if the others have this many more tokens."""
        return self._cost.predict(load._replace(other_tokens=load.other_tokens + num_more)).seconds

    def _with_prompt(self, start: int, count: int) -> Load:
        return self._cost.arithmetic.with_row(self._load, start, count, 1)


@cache
def _quantile(share: float) -> float:
    """The number of standard deviations below which this share of a normal distribution lies."""
    return NormalDist().inv_cdf(share)
