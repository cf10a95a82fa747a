"""An executor that computes nothing: a batch takes as long as the cost model predicts, on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass

from quire.cost.model import CostModel
from quire.schedule import Pending, ScheduledBatch, StepResult


class VirtualClock:
    """Seconds that pass only when somebody waits.

    Attributes:
        now: seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        """As time.monotonic."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """As time.sleep."""
        self.now += seconds

    def wait_until(self, time: float) -> None:
        """Nothing passes if it is later already."""
        self.now = max(self.now, time)


class PredictedExecutor:
    """Runs batches one after the other. A batch begins when it is submitted and the one before has ended.

    The predicted time of a step has the host's part in it, as the cost model was fitted to whole steps: scheduling
    takes no time of its own. Tokens are made up: the number of the step.
    """

    def __init__(self, cost: CostModel, clock: VirtualClock) -> None:
        self._cost, self._clock = cost, clock
        self._idle_from = 0.0

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        load = self._cost.arithmetic.load(batch.num_computed_tokens, batch.num_scheduled_tokens, sum(batch.num_logits))
        self._idle_from = max(self._idle_from, self._clock.now) + self._cost.predict(load).seconds
        return _Predicted(batch, self._idle_from, self._clock)

    def shutdown(self) -> None:
        """Nothing to stop."""


@dataclass(slots=True)
class _Predicted:
    """A step that ends at a known time."""

    batch: ScheduledBatch
    end: float
    clock: VirtualClock

    def result(self) -> StepResult:
        self.clock.wait_until(self.end)
        step_id = self.batch.step_id
        return StepResult(step_id, [[step_id] if count else [] for count in self.batch.num_logits])
