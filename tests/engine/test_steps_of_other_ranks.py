"""A rank in another process answers in the order of its orders, whatever is asked while steps are in flight."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.distributed.layout import Grid
from quire.engine import rank_messages
from quire.engine.rank_messages import Answer, Failed, RankLaunch, StepOrders, decode_to_rank, encode
from quire.engine.ranks import OtherRank, RankProcess
from quire.errors import EngineDeadError, OutOfMemoryError
from quire.kernels import cpu
from quire.life_cycle import AdapterLoad
from quire.schedule import ScheduledBatch
from tests.engine.harness import run
from tests.engine.ranks import started
from tests.engine.test_rank_processes import in_processes
from tests.engine.test_sameness import brief


class Rank(OtherRank):
    """One whose process is the test."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(1, Grid(width=2), NoFailing(), StepOrders(), connection, None)

    def load_adapter(self, path: str, digest: str | None, is_awaited: bool) -> AdapterLoad:
        raise NotImplementedError

    def _is_lost(self) -> bool:
        return False

    def _end(self) -> str:
        return "the rank has ended"

    def _place(self) -> str:
        return "here"


class NoFailing:
    """See distributed.group.Failing."""

    failed_rank = None
    own_reason = None
    cause = ""

    def fail_for(self, rank: int, reason: EngineDeadError | None = None, cause: int = 0) -> None:
        raise AssertionError("no rank fails")


def test_an_order_between_steps_gets_its_own_answer() -> None:
    own, theirs = multiprocessing.Pipe()
    rank = Rank(own)
    steps = [rank.submit(ScheduledBatch(step_id)) for step_id in (1, 2)]
    theirs.send_bytes(encode(Answer(ranks=((1.0, 0.1),))))
    assert steps.pop(0).result().ranks == ((1.0, 0.1),)
    steps.append(rank.submit(ScheduledBatch(3)))
    theirs.send_bytes(encode(Failed.of(OutOfMemoryError("no memory for step 2"))))
    theirs.send_bytes(encode(Answer(ranks=((3.0, 0.3),))))
    theirs.send_bytes(encode(Answer(has_more=True)))
    assert rank.use_idle_time(1) is True
    theirs.send_bytes(encode(Answer(has_more=True)))
    assert rank.use_idle_time(2) is True, "nothing is on its way"
    with pytest.raises(OutOfMemoryError, match="no memory for step 2"):
        steps[0].result()
    assert steps[1].result().ranks == ((3.0, 0.3),)
    names = []
    while theirs.poll():
        names.append(type(decode_to_rank(theirs.recv_bytes())).__name__)
    assert names == ["Execute", "Execute", "Execute", "UseIdleTime", "UseIdleTime"]


@pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")
def test_an_order_is_encoded_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, encode_one = list[str](), rank_messages.encode

    def noting(message: Any) -> bytes:
        encoded.append(type(message).__name__)
        return encode_one(message)

    monkeypatch.setattr(rank_messages, "encode", noting)
    engine = in_processes(tensor_parallel_size=3)
    encoded.clear()
    steps = 0

    def count(core: Any, step: int) -> None:
        nonlocal steps
        steps = step

    assert run(engine.core, brief(), before_step=count) == run(started(1).core, brief())
    engine.core.shutdown()
    assert steps > 10
    assert encoded.count("Execute") <= steps + 2


class Hanging:
    """A RankInterpreter whose process reads no order."""

    def launch(self, launch: RankLaunch) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
        return subprocess.Popen(words, pass_fds=[launch.connection])

    def end(self) -> None: ...


def test_the_engine_never_waits_for_a_rank_to_take_orders() -> None:
    """As many as a long pipeline has in flight. What the system does not take waits on the rank's own thread."""
    config = EngineConfig(pipeline_parallel_size=2)
    launch = RankLaunch(config, "", None, 1, -1, -1, None, False, {}, set())
    told: Any = SimpleNamespace(fail_for=lambda rank: None)
    rank = RankProcess(launch, Grid(1, 2), told, StepOrders(), Hanging())  # type: ignore[arg-type]
    long = ScheduledBatch(1, request_ids=["a" * 12_000])
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(lambda: [rank.begin(replace(long, step_id=step)) is not None for step in range(64)])
        try:
            assert begun.result(10.0) == [True] * 5 + [False] * 59
        finally:
            rank.give_up()
            rank.close()
