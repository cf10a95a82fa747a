"""A rank in another process answers in the order of its orders, whatever is asked while steps are in flight."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest

from quire.distributed.layout import Grid
from quire.engine.rank_messages import Answer, Failed, decode_to_rank, encode
from quire.engine.ranks import OtherRank
from quire.errors import EngineDeadError, OutOfMemoryError
from quire.life_cycle import AdapterLoad
from quire.schedule import ScheduledBatch


class Rank(OtherRank):
    """One whose process is the test."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(1, Grid(width=2), NoFailing(), connection, None)

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
