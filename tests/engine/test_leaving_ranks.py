"""A rank that is killed, stopped or raises where others wait for it: all others stop waiting within two seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from quire.engine import executor, rank_spawn, ranks
from quire.errors import EngineDeadError
from quire.kernels import cpu
from quire.schedule import ScheduledBatch, StepResult
from tests.engine.harness import run
from tests.engine.test_rank_processes import ENDLESS, in_processes, wait_for

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

LEAVES_WITHIN = 2.0  # seconds, as docs/parallel.md promises; on a quiet machine it takes 0.1, and 0.9 if it is stopped
LIMIT = 120  # --distributed-timeout-seconds: nobody waits for it
MOST_TRIES, MOST_DELAY = 3, 0.3  # a slow try counts, unless the machine has delayed its Witness for longer: seconds
FAULTY = 1  # the rank
# It waits until the others sleep in the exchange, and until the engine has just looked at its process, so that the next
# look is as late as can be. So there is no luck in what is tested, nor in the times. It writes the time, which has the
# same clock in all processes, and then cannot go on.
PROGRAM = """
import os, signal, sys, time
from quire.distributed.shared_memory import SharedMemoryGroup
from quire.engine import rank_process
from quire.worker.worker import DeviceWorker
execute, join, steps, ranks = DeviceWorker.execute, SharedMemoryGroup.gather_to, [], []
def count(worker, batch):
    ranks[:] = [worker._ranks]
    steps.append(worker._ranks.rank == {faulty} and batch.request_ids[0][0] == "r")  # not the warm-up, nor a probe
    return execute(worker, batch)
def others_wait():
    own = ranks[0]
    places = own.whereabouts.all()
    return all(places[each].awaited == own.rank for each in own.grid.stage_members(own.rank) if each != own.rank)
def num_looks():
    file = {file!r} + "-" + str(os.getpid())
    return os.path.getsize(file) if os.path.exists(file) else 0
def join_or_fail(group, *arguments):
    if steps and steps[-1] and sum(steps) == 3:
        steps.append(False)
        while not others_wait():
            time.sleep(0.001)
        seen = num_looks()
        while num_looks() == seen:
            time.sleep(0.001)
        with open({file!r}, "w") as file:
            file.write(str(time.monotonic()))
        if {fault!r} == "raises":
            raise OSError("no memory today")
        os.kill(os.getpid(), signal.SIGKILL if {fault!r} == "is killed" else signal.SIGSTOP)
    return join(group, *arguments)
DeviceWorker.execute, SharedMemoryGroup.gather_to = count, join_or_fail
rank_process.main()
"""


class Noted:
    """The steps of the other ranks: the times at which they failed, by rank, and whether they have ended.

    Nothing is noted once the engine is shut down: its end also ends steps, and such a rank has not left by itself.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: dict[int, list[float]] = {}
        self.steps: list[Future[StepResult]] = []
        self.is_over = False
        self.begun: list[tuple[int, Any]] = []  # the steps of the ranks that were not asked how they ended
        begin = executor.ThreadExecutor._begin

        def noting(running: executor.ThreadExecutor, batches: Sequence[ScheduledBatch]) -> Sequence[Any]:
            self._threads, steps = running._threads, begin(running, batches)
            self.begun += [(rank, step) for rank, step in enumerate(steps) if rank != FAULTY]
            return steps

        monkeypatch.setattr(executor.ThreadExecutor, "_begin", noting)

    def _note(self, rank: int, step: Future[StepResult]) -> None:
        if step.exception() is not None and not self.is_over:
            self.times.setdefault(rank, []).append(time.monotonic())

    def have_left(self, ranks: set[int]) -> bool:
        """Whether these ranks have left a step, and none of them is in a step."""
        while self.begun:
            rank, step = self.begun.pop()
            future = step if isinstance(step, Future) else self._threads[rank].submit(step.result)
            self.steps.append(future)
            future.add_done_callback(lambda step, rank=rank: self._note(rank, step))  # type: ignore[misc]
        return self.times.keys() == ranks and all(step.done() for step in self.steps)


class Witness:
    """A thread that only sleeps. What delays it may delay ranks too, and is no fault of theirs."""

    PERIOD = 0.01

    def __init__(self) -> None:
        self._delays: list[tuple[float, float]] = []  # the end of each sleep, and the seconds that it was too long
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sleep)
        self._thread.start()

    def _sleep(self) -> None:
        before = time.monotonic()
        while not self._is_over.wait(self.PERIOD):
            now = time.monotonic()
            self._delays.append((now, now - before - self.PERIOD))
            before = now

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def seconds_between(self, begin: float, end: float) -> float:
        """How long it was delayed, in all. A sleep is always a little too long."""
        return sum(delay for woken, delay in self._delays if begin < woken <= end and delay > self.PERIOD)


def note_looks(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file for each process, which grows by a byte when the engine has looked at it."""
    is_stopped = ranks.is_stopped

    def look(pid: int) -> bool:
        found = is_stopped(pid)
        with open(f"{file}-{pid}", "ab") as looks:
            looks.write(b".")
        return found

    monkeypatch.setattr(ranks, "is_stopped", look)


def seconds_until_all_have_left(
    fault: str, width: int, num_stages: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, float]:
    """The seconds that the others took, and for how many of them the machine was busy."""
    program = PROGRAM.format(faulty=FAULTY, file=str(file), fault=fault)
    monkeypatch.setattr(rank_spawn, "PROGRAM", ("-c", program))
    note_looks(file, monkeypatch)
    sizes = {"tensor_parallel_size": width, "pipeline_parallel_size": num_stages}
    engine = in_processes(**sizes, distributed_timeout_seconds=LIMIT)
    noted = Noted(monkeypatch)
    two = [ENDLESS] * 2  # a request that fails alone would end
    witness = Witness()
    try:
        if fault == "raises" and num_stages == 1:
            run(engine.core, two)
        else:
            with pytest.raises(EngineDeadError, match=rf"Rank {FAULTY} of {width * num_stages}"):
                run(engine.core, two)
        others = set(range(width * num_stages)) - {FAULTY}
        assert wait_for(lambda: noted.have_left(others)), noted.times
        assert not engine.executor._given_up, "they were left behind"  # type: ignore[attr-defined]
    finally:
        noted.is_over = True
        engine.core.shutdown()
        witness.close()
    begin, end = float(file.read_text()), max(max(times) for times in noted.times.values())
    return end - begin, witness.seconds_between(begin, end)


@pytest.mark.parametrize(
    ("width", "num_stages"), [(3, 1), pytest.param(2, 2, marks=pytest.mark.slow)], ids=["ranks", "ranks and stages"]
)
@pytest.mark.parametrize("fault", ["is killed", "is stopped", "raises"])
def test_others_leave(fault: str, width: int, num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them wait for it inside an exchange: one in the engine's process, and one in another one."""
    for number in range(MOST_TRIES):
        with monkeypatch.context() as patch:
            seconds, delay = seconds_until_all_have_left(fault, width, num_stages, tmp_path / str(number), patch)
        print(
            f"a rank {fault}: the others have left after {seconds:.2f} s, on a machine that was busy for {delay:.2f} s"
        )
        if seconds < LEAVES_WITHIN or delay < MOST_DELAY:
            break
    assert 0.0 < seconds < LEAVES_WITHIN
