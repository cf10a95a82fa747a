"""A pipeline of stages on a virtual clock: batches pass all stages, and each stage computes one batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from quire.schedule import Pending, ScheduledBatch, StepResult
from tests.scheduler.driver import Driver, request

MOST_BUBBLES = 0.05  # of the time
NUM_ROWS = 12


@dataclass
class _Arriving:
    """The result of a batch. Who waits for it waits until the last stage has computed it."""

    pending: Pending[StepResult]
    wait: Callable[[], None]

    def result(self) -> StepResult:
        self.wait()
        return self.pending.result()


class Pipeline(Driver):
    """Each stage takes a second for each row of a batch."""

    def __init__(self, num_stages: int) -> None:
        self.now, self.free_at, self.busy = 0.0, [0.0] * num_stages, [0.0] * num_stages
        super().__init__(
            num_blocks=1000, max_num_seqs=NUM_ROWS, depth=num_stages, num_stages=num_stages, clock=lambda: self.now
        )

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        seconds, time = float(sum(batch.num_scheduled_tokens)), self.now
        for stage, free_at in enumerate(self.free_at):
            time = max(time, free_at) + seconds
            self.free_at[stage] = time
            self.busy[stage] += seconds

        def wait() -> None:
            self.now = max(self.now, time)

        return _Arriving(super().submit(batch), wait)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stages_hardly_wait(num_stages: int) -> None:
    """From the first prompts to the last token, with as many equal batches as stages."""
    pipeline = Pipeline(num_stages)
    pipeline.run_all(*(request(f"r{index}", [index], 150) for index in range(NUM_ROWS)))
    assert pipeline.busy == [NUM_ROWS * 150.0] * num_stages, "a batch is missing, or was computed twice"
    for stage, busy in enumerate(pipeline.busy):
        bubbles = 1 - busy / pipeline.now
        print(f"stage {stage + 1} of {num_stages} waits {bubbles:.3f} of the time")
        assert 0 < bubbles < MOST_BUBBLES
