"""A rank that hangs in a step: at the limit the engine ends, and names the rank, its work, and the setting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine import executor, rank_spawn, ranks
from quire.engine.start import StartedEngine
from quire.errors import EngineDeadError
from quire.kernels import cpu
from quire.sampling_params import SamplingParams
from quire.schedule import ScheduledBatch, StepResult
from quire.worker.worker import DeviceWorker
from tests.engine.harness import Prompt, run
from tests.engine.ranks import started
from tests.engine.test_rank_processes import EXPERTS, _children, in_processes, process_of, wait_for

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

SHARES = ["tensor_parallel_size", "pipeline_parallel_size"]
SLOW_SECONDS = 0.9  # of an exchange, which is less than the limit
LIMIT = 3  # seconds: a start has to end its exchanges in it too
WITHIN = 5.0  # seconds behind the limit, as docs/parallel.md promises; on a quiet machine it takes at most 1.6
ENDLESS = Prompt((5, 7, 9), SamplingParams(temperature=0.0, max_tokens=120, min_tokens=120))
HANGING = """
import threading
from quire.engine import rank_process
from quire.worker.worker import DeviceWorker
execute, steps = DeviceWorker.execute, []
def hang(worker, batch):
    steps.append(batch)
    result = execute(worker, batch) if {is_behind} or len(steps) < 40 else None
    if len(steps) == 40:
        threading.Event().wait()
    return result
DeviceWorker.execute = hang
rank_process.main()
"""


def check_that_it_is_named(engine: StartedEngine, what: str, hit: Any = None) -> None:
    """Within the limit, and what follows."""
    last = time.monotonic()

    def note(core: Any, step: int) -> None:
        nonlocal last
        last = time.monotonic()
        if hit is not None and step == 20:
            hit()

    with pytest.raises(EngineDeadError, match=what):
        run(engine.core, [ENDLESS], before_step=note)
    assert time.monotonic() - last < LIMIT + WITHIN


@pytest.mark.parametrize("share", SHARES)
def test_a_rank_that_stands_still_in_a_step(share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the stop were invisible: a debugger, a frozen container, a disk that does not answer."""
    monkeypatch.setattr(ranks, "is_stopped", lambda pid: False)
    engine = in_processes(**{share: 2}, distributed_timeout_seconds=LIMIT)
    process = process_of(engine)
    where = rf"Rank 1 \(process {process.pid} on .+\) (is in step \d+, after \d+ exchanges?|has not begun step \d+)"
    check_that_it_is_named(
        engine,
        r"^Rank 0 cannot go on with a step: rank 1 did not come within 3 s \(--distributed-timeout-seconds\)\. "
        + where,
        lambda: os.kill(process.pid, signal.SIGSTOP),
    )
    engine.core.shutdown()
    assert process.returncode == -signal.SIGKILL


HAS_NOT_COME = (
    r"^Rank 0 cannot go on with a step: rank 1 did not come within 3 s \(--distributed-timeout-seconds\)\. "
    r"Rank 1 \(process \d+ on .+\) has not begun step \d+"
)
DOES_NOT_ANSWER = (
    r"^Rank 1 of 2 \(process \d+ on .+\) has computed step \d+, and does not answer, and has made no progress "
    r"for 3 s \(--distributed-timeout-seconds\)"
)


@pytest.mark.parametrize(
    ("is_behind", "has_lanes", "what"),
    [(False, False, HAS_NOT_COME), (True, False, HAS_NOT_COME), (True, True, DOES_NOT_ANSWER)],
)
def test_a_rank_that_hangs_beside_its_exchanges(
    is_behind: bool, has_lanes: bool, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the first one of a step, or behind the last one. There the other rank notices it in the next step. If the
    rank samples for a lane of its own, none does, but its answer is waited for.
    """
    monkeypatch.setattr(rank_spawn, "PROGRAM", ("-c", HANGING.format(is_behind=is_behind)))
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    lanes = {"data_parallel_size": 2, "enable_expert_parallel": True, "max_model_len": 128, "load_format": "dummy"}
    folder, sizes = (tmp_path, lanes) if has_lanes else (None, {"tensor_parallel_size": 2})
    engine = in_processes(folder, distributed_timeout_seconds=LIMIT, **sizes)
    check_that_it_is_named(engine, what)
    engine.core.shutdown()
    assert wait_for(lambda: not _children())


@pytest.fixture
def over() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_the_first_rank_hangs(over: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine's own process. The engine does not wait for its thread."""
    engine = in_processes(tensor_parallel_size=2, distributed_timeout_seconds=LIMIT)
    execute, steps = DeviceWorker.execute, list[int]()

    def hang(worker: DeviceWorker, batch: ScheduledBatch) -> StepResult:
        steps.append(batch.step_id)
        if len(steps) == 20:
            over.wait()
        return execute(worker, batch)

    monkeypatch.setattr(DeviceWorker, "execute", hang)
    check_that_it_is_named(
        engine,
        rf"^Rank 0 of 2 \(process {os.getpid()} on .+\) has not begun step \d+, and has made no progress for 3 s "
        r"\(--distributed-timeout-seconds\)\.$",
    )
    engine.core.shutdown()


SCRIPT = """
import signal, sys, threading
from quire import LLM, SamplingParams
from quire.worker.worker import DeviceWorker
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where the tests run
steps = []
def hang(worker, batch):
    steps.append(batch)
    if len(steps) == 3:
        print("hangs", flush=True)
        threading.Event().wait()
    return execute(worker, batch)
sizes = {"num_threads": 1, "max_model_len": 256, "kv_cache_memory_bytes": "32M", "device": "cpu"}
llm = LLM(tensor_parallel_size=2, distributed_timeout_seconds=int(sys.argv[1]), **sizes)
execute, DeviceWorker.execute = DeviceWorker.execute, hang
llm.generate(["Hello"], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.parametrize("limit", [LIMIT, 300])
def test_a_script_ends_though_its_first_rank_hangs(limit: int) -> None:
    """At the limit, or by two Ctrl-C before it: the first one waits for the step. Its own thread computes the rank."""
    command = [sys.executable, "-c", SCRIPT, str(limit)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        for _ in range(2 if limit > LIMIT else 0):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        try:
            _, errors = process.communicate(timeout=LIMIT + WITHIN + 15.0)
        finally:
            process.kill()
    assert process.returncode == (1 if limit == LIMIT else -signal.SIGINT)
    assert ("has made no progress for 3 s" if limit == LIMIT else "KeyboardInterrupt") in errors


def test_a_slow_step_that_gets_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of more seconds than the limit. It waits for no exchange."""
    engine = started(2, distributed_timeout_seconds=LIMIT)
    monkeypatch.setattr(executor, "GRACE_SECONDS", 0.0)
    expected = run(engine.core, [ENDLESS])
    (group, _) = (worker._ranks.group for worker in engine.executor.workers)  # type: ignore[attr-defined]
    gather, slow = type(group).gather, list[float]()

    def slowly(self: Any, *arguments: Any) -> Any:
        if len(slow) < 10:
            slow.append(time.monotonic())
            time.sleep(SLOW_SECONDS)
        return gather(self, *arguments)

    monkeypatch.setattr(type(group), "gather", slowly)
    start = time.monotonic()
    assert run(engine.core, [ENDLESS]) == expected
    assert slow[0] - start < 1.0 < LIMIT + 1.0 < slow[-1] + SLOW_SECONDS - start, "the first step was not slow"
    engine.core.shutdown()
