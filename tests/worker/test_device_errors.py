"""An error on a GPU reaches the step that it belongs to, and a failed device is noticed."""

from __future__ import annotations

import pytest
import torch

from quire.errors import EngineDeadError
from quire.sampling_params import SamplingParams
from quire.schedule import NewRow, ScheduledBatch
from quire.worker.accelerator import device_failed
from quire.worker.model_runner import ModelRunner
from tests.engine.harness import Schedule, build_core
from tests.worker.fake_accelerator import FakeAccelerator

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class FailedAccelerator(FakeAccelerator):
    def synchronize(self) -> None:
        raise device_failed(RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines"))


def make_runner(accelerator: FakeAccelerator) -> ModelRunner:
    runner = build_core(Schedule(depth=2, accelerator=accelerator), "bfloat16").executor
    assert isinstance(runner, ModelRunner)
    return runner


def batch(step: int) -> ScheduledBatch:
    new_rows = [NewRow("row", [1, 2, 3], 3, GREEDY, [0])] if step == 0 else []
    start, length = (0, 3) if step == 0 else (2 + step, 1)
    return ScheduledBatch(step, ["row"], [start], [length], [1], new_block_ids=[[]], new_rows=new_rows)


def test_an_error_is_that_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another step is waited for."""
    runner = make_runner(FakeAccelerator())
    first, second = runner.submit(batch(0)), runner.submit(batch(1))
    take_in = runner._take_in

    def fails_once(*arguments):
        monkeypatch.setattr(runner, "_take_in", take_in)
        raise ValueError("of the first")

    monkeypatch.setattr(runner, "_take_in", fails_once)
    assert len(second.result().token_ids[0]) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="of the first"):
            first.result()


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_failed_launch_asks_the_device(has_failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton and cuBLAS raise RuntimeErrors: only the device shows whether it can go on."""
    runner = make_runner(FailedAccelerator() if has_failed else FakeAccelerator())

    def fails(_):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(runner.model, "forward", fails)
    if has_failed:
        with pytest.raises(EngineDeadError, match=r"CUDA error: an illegal memory access was encountered\.$"):
            runner.submit(batch(0))
    else:
        with pytest.raises(RuntimeError, match="Triton Error"):
            runner.submit(batch(0))


def test_too_little_memory_is_no_failure_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(FailedAccelerator())

    def fails(_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(runner.model, "forward", fails)
    with pytest.raises(torch.OutOfMemoryError):
        runner.submit(batch(0))
