"""An executor that computes nothing: a batch takes its predicted time on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass

from quire.cost.arithmetic import Load
from quire.cost.model import CostModel
from quire.schedule import Pending, ScheduledBatch, StepResult


class VirtualClock:
    """A clock that moves only when somebody waits.

    Attributes:
        now: seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        """Like time.monotonic."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Like time.sleep."""
        self.now += seconds

    def wait_until(self, time: float) -> None:
        """Move to `time`, unless it is later already."""
        self.now = max(self.now, time)


class UntaughtCost(CostModel):
    """A cost model that does not learn: here every step takes its predicted time."""

    def observe(self, load: Load, predicted_seconds: float, seconds: float, pause: float = 0.0) -> None:
        """Nothing changes, and the interval stays as wide."""


class PredictedExecutor:
    """Runs batches one after the other. A batch begins when it is submitted and the batch before it has ended.

    With several stages, each takes an equal part of the time. A stage begins with a batch when the batch before has
    left it. The cost model was fitted to whole steps, so the predicted time includes the host's part, and scheduling
    takes no extra time. The number of the step serves as token.
    """

    def __init__(self, cost: CostModel, clock: VirtualClock, num_stages: int = 1) -> None:
        self._cost, self._clock = cost, clock
        self._idle_from = [0.0] * num_stages

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        load = self._cost.arithmetic.load(batch.num_computed_tokens, batch.num_scheduled_tokens, sum(batch.num_logits))
        end, pause = self._clock.now, max(self._clock.now - self._idle_from[-1], 0.0)
        seconds = self._cost.predict(load, pause).seconds / len(self._idle_from)
        for stage, idle_from in enumerate(self._idle_from):
            end = self._idle_from[stage] = max(idle_from, end) + seconds
        return _Predicted(batch, end, self._clock)

    def shutdown(self) -> None:
        """There is nothing to stop."""


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
