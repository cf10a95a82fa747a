"""The engine process as Quire starts it, but for steps that do what a file in the folder given as argument says.

The file `order` holds the word; a step that finds it removes it, and leaves a file `acting` before it obeys.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.engine import process
from quire.engine.step_cost import StepCost
from quire.errors import EngineDeadError
from quire.schedule import ScheduledBatch, StepResult
from quire.worker.model_runner import ModelRunner

FOR_EVER = 1000
# A step of exactly so many tokens takes so long, and is predicted to. The run that measures memory has another number.
LONG_PROMPT, LONG_SECONDS = 201, 1.5

_execute = ModelRunner.execute


def in_folder(name: str) -> Path:
    """A file of the test's folder, which is this program's first argument."""
    return Path(sys.argv[1], name)


class FailingAllocations(TorchDispatchMode):
    """The k-th tensor operation or numpy array of a step finds no memory."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self._left = k
        self._numpy = {name: getattr(np, name) for name in ("zeros", "empty", "repeat", "array", "flatnonzero")}

    def count(self, error: Exception) -> None:
        self._left -= 1
        if self._left == 0:
            raise error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"))
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> FailingAllocations:
        for name, function in self._numpy.items():
            setattr(np, name, self._counted(function))
        super().__enter__()
        return self

    def _counted(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count(MemoryError("Unable to allocate 9 bytes"))
            return function(*args, **kwargs)

        return counted

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        for name, function in self._numpy.items():
            setattr(np, name, function)
        if self._left > 0:
            in_folder("survived").touch()  # the step has fewer allocations


def obey(order: str, runner: ModelRunner, batch: ScheduledBatch) -> StepResult:
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
            with FailingAllocations(int(k)):
                return _execute(runner, batch)
    return _execute(runner, batch)


def execute(runner: ModelRunner, batch: ScheduledBatch) -> StepResult:
    order = in_folder("order")
    if batch.num_tokens == LONG_PROMPT:
        time.sleep(LONG_SECONDS)
    if not order.exists():
        return _execute(runner, batch)
    text = order.read_text()
    order.unlink()
    in_folder("acting").touch()
    return obey(text, runner, batch)


if __name__ == "__main__":
    torch.set_num_threads(1)
    process.BEAT_SECONDS = 0.1
    ModelRunner.execute = execute  # type: ignore[method-assign]
    StepCost.predict = lambda self, num_tokens: LONG_SECONDS if num_tokens == LONG_PROMPT else 0.0  # type: ignore[method-assign]
    sys.exit(process.main())
