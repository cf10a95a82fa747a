"""The engine process as Quire starts it, except that a file in the folder given as argument orders faults in steps.

The file `order` holds the word; a step that finds it removes it, and leaves a file `acting` before it obeys. The second
argument is `model` for the real engine, `light` for light_engine.py, or `ranks` for an engine whose second rank obeys
the file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.cost.arithmetic import Load
from quire.cost.model import CostModel
from quire.cost.step_time import StepTime
from quire.engine import process, rank_spawn
from quire.errors import EngineDeadError
from quire.schedule import ScheduledBatch, StepResult
from quire.scheduler.scheduler import Scheduler

Execute = Callable[[Any, ScheduledBatch], StepResult]
Schedule = Callable[[Scheduler], ScheduledBatch | None]

FOR_EVER = 1000
# A step of exactly this number of tokens takes this long, and is predicted to. The run that measures memory has another
# number.
LONG_PROMPT, LONG_SECONDS = 201, 1.5
# The tokens of a prompt with which scheduling fails, and of one whose first step kills the process at once.
UNSCHEDULABLE, DEADLY = 205, 207


def in_folder(name: str) -> Path:
    """A file of the test's folder, which is this program's first argument."""
    return Path(sys.argv[1], name)


def obey(order: str, execute: Execute, runner: Any, batch: ScheduledBatch) -> StepResult:
    match order.split():
        case ["hang"]:
            time.sleep(FOR_EVER)
        case ["hang", "with", "the", "lock"]:
            ctypes.PyDLL(None).sleep(FOR_EVER)  # no other thread of the interpreter runs meanwhile
        case ["break"]:
            while not in_folder("go").exists():
                time.sleep(0.01)
            raise EngineDeadError("The worker is gone")
        case ["fail"]:
            raise RuntimeError("a defect")
        case ["allocation", k]:
            from tests.e2e.failing_allocations import FailingAllocations

            with FailingAllocations(int(k)) as allocations:
                result = execute(runner, batch)
            if allocations.num_left > 0:
                in_folder("survived").touch()  # the step has fewer allocations
            return result
    return execute(runner, batch)


def sabotaged(execute: Execute) -> Execute:
    """The method that runs a batch, obeying."""

    def run(runner: Any, batch: ScheduledBatch) -> StepResult:
        order = in_folder("order")
        if batch.num_tokens == LONG_PROMPT:
            time.sleep(LONG_SECONDS)
        if any(row.num_prompt_tokens == DEADLY for row in batch.new_rows):
            os.kill(os.getpid(), signal.SIGKILL)
        if not order.exists():
            return execute(runner, batch)
        text = order.read_text()
        order.unlink()
        in_folder("acting").touch()
        return obey(text, execute, runner, batch)

    return run


def failing(schedule: Schedule) -> Schedule:
    """The method that schedules, with a defect."""

    def run(scheduler: Scheduler) -> ScheduledBatch | None:
        if any(request.num_prompt_tokens == UNSCHEDULABLE for request in scheduler.requests):
            raise KeyError("a defect")
        return schedule(scheduler)

    return run


def predict(cost: CostModel, load: Load, pause: float = 0.0) -> StepTime:
    """As if the long step were the only one that takes time."""
    seconds = LONG_SECONDS if load.num_tokens == LONG_PROMPT else 1e-9
    return StepTime(seconds, seconds, seconds, "host")


def predict_rows(
    cost: CostModel, starts: list[int], counts: list[int], num_logits: int, pause: float = 0.0, other_tokens: int = 0
) -> tuple[Load, StepTime]:
    load = cost.arithmetic.load(starts, counts, num_logits)
    return load, predict(cost, load, pause)


def main() -> int:
    from tests.e2e import light_engine

    process.BEAT_SECONDS = 0.1
    CostModel.predict = predict  # type: ignore[method-assign]
    CostModel.predict_rows = predict_rows  # type: ignore[method-assign]
    if sys.argv[2] == "ranks":
        rank_spawn.PROGRAM = (str(Path(__file__).with_name("sabotaged_rank.py")), sys.argv[1])
        return process.main(int(sys.argv[-1]))
    worker: Any = light_engine.LightWorker
    if sys.argv[2] == "light":
        light_engine.without_torch()
    else:
        import torch

        from quire.worker.worker import DeviceWorker

        torch.set_num_threads(1)
        worker, submit = DeviceWorker, DeviceWorker.submit
        worker.execute = lambda worker, batch: submit(worker, batch).result()
        worker.submit = light_engine.LightWorker.submit  # which is execute(), at once
    worker.execute = sabotaged(worker.execute)
    Scheduler.schedule = failing(Scheduler.schedule)  # type: ignore[method-assign]
    return process.main()


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))
    sys.exit(main())
