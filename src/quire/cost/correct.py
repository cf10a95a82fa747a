"""Running steps correct the predictions. Each size of step has a factor that follows measured / predicted.

It follows slowly, so that single steps move it little, and fast while most errors have the same sign. This is the
adaptive response rate of Trigg and Leach (Operational Research Quarterly 18, 1967): the weight of a step is the mean
error over the mean size of errors.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.cost.step_time import MIN_SPREAD

NEWEST_WEIGHT = 1 / 16  # the least weight of a step in the factor of its size
MOST_WEIGHT, SIGNAL_WEIGHT = 1 / 2, 1 / 4  # the most weight of a step; the weight of the newest error in both means
LEAST_SCATTER = 0.05  # the least mean size of errors: a smaller mean error, even of one sign, is no reason to hurry
PRIOR_STEPS = 4  # the calibration counts as 4 steps: the first step of a size has a weight of 1/4, the next one 1/5
FORGOTTEN_SHARE = 1 / 256  # each step moves the factors of the other sizes by this share towards its own
# What slows a machine down slows all steps that need the same of it. So a factor moves others: by this share for each
# doubling between the sizes, if the other size has had no step for FOLLOWING_STEPS steps or more, and by less if it
# has, because it knows better. Otherwise steps with drafts are compared with times of steps without drafts from a
# faster or slower moment. A slower memory slows decodes and not prompts, so sizes move each other less, the more the
# shares of their times that go to reading differ. See "Why one request lost a sixth of the best fixed depth" and
# "Prompts that decodes had slowed down" in benchmarks/NOTES.md.
NEIGHBOUR_SHARE = 0.95
FOLLOWING_STEPS = 8
MAX_RATIO = 20.0  # a delayed step moves no factor further
MAX_LOG = 50.0  # of a factor in this start, so that times which are impossible lead to no overflow
SPREAD_QUANTILE = 1.65  # nine of ten values lie within this number of standard deviations on both sides
RECENT_STEPS = 512  # steps that say how often a prediction is exceeded, and by how much
# A pause of this length costs half as much as an endless one: benchmarks/NOTES.md, 2026-11-28.
HALF_COLD_SECONDS = 2.0
SHORTEST_PAUSE = 0.1  # seconds; shorter ones teach nothing
KNOWN_COLD_SECONDS = 2.0  # the knowledge of an earlier start counts like a step after a pause of this length
MAX_COLD_SECONDS = 60.0  # the most seconds that are kept for later starts


def possible_spread(spread: float) -> float:
    """The spread if it is possible, else the nearest possible one. A file of calibrations holds no other."""
    return min(max(spread, MIN_SPREAD), MAX_RATIO)


@dataclass(slots=True)
class _Size:
    """The steps of one size.

    Attributes:
        log: logarithm of the factor.
        num_steps: the steps of this start.
        last_step: the number of the last one among all steps of this start.
        weight: the weight that the next step has in the factor if errors have both signs.
        error, scatter: the means of the logarithmic errors and of their sizes; newer errors count more.
    """

    log: float
    num_steps: int = 0
    last_step: int = -FOLLOWING_STEPS
    weight: float = 1 / PRIOR_STEPS
    error: float = 0.0
    scatter: float = 0.0

    @property
    def signal(self) -> float:
        """The weight that it has because errors have one sign."""
        return min(abs(self.error) / max(self.scatter, LEAST_SCATTER), MOST_WEIGHT)

    def add(self, error: float) -> None:
        """Count the error of a step."""
        self.error += SIGNAL_WEIGHT * (error - self.error)
        self.scatter += SIGNAL_WEIGHT * (abs(error) - self.scatter)
        self.num_steps += 1
        self.weight = max(1 / (self.num_steps + PRIOR_STEPS), NEWEST_WEIGHT)


class Correction:
    """Factors by the size of a step: steps between two powers of two in tokens, with the larger one, have one size.

    A size without steps has the factor of the nearest size with steps. Sizes that are not run now follow those that
    are, so their predictions stay comparable.

    Args:
        factors: sizes with the factors of an earlier start. They have no steps of this one, so they follow its first
            steps fast.
        reading_share: gives the share of a step's time that goes to reading, for a size.

    Attributes:
        spread: nine of ten steps now lie within the ratio 1 + spread of their prediction.
        num_steps: steps that were added.
    """

    def __init__(
        self, spread: float, factors: Iterable[tuple[int, float]], reading_share: Callable[[int], float]
    ) -> None:
        self._reading_share = reading_share
        self._following: dict[int, dict[int, float]] = {}  # size -> other size -> see _following_share
        self._sizes = {size: _Size(math.log(each)) for size, each in factors}
        self._factors: dict[int, float] = {}  # size -> factor, for every size that was asked for
        self.set_spread(spread)
        self.num_steps = 0

    def set_spread(self, spread: float) -> None:
        """Take this spread, until further steps change it."""
        deviation = math.log1p(spread) / SPREAD_QUANTILE
        self._variance = deviation * deviation
        self.spread = spread

    def factors(self) -> list[tuple[int, float]]:
        """Every size that has steps, of this start or an earlier one, with its factor up to MAX_RATIO."""
        return [(size, min(max(math.exp(each.log), 1 / MAX_RATIO), MAX_RATIO)) for size, each in self._sizes.items()]

    def factor(self, num_tokens: int) -> float:
        """The factor of a prediction for a step of `num_tokens` tokens."""
        size = size_of_step(num_tokens)
        if (known := self._factors.get(size)) is None:
            if (like := self._sizes.get(size)) is None and self._sizes:
                like = self._sizes[min(self._sizes, key=lambda other: abs(other - size))]
            known = self._factors[size] = 1.0 if like is None else math.exp(like.log)
        return known

    def add(self, num_tokens: int, predicted: float, measured: float) -> None:
        """A step took `measured` seconds. `predicted` includes the factor before this call. Both are positive."""
        size, error = size_of_step(num_tokens), _log_error(predicted, measured)
        if (own := self._sizes.get(size)) is None:
            own = self._sizes[size] = _Size(math.log(self.factor(num_tokens)))
        weight, signal = own.weight, own.signal
        own.log = min(max(own.log + max(weight, signal) * error, -MAX_LOG), MAX_LOG)
        log, last_step, now, shares = own.log, own.last_step, self.num_steps, self._following.setdefault(size, {})
        for other, each in self._sizes.items():  # without calls: every step of the engine is added
            if each is own:
                continue
            if (share := shares.get(other)) is None:
                share = shares[other] = self._following_share(size, other)
            moved, rested = each.weight if each.weight < weight else weight, now - each.last_step
            if rested < FOLLOWING_STEPS:
                moved *= rested / FOLLOWING_STEPS
            if last_step > each.last_step and moved < signal:  # drift, and not a difference of sizes that take turns
                moved = signal
            moved_log = each.log + moved * share * error
            # A scheduler may avoid sizes that it believes to be slow: this belief fades.
            each.log = moved_log + FORGOTTEN_SHARE * (log - moved_log)
        own.add(error)
        own.last_step = self.num_steps
        self._factors.clear()
        self.num_steps += 1
        self._variance += NEWEST_WEIGHT * (error * error - self._variance)
        self.spread = math.exp(SPREAD_QUANTILE * math.sqrt(self._variance)) - 1

    def _following_share(self, size: int, other: int) -> float:
        """The share of a change of `size` by which the other size follows."""
        likeness = 1 - abs(self._reading_share(size) - self._reading_share(other))
        return likeness * NEIGHBOUR_SHARE ** abs(other - size)


class Pause:
    """The further time of a step after a pause of the engine: meanwhile others fill the processor's caches.

    It is `cold * pause / (pause + HALF_COLD_SECONDS)` seconds, about the same for every step. `cold` is the fit to the
    measured steps. A longer step says less, since its own error is larger.

    Args:
        cold: seconds, from an earlier start.

    Attributes:
        cold: seconds after an endless pause.
    """

    def __init__(self, cold: float) -> None:
        self.cold = cold
        self._weighted, self._weights = 0.0, 0.0  # sums over the steps

    def seconds(self, pause: float) -> float:
        """The seconds that a step takes longer after a pause of these seconds."""
        return self.cold * cooled(pause)

    def add(self, pause: float, predicted: float, measured: float) -> None:
        """A step took `measured` seconds after a pause. Without it `predicted` were expected, a positive number."""
        share, kept = cooled(pause), 1 - NEWEST_WEIGHT
        ratio = min(measured / predicted - 1, MAX_RATIO * share)  # a delayed step moves `cold` no further
        if self.cold and not self._weights:
            self._weights = (cooled(KNOWN_COLD_SECONDS) / predicted) ** 2
            self._weighted = self.cold * self._weights
        # Least squares of `predicted * ratio = cold * share`, with an error in proportion to `predicted`.
        self._weighted = kept * self._weighted + ratio * share / predicted
        self._weights = kept * self._weights + (share / predicted) ** 2
        self.cold = max(self._weighted / self._weights, 0.0)


def size_of_step(num_tokens: int) -> int:
    """n for steps of more than 2^(n-1) and at most 2^n tokens, which have one size.

    Tiles have 2^n rows: 32 tokens take as long as 24, and 33 need another tile.
    """
    return (num_tokens - 1).bit_length()


def cooled(pause: float) -> float:
    """The share of `Pause.cold` that a step after a pause of these seconds takes longer."""
    return pause / (pause + HALF_COLD_SECONDS)


class Tail:
    """The errors of recent steps; the largest ones matter. No distribution is assumed.

    Delays of a shared machine are larger and rarer than in a normal distribution of the same variance.
    """

    def __init__(self) -> None:
        self._errors = deque[float]()  # logarithms of measured / predicted, oldest first
        self._sorted: list[float] = []

    def add(self, predicted: float, measured: float) -> None:
        """A step took `measured` seconds. Both are positive."""
        if len(self._errors) == RECENT_STEPS:
            del self._sorted[bisect_left(self._sorted, self._errors.popleft())]
        error = _log_error(predicted, measured)
        self._errors.append(error)
        insort(self._sorted, error)

    def ratio(self, share: float) -> float | None:
        """The ratio measured / predicted that this share of the steps did not exceed; None: there are too few steps."""
        count = len(self._sorted)
        if count * (1 - share) < 1:
            return None
        return math.exp(self._sorted[math.ceil(count * share) - 1])


def _log_error(predicted: float, measured: float) -> float:
    return math.log(min(max(measured / predicted, 1 / MAX_RATIO), MAX_RATIO))
