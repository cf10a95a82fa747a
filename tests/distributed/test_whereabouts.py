"""The late rank and its work: ranks are threads here. tests/engine/test_slow_ranks.py has processes."""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from quire.distributed.group import GroupError, RankLate, Ranks
from quire.distributed.layout import Grid
from quire.distributed.shared_memory import make_memory, ranks_on
from quire.kernels import cpu
from tests.engine.test_rank_processes import wait_for

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")


def ranks_of(grid: Grid, timeout_seconds: float = 60.0) -> list[Ranks]:
    memory = make_memory(grid)
    found = [
        ranks_on(memory, rank, grid, has_own_cores=False, timeout_seconds=timeout_seconds) for rank in range(grid.size)
    ]
    os.close(memory)
    return found


def gather(ranks: Ranks) -> torch.Tensor:
    group = ranks.group
    assert group is not None
    return group.gather(torch.zeros(1, 1), [1] * group.size)


def in_background(run: Callable[[], Any]) -> threading.Thread:
    def ignoring() -> None:
        with pytest.raises(GroupError):
            run()

    thread = threading.Thread(target=ignoring)
    thread.start()
    return thread


def test_what_a_rank_does() -> None:
    first, second = ranks_of(Grid(2))
    where = first.whereabouts
    assert where.doing(1) == "is in its start, after 0 exchanges"
    assert where.name(1) == f"process {os.getpid()} on {platform.node()}"
    first.begin_step()
    assert where.doing(1) == "has not begun step 1"
    second.begin_step()
    assert where.doing(1) == "is in step 1, after 0 exchanges"
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(gather, second)
        gather(first)
        other.result()
    assert where.doing(1) == "is in step 1, after 1 exchange"
    first.end_step()
    first.begin_step()
    assert where.doing(1) == "is in step 1, after 1 exchange", "another stage is in the next one"
    second.end_step()
    assert where.doing(1) == "has not begun step 2"
    second.begin_step()
    second.end_step()
    assert where.doing(1) == "has computed step 2, and does not answer"
    assert [place.awaited for place in where.all()] == [-1, -1]


def test_a_step_that_is_left_has_ended() -> None:
    first, second = ranks_of(Grid(2))
    for ranks in (first, second):
        ranks.begin_step()
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(second.leave_step)
        first.leave_step()
        other.result()
    first.begin_step()
    assert first.whereabouts.doing(1) == "has not begun step 2"
    assert [place.awaited for place in first.whereabouts.all()] == [-1, -1]


def test_of_ranks_that_wait_for_each_other_the_last_one_is_late() -> None:
    """Rank 0 waits for rank 2 of the stage before, which waits for rank 3 of its own stage."""
    ranks = ranks_of(Grid(2, 2), timeout_seconds=3.0)
    before = ranks[0].before
    assert before is not None
    caught: list[BaseException] = []

    def receive() -> None:
        with pytest.raises(RankLate) as late:
            before.receive(1, 1, torch.float32)
        caught.append(late.value)

    receiving = threading.Thread(target=receive)
    receiving.start()
    assert wait_for(lambda: ranks[0].whereabouts.all()[0].awaited == 2)
    assert ranks[0].whereabouts.late([0, 1, 2, 3]).keys() == {1, 2, 3}, "rank 2 does not wait yet"
    waiting = in_background(lambda: gather(ranks[2]))
    assert wait_for(lambda: ranks[0].whereabouts.all()[2].awaited == 3)
    assert ranks[1].whereabouts.late([0, 2, 3]).keys() == {3}
    receiving.join()
    waiting.join()
    assert str(caught[0]) == "rank 3 did not come within 3 s (--distributed-timeout-seconds)"
    assert [each.failing.failed_rank for each in ranks] == [3] * 4


def test_a_rank_of_another_machine_is_late() -> None:
    """The connection of the one that waits says so, and has its address."""
    grid = Grid(1, 3, 3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    memory = make_memory(grid)
    ranks = ranks_on(memory, 0, grid, {1: ours.detach()}, has_own_cores=False, timeout_seconds=60.0)
    os.close(memory)
    before = ranks.before
    assert before is not None
    assert ranks.whereabouts.late([0, 1]).keys() == {0}
    assert ranks.whereabouts.late([1]) == {1: "does not answer"}, "nobody here waits for what it sends"
    waiting = in_background(lambda: before.receive(1, 1, torch.float32))
    assert wait_for(lambda: ranks.whereabouts.late([0, 1]) == {1: "has sent nothing"})
    assert [ranks.whereabouts.name(rank) for rank in (1, 2)] == ["on 127.0.0.1", "on another machine"]
    theirs.close()
    waiting.join()
    assert ranks.whereabouts.late([1]).keys() == {1}
    ranks.close()


def test_more_ranks_than_can_be() -> None:
    grid = Grid(2)
    memory = make_memory(grid)
    with pytest.raises(ValueError, match="more ranks than can be"):
        ranks_on(memory, 1 << 20, Grid(1 << 20, 2), has_own_cores=False, timeout_seconds=1.0)
    os.close(memory)


def test_ranks_that_are_late_at_once() -> None:
    """If two ranks in different groups are late, one is blamed: an error never mixes the name of one with the work of
    the other.
    """
    ranks = ranks_of(Grid(2, 2), timeout_seconds=1.0)
    with ThreadPoolExecutor(2) as threads:
        waiting = {rank: threads.submit(gather, ranks[rank]) for rank in (0, 2)}
        caught = {rank: each.exception() for rank, each in waiting.items()}
    (blamed,) = {each.failing.failed_rank for each in ranks}
    other = 2 if blamed == 1 else 0  # waits for the one that is not blamed
    assert isinstance(caught[2 - other], RankLate)
    assert type(caught[other]) is GroupError
    assert str(caught[other]) == f"rank {blamed} has failed: it did not come in time"
