"""Measures the steps that the cost model is fitted to: some while starting, the rest while nobody waits."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable

from quire.cost.calibrate import SHORT_CONTEXT, Fit, MeasuredStep, Rows, fit
from quire.cost.model import CostModel
from quire.cost.step_time import Constants
from quire.engine.core import EngineCore
from quire.errors import EngineDeadError
from quire.logs import get_logger

logger = get_logger(__name__)

REPEATED_SECONDS = 0.1  # a step is repeated for this time, up to MOST_REPEATS times
MOST_REPEATS = 3
# A request that comes while a step is measured waits for its end: longer ones are not measured.
MAX_STEP_SECONDS = 0.5
MAX_SECONDS = 10.0  # of all of them
KEPT_STEPS = 256  # running steps whose corrections are kept for later starts, together


class Calibration:
    """The measured steps of one engine.

    Args:
        guess: constants before anything is measured.
        points: the steps to measure, in this order.
        done: is told the constants that all of them gave.
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
        self._repeats: list[float] = []  # seconds of the first point, so far
        self._seconds_left = MAX_SECONDS
        self.rows: list[Rows] = []  # of `steps`
        self.steps: list[MeasuredStep] = []

    def run(self, seconds: float) -> None:
        """Measure what is predicted to take no longer, all together, as far as contexts are short.

        A KV cache that was never written has no memory of its own yet: reading it says nothing.
        """
        end = self._clock() + seconds
        while self._points and self._context() <= SHORT_CONTEXT and self._predicted_seconds() <= end - self._clock():
            if not self.step():
                return

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to measure."""
        return not self._points

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
            return False
        if probed is None:
            return False
        load, seconds = probed
        self._seconds_left -= seconds
        self._repeats.append(seconds)
        timed = self._repeats[1:]  # the first one takes memory, and is recorded
        if len(timed) == MOST_REPEATS or sum(timed) >= REPEATED_SECONDS:
            self.rows.append(self._points[0])
            self.steps.append(MeasuredStep(self._cost.arithmetic.demand(load), statistics.median(timed)))
            self._cost.calibrate(fit(self.steps, self._guess))
            self._drop_point()
        return True

    def _drop_point(self) -> None:
        self._points.popleft()
        self._repeats.clear()
        if not self._points and self.steps:
            self._done(self._cost.fit)

    def _context(self) -> int:
        return max(start for start, _ in self._points[0])

    def _predicted_seconds(self) -> float:
        starts, counts = zip(*self._points[0], strict=True)
        return self._cost.predict(self._cost.arithmetic.load(starts, counts, len(counts))).seconds


class KeptCosts:
    """What running steps have corrected, kept for later starts.

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
        if num != self._num_kept and num and (self._calibration is None or self._calibration.is_done):
            self._write(self._cost.corrected_fit())
            self._num_kept = num
