"""Measures the steps that the cost model is fitted to: some while starting, the rest while no request waits."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from quire.cost.arithmetic import Load
from quire.cost.calibrate import SHORT_CONTEXT, Fit, MeasuredStep, Rows, fit
from quire.cost.correct import size_of_step
from quire.cost.model import CostModel
from quire.cost.step_time import MIN_SPREAD, Constants
from quire.engine.core import EngineCore
from quire.errors import EngineDeadError
from quire.logs import get_logger

logger = get_logger(__name__)

REPEATED_SECONDS = 0.1  # a step is repeated for this time in a round, between LEAST_REPEATS and MOST_REPEATS times
LEAST_REPEATS, MOST_REPEATS = 2, 3
# A request that comes while a step is measured waits for its end: longer ones are not measured.
MAX_STEP_SECONDS = 0.5
MAX_SECONDS = 10.0  # the most time for all of them, in both rounds
MOST_DELAYED = 1.1  # a step that took more than this multiple of its time in the second round was held up in the first
MUCH_BETTER = 2.0  # times fit together much better if their spread is smaller by this ratio
MUCH_WIDER = 1.1  # a spread that is larger by less needs no other interval
RUNNING_REPEATS = 2  # the running steps of a size, behind the first one, that count like measured steps
WELL_PREDICTED = 1.1  # a running step within this ratio of its prediction needs no other constants
KEPT_STEPS = 256  # running steps whose corrections are kept for later starts, together


class Calibration:
    """The measured steps of one engine.

    All steps are measured in two rounds. Other programs only delay steps, and they often run for longer than one step
    is repeated, so a step of the first round is compared with the same step some seconds later. If the second round
    finds steps that were held up, the constants are fitted once more at its end. Then corrections by running steps
    begin anew, because they belong to the constants before. If it was held up itself, only the interval becomes wider.
    The interval never becomes narrower at its end.

    A machine may also become slower or faster for minutes, by a neighbour that shares its memory. If it did so within
    the first round, shorter times of both rounds are those of two machines. If the times of the second round alone fit
    together much better, only they count for the constants. The interval holds the times of both rounds, because the
    machine may change again.

    A server that gets requests at once has no time to measure. Then its first running steps count as measured ones: a
    few of each size, by tokens and by the length of contexts. The very first one may have taken memory, so it counts
    only until there is another one.

    Args:
        guess: constants before anything is measured.
        points: the steps to measure, in this order.
        done: is told the constants at the end of the first round, and of the second one if it changed them or widened
            their interval, with the costs that do not depend on constants.
    """

    def __init__(
        self,
        core: EngineCore,
        cost: CostModel,
        guess: Constants,
        points: Iterable[Rows],
        done: Callable[[Fit], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core, self._cost, self._guess, self._done, self._clock = core, cost, guess, done, clock
        self._points = deque(points)
        self._repeats: list[float] = []  # seconds of the first point in this round, so far
        self._seconds_left = MAX_SECONDS
        self.rows: list[Rows] = []  # the rows of `steps`
        self.steps: list[MeasuredStep] = []
        self._is_second_round = False  # its points are the `rows`
        self._again: dict[int, MeasuredStep] = {}  # index in `steps` -> the step in the second round
        self._was_held_up = False  # whether the second round has found a step that was held up in the first
        self._running: list[MeasuredStep] = []
        self._first: dict[tuple[int, int], MeasuredStep] = {}  # the first running step of each size without others
        self._running_sizes: Counter[tuple[int, int]] = Counter()
        if self._points:
            cost.learn = self._learn

    def run(self, seconds: float) -> None:
        """Measure the steps with short contexts that together are predicted to take no longer.

        A KV cache that was never written has no memory of its own yet: reading it measures nothing.
        """
        end = self._clock() + seconds
        while self._points and self._context() <= SHORT_CONTEXT and self._predicted_seconds() <= end - self._clock():
            if not self.step():
                return

    @property
    def is_done(self) -> bool:
        """Whether the first round is over."""
        return self._is_second_round or not self._points

    def step(self) -> bool:
        """Compute one step; False: nothing is left to measure, or there is no room for it now."""
        while self._points and self._predicted_seconds() > min(MAX_STEP_SECONDS, self._seconds_left):
            self._drop_point()
        if not self._points:
            return False
        try:
            probed = self._core.probe(self._points[0])
        except EngineDeadError:
            raise
        except Exception as error:
            logger.warning("step times are not calibrated further: %s", error, exc_info=error)
            self._points.clear()
            self._cost.learn = None
            return False
        if probed is None:
            return False
        load, seconds = probed
        self._seconds_left -= seconds
        self._repeats.append(seconds)
        first = 0 if self._is_second_round else 1  # the first step of its size takes memory, and is recorded
        timed = self._repeats[first:]
        if len(timed) == MOST_REPEATS or (len(timed) >= LEAST_REPEATS and sum(timed) >= REPEATED_SECONDS):
            # Other programs only delay steps, so the shorter one of two counts.
            self._take_in(MeasuredStep(self._cost.arithmetic.demand(load), statistics.median_low(timed), tuple(timed)))
            self._drop_point()
        return True

    def _take_in(self, step: MeasuredStep) -> None:
        """The first point takes this time."""
        if self._is_second_round:
            index = len(self.rows) - len(self._points)
            known = self.steps[index]
            is_faster = known.seconds > MOST_DELAYED * step.seconds
            self._was_held_up |= is_faster
            seconds = step.seconds if is_faster else known.seconds
            self.steps[index] = MeasuredStep(step.demand, seconds, known.times + step.times)
            self._again[index] = step
        else:
            self.rows.append(self._points[0])
            self.steps.append(step)
            self._fit()

    def _learn(self, load: Load, seconds: float) -> None:
        """A running step took `seconds`."""
        size = size_of_step(load.num_tokens), sum(load.kv_tokens).bit_length()
        self._running_sizes[size] += 1
        if self._running_sizes[size] > 1 + RUNNING_REPEATS:
            return
        step = MeasuredStep(self._cost.arithmetic.demand(load), seconds)
        if self._running_sizes[size] == 1:
            self._first[size] = step
        else:
            self._first.pop(size, None)
            self._running.append(step)
        ratio = seconds / self._cost.predict(load).seconds
        if not 1 / WELL_PREDICTED <= ratio <= WELL_PREDICTED:  # a fit takes 1 to 3 ms
            self._fit()

    def _fit(self) -> None:
        self._cost.calibrate(self._fitted())

    def _fitted(self) -> Fit:
        return fit([*self.steps, *self._running, *self._first.values()], self._guess)

    def _drop_point(self) -> None:
        self._points.popleft()
        self._repeats.clear()
        if self._points:
            return
        self._cost.learn = None
        if self._is_second_round and self._fits_better_again():
            self.steps = [replace(step, seconds=self._again[at].seconds) for at, step in enumerate(self.steps)]
            self._was_held_up = True
        if self._was_held_up:
            self._running.clear()  # they ran in the first round, and may have been held up too
            self._first.clear()
            spread = self._cost.spread
            self._fit()
            self._cost.widen(spread)
        if self.steps and (self._was_held_up or not self._is_second_round or self._widen()):
            self._done(self._cost.corrected_fit())
        if not self._is_second_round:
            self._is_second_round = True
            self._points.extend(self.rows)

    def _fits_better_again(self) -> bool:
        """Whether the times of the second round alone fit together much better than the shorter ones of both rounds."""
        if len(self._again) < len(self.steps):
            return False
        both, second = (
            fit([replace(step, times=()) for step in steps], self._guess).spread
            for steps in (self.steps, self._again.values())
        )
        return both > MUCH_BETTER * max(second, MIN_SPREAD)

    def _widen(self) -> bool:
        """Make the interval wide enough for the times of both rounds -> whether that of the first was too narrow.

        Running steps after the first round may have made it wider still.
        """
        spread = self._fitted().spread
        if is_wider := spread > MUCH_WIDER * max(self._cost.fit.spread, MIN_SPREAD):
            self._cost.widen(spread)
        return is_wider

    def _context(self) -> int:
        return max(start for start, _ in self._points[0])

    def _predicted_seconds(self) -> float:
        """The expected time of the first point.

        A prompt is expected to take no longer for a token than a shorter one has taken: constants may be too slow.
        """
        starts, counts = zip(*self._points[0], strict=True)
        seconds = self._cost.predict(self._cost.arithmetic.load(starts, counts, len(counts))).seconds
        for rows, step in zip(self.rows, self.steps, strict=True):
            (start, count), *others = rows
            if not others and starts == (start,) == (0,) and 1 < count <= counts[0]:
                seconds = min(seconds, step.seconds * counts[0] / count)
        return seconds


class KeptCosts:
    """The corrections by running steps, kept for later starts.

    Args:
        write: keeps constants.
        calibration: is done before anything is kept; None: an earlier start has measured.
    """

    def __init__(self, cost: CostModel, write: Callable[[Fit], None], calibration: Calibration | None) -> None:
        self._cost, self._write, self._calibration = cost, write, calibration
        self._num_kept = 0  # times KEPT_STEPS

    def keep(self) -> None:
        """Keep the corrections, if KEPT_STEPS steps or more have run since they were kept."""
        num = self._cost.num_corrections // KEPT_STEPS
        self._num_kept = min(self._num_kept, num)  # a second round of the calibration begins corrections anew
        if num != self._num_kept and num and (self._calibration is None or self._calibration.is_done):
            self._write(self._cost.corrected_fit())
            self._num_kept = num
