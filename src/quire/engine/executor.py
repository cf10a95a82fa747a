"""Executors that run batches in this process: at once, or on one thread behind the caller."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from quire.schedule import Pending, ScheduledBatch, StepResult


class Runner(Protocol):
    """What an executor drives: a ModelRunner, or its fake."""

    def execute(self, batch: ScheduledBatch) -> StepResult: ...


class InlineExecutor:
    """Runs the batch inside submit(): one batch in flight, nothing to wait for."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        future: Future[StepResult] = Future()
        try:
            future.set_result(self._runner.execute(batch))
        except Exception as error:  # delivered by result(), as from any executor
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        """Nothing to stop."""


class ThreadExecutor:
    """Runs batches in order on one thread, so that the next step is scheduled while one computes."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-worker")

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        return self._thread.submit(self._runner.execute, batch)

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True)
