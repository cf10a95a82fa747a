"""Computes the best number of drafts for each request from acceptance rates and the time of a step. No torch.

With drafts, a step gives more tokens and takes longer. To get the most tokens per second, a step takes the drafts with
the highest chances to hold, among all requests, as long as each further draft pays for its time. The chance of a draft
is the product of the acceptance rates of its position and of all positions before it. So it never exceeds the chance of
the draft before it, and a request's drafts are always taken from the first one on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

FIRST_RATE = 0.6  # the assumed rate of untried drafts: high enough to try them wherever they may save time
# The gain in tokens per second from which on drafts are made. Two losses are not counted: the best of many estimated
# chances is too good, by about 3 % with eight requests, and requests with drafts end one after the other, not together.
MIN_GAIN = 0.04
# The rate of all requests counts as this number of a request's own drafts: the most if requests are alike, the least if
# they differ or if too little is known.
LEAST_WEIGHT, MOST_WEIGHT = 8, 64


class Acceptance:
    """The share of drafts that held, by position, if all drafts before them held. Older drafts count less and less.

    Args:
        memory: the number of drafts of a position that count in all.
    """

    __slots__ = ("_held", "_keep", "_squares", "_tried")

    def __init__(self, memory: float) -> None:
        self._keep = 1 - 1 / memory
        self._held: list[float] = []
        self._tried: list[float] = []
        self._squares = 0.0

    def add(self, num_drafts: int, num_held: int) -> None:
        """Add the result of one row: `num_drafts` drafts were verified, and the first `num_held` of them held."""
        held, tried, keep = self._held, self._tried, self._keep
        num_tried = min(num_drafts, num_held + 1)
        while len(tried) < num_tried:
            held.append(0.0)
            tried.append(0.0)
        for position in range(num_tried):
            held[position] = keep * held[position] + (position < num_held)
            tried[position] = keep * tried[position] + 1
        if num_tried:
            self._squares = keep * keep * self._squares + 1

    @property
    def num_tried(self) -> float:
        """First drafts that count now, at most `memory`."""
        return self._tried[0] if self._tried else 0.0

    @property
    def num_held(self) -> float:
        """Those of them that held."""
        return self._held[0] if self._held else 0.0

    @property
    def squares(self) -> float:
        """The sum of the squares of the weights with which first drafts count now."""
        return self._squares

    def rates(self, prior: Sequence[float], weight: float, doubt: float = 0.0) -> list[float]:
        """The acceptance rate of each position that `prior` has.

        Args:
            prior: the assumed rates.
            weight: an assumed rate counts as much as this number of drafts.
            doubt: the rates are raised by this number of standard deviations.
        """
        held, tried = self._held, self._tried
        known = [(h + weight * rate) / (t + weight) for h, t, rate in zip(held, tried, prior, strict=False)]
        rates = [*known, *prior[len(known) :]]
        if not doubt:
            return rates
        counts = [*tried, *[0.0] * len(rates)]
        return [
            min(rate + doubt * math.sqrt(rate * (1 - rate) / (count + weight)), 1.0)
            for rate, count in zip(rates, counts, strict=False)
        ]

    def rates_of_all(self, most: int, weight: float) -> list[float]:
        """The rates of `most` positions. The prior of a position is the rate of the position before it.

        Priors are forgotten as the oldest drafts are.

        Args:
            weight: a prior counts as much as this number of drafts, before it is forgotten.
        """
        rates, rate, keep = [], FIRST_RATE, self._keep
        for position in range(most):
            if position < len(self._tried):
                left = weight * (1 - self._tried[position] * (1 - keep))
                rate = (self._held[position] + left * rate) / (self._tried[position] + left)
            rates.append(rate)
        return rates


def prior_weight(requests: Sequence[Acceptance], rate: float) -> float:
    """How much the rate of all requests says about each of them, in drafts of its own.

    The rates of requests that are alike differ by chance only. First drafts count with weights, older ones with less.
    Let t be the sum of these weights and s the sum of their squares. With weight w, the number of them that held
    differs from t * rate by a variance of rate * (1 - rate) * (s + (t * t - s) / (w + 1)): the beta-binomial
    distribution. The result is the weight that explains the squares of these differences together (method of moments).
    One request alone cannot show that requests are alike.

    Args:
        rate: the acceptance rate of first drafts of all requests.
    """
    variance = rate * (1 - rate) * (1 - 1 / max(len(requests), 1))  # the requests are a part of the rate of all
    expected, excess = 0.0, 0.0
    for each in requests:
        expected += (each.num_tried**2 - each.squares) * variance
        excess += (each.num_held - each.num_tried * rate) ** 2 - each.squares * variance
    weight = (1 + expected) / (1 / (LEAST_WEIGHT + 1) + max(excess, 0.0)) - 1  # if nothing is known, the least one
    return min(max(weight, LEAST_WEIGHT), MOST_WEIGHT)


def chances(rates: Sequence[float]) -> list[float]:
    """For each position, the probability that all drafts up to this position hold."""
    return list(accumulate(rates, mul))


def best_depths(
    chances_of: Sequence[Sequence[float]],
    step_seconds: Sequence[float],
    draft_seconds: Callable[[int], float] | None = None,
    least_gain: float = 0.0,
    first_seconds: float = 0.0,
) -> list[int]:
    """The number of drafts of each request that gives the most tokens per second.

    The result is the optimum if the drafter's time for a pass is a constant plus an amount per token.

    Args:
        chances_of: the chances of each request, as `chances` gives them: they never rise.
        step_seconds: the seconds of the step without drafts, with one, and so on, up to the most drafts of a step.
        draft_seconds: gives the seconds in which the drafter computes a step, from its number of tokens; None: it takes
            no time.
        least_gain: share of the tokens per second by which drafts have to raise them; below it there are none.
        first_seconds: the seconds that a step with any drafts takes in addition.
    """
    num_requests, most_drafts = len(chances_of), len(step_seconds) - 1
    drafts = sorted(
        ((-chance, position, index) for index, row in enumerate(chances_of) for position, chance in enumerate(row))
    )
    longest = max(map(len, chances_of), default=0)
    best, chosen = (1 + least_gain) * num_requests / step_seconds[0], (0, 0)
    for depth in range(1, longest + 1) if draft_seconds is not None else [longest]:
        tokens, seconds, count = float(num_requests), first_seconds, 0
        num_at = [0] * depth
        for lost, position, _ in drafts:
            if position >= depth:
                continue
            if count == most_drafts:
                break
            count += 1
            tokens -= lost
            if draft_seconds is not None:
                others, num_at[position] = num_at[position], num_at[position] + 1
                seconds += draft_seconds(others + 1) - (draft_seconds(others) if others else 0.0)
            if (rate := tokens / (step_seconds[count] + seconds)) > best:
                best, chosen = rate, (depth, count)
    depth, count = chosen
    depths = [0] * num_requests
    for _, _, index in [draft for draft in drafts if draft[1] < depth][:count]:
        depths[index] += 1
    return depths
