"""A pipeline of stages on a virtual clock: batches pass all stages, and each stage computes one batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from quire.schedule import Pending, ScheduledBatch, StepResult
from quire.scheduler.adaptive_depth import AdaptiveDepth, DrafterTime
from tests.guesser import Guesser
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


class Alone(Driver):
    """Notes, for each batch, the batches before it that had no result."""

    def __init__(self, **arguments: Any) -> None:
        self.before: list[int] = []
        super().__init__(proposer=Guesser(1.0, longest=3), waits=True, drafter_time=DrafterTime(1e-3), **arguments)

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        self.before.append(len(self.core._in_flight))
        return super().submit(batch)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_step_with_drafts_of_the_last_stage_is_alone(num_stages: int) -> None:
    """A batch behind another one would wait for it, to be drafted. So the requests come together in one batch."""
    driver = Alone(depth=num_stages, num_stages=num_stages)
    driver.run_all(*(request(f"r{index}", [index], 60) for index in range(6)))
    drafted = [index for index, batch in enumerate(driver.batches) if any(batch.draft_token_ids)]
    assert len(drafted) > 10
    assert all(driver.before[index] == 0 for index in drafted)
    middle = driver.batches[len(driver.batches) // 2]
    assert len(middle.request_ids) == 6, "no stage has a part of them"


@pytest.mark.parametrize("is_bound_by_rows", [False, True])
def test_drafts_have_to_gain_what_parts_of_the_requests_gain(is_bound_by_rows: bool) -> None:
    """Two stages take half of the time for half of the rows, or as long as for all. Two in five drafts hold."""

    def seconds(starts: Sequence[int], most: int) -> list[float]:
        base = 5e-3 * len(starts) if is_bound_by_rows else 20e-3
        return [base + 1e-4 * count for count in range(most + 1)]

    adaptive = AdaptiveDepth(seconds, None, 2, num_stages=2)
    driver = Driver(
        proposer=Guesser(0.4, longest=1), adaptive=adaptive, depth=2, num_stages=2, waits=True, num_blocks=400
    )
    driver.run_all(*(request(f"r{index}", [index], 150) for index in range(6)))
    together = sum(len(batch.request_ids) == 6 for batch in driver.batches)
    assert (together < 0.2 * len(driver.batches)) if is_bound_by_rows else (together > 0.7 * len(driver.batches))
