"""Ranks that join their columns through shared memory: as threads, which share nothing else. On one machine, and on
several.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import pytest
import torch

from quire import extension
from quire.distributed import shared_memory
from quire.distributed.group import STOPPED, GroupError, Ranks, StepVoid
from quire.distributed.layout import Grid
from quire.distributed.shared_memory import SharedMemoryGroup, make_memory, ranks_on
from quire.errors import ConfigError
from quire.kernels import cpu
from tests.distributed.machines import ranks_of

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

LEAVES_WITHIN = 2.0  # seconds
NOTE = struct.Struct("=IIQqq")  # what a rank sends to another machine before the bytes of its slot


class Make:
    """Makes a stage of ranks.

    Args:
        has_machines: whether they are on several machines: each has two of four ranks, or one.
    """

    def __init__(self, has_machines: bool) -> None:
        self.has_machines = has_machines
        self.ranks = list[Ranks]()

    def __call__(self, size: int, timeout_seconds: float = 60.0) -> list[SharedMemoryGroup]:
        num_nodes = (2 if size == 4 else size) if self.has_machines else 1
        self.ranks = ranks_of(Grid(width=size, num_nodes=num_nodes), timeout_seconds)
        groups = [each.group for each in self.ranks]
        assert all(isinstance(group, SharedMemoryGroup) for group in groups)
        return groups  # type: ignore[return-value]


@pytest.fixture(params=[False, True], ids=["one machine", "machines"])
def groups_of(request: pytest.FixtureRequest) -> Iterator[Make]:
    make = Make(request.param)
    yield make
    for each in make.ranks:
        each.close()


def together(groups: list[SharedMemoryGroup], run: Callable[[SharedMemoryGroup], Any]) -> list[Any]:
    """What each rank gives; an exception is its result."""
    with ThreadPoolExecutor(len(groups)) as threads:
        futures = [threads.submit(run, group) for group in groups]
        return [future.exception() or future.result() for future in futures]


def part_of(rank: int, turn: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(0, 100, (rows, width), generator=draw).to(dtype)


@pytest.mark.parametrize("slot_bytes", [64, 1 << 20])
@pytest.mark.parametrize(
    ("widths", "rows", "dtype"),
    [
        ((5, 7), 3, torch.bfloat16),
        ((64, 64, 61), 33, torch.float32),
        ((0, 3, 1, 0), 17, torch.int64),
        ((2, 0), 1, torch.uint8),
        ((0, 0), 4, torch.float32),
    ],
)
def test_columns_lie_side_by_side(
    groups_of: Make,
    slot_bytes: int,
    widths: tuple[int, ...],
    rows: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turn after turn, in slots that hold everything and in slots that hold a part of a row."""
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", slot_bytes)
    size, turns = len(widths), range(5)

    def run(group: SharedMemoryGroup) -> list[torch.Tensor]:
        found = []
        for turn in turns:
            wide = part_of(group.rank, turn, rows, widths[group.rank] + 4, dtype)
            gather = group.gather_to_first if turn == 3 else group.gather
            found.append(gather(wide[:, : widths[group.rank]], widths))
        return found

    for rank, found in enumerate(together(groups_of(size), run)):
        for turn in turns:
            parts = [part_of(each, turn, rows, widths[each] + 4, dtype)[:, : widths[each]] for each in range(size)]
            expected = torch.cat(parts, 1)
            if turn == 3 and rank > 0:
                expected = expected[:, :0]
            assert torch.equal(found[turn], expected)


@pytest.mark.parametrize("slot_bytes", [64, 1 << 20])
def test_columns_that_are_in_their_place(groups_of: Make, slot_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank has computed its columns in the result's memory, and gets the others' columns beside them."""
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", slot_bytes)
    widths = (64, 64, 61)

    def run(group: SharedMemoryGroup) -> torch.Tensor:
        part, out = part_of(group.rank, 0, 33, widths[group.rank], torch.float32), None
        if group.rank == 0:
            out = torch.full((33, sum(widths)), -1.0)
            out[:, :64] = part
            part = out[:, :64]
        found = group.gather_to_first(part, widths, out)
        assert out is None or found is out
        return found

    found = together(groups_of(3), run)
    expected = torch.cat([part_of(rank, 0, 33, width, torch.float32) for rank, width in enumerate(widths)], 1)
    assert torch.equal(found[0], expected)
    assert [each.shape for each in found[1:]] == [(33, 0), (33, 0)]


@pytest.mark.parametrize("slot_bytes", [64, 1 << 20])
@pytest.mark.parametrize(
    ("widths", "owners"),
    [((5, 7), [0, 1, 1, 0, 1]), ((64, 64, 61), [2, 2, 0] * 11), ((3, 0, 4), [1] * 9), ((2, 3), []), ((1, 1), [0])],
)
def test_each_rank_gets_its_rows(
    groups_of: Make, slot_bytes: int, widths: tuple[int, ...], owners: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between turns that gather all rows."""
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", slot_bytes)
    owners_T, rows = torch.tensor(owners, dtype=torch.int32), len(owners)

    def run(group: SharedMemoryGroup) -> list[torch.Tensor]:
        parts = [part_of(group.rank, turn, rows, widths[group.rank] + 4, torch.float32) for turn in range(4)]
        return [
            (
                group.gather_rows(part[:, :-4], widths, owners_T).clone()
                if turn % 2
                else group.gather(part[:, :-4], widths)
            )
            for turn, part in enumerate(parts)
        ]

    for rank, found in enumerate(together(groups_of(len(widths)), run)):
        for turn, rows_of_rank in enumerate(found):
            parts = [part_of(each, turn, rows, width + 4, torch.float32)[:, :-4] for each, width in enumerate(widths)]
            expected = torch.cat(parts, 1)
            assert torch.equal(rows_of_rank, expected[owners_T == rank] if turn % 2 else expected)


@pytest.mark.parametrize("owner", [-1, 2])
def test_a_row_of_no_rank_is_refused(groups_of: Make, owner: int) -> None:
    def run(group: SharedMemoryGroup) -> torch.Tensor:
        return group.gather_rows(torch.zeros(2, 1), (1, 1), torch.tensor([owner, 0], dtype=torch.int32))

    assert {type(found) for found in together(groups_of(2), run)} == {ValueError}


def test_ranks_that_want_other_rows_than_the_others_think_are_told(groups_of: Make) -> None:
    def run(group: SharedMemoryGroup) -> torch.Tensor:
        return group.gather_rows(torch.zeros(2, 1), (1, 1), torch.tensor([0, group.rank], dtype=torch.int32))

    assert all(
        "does something else" in str(found) or "has failed" in str(found) for found in together(groups_of(2), run)
    )


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux has memory without a file")
def test_the_memory_is_in_no_folder() -> None:
    """So a small /dev/shm does not matter, and no file is left."""
    memory = make_memory(Grid(2))
    assert os.readlink(f"/proc/self/fd/{memory}") == "/memfd:quire-ranks (deleted)"
    os.close(memory)


def test_more_ranks_than_cores(groups_of: Make) -> None:
    """Ranks that wait sleep, so that the others get on."""

    def run(group: SharedMemoryGroup) -> int:
        mine, seen = torch.tensor([[group.rank]]), 0
        for turn in range(500):
            seen += int(group.gather(mine + turn, [1] * 4).sum())
        return seen

    assert together(groups_of(4), run) == [sum(6 + 4 * turn for turn in range(500))] * 4


def test_a_recorded_call_joins_again(groups_of: Make) -> None:
    """As captured steps do: on the same addresses, by several ranks of a process at once."""

    def run(group: SharedMemoryGroup) -> list[int]:
        part = torch.tensor([[group.rank]])
        with cpu.recorded_calls() as calls:
            out = group.gather(part, (1, 1))
        (call,) = calls
        part += 10
        call()
        return [int(number) for number in out[0]]

    assert together(groups_of(2), run) == [[10, 11]] * 2


@pytest.mark.parametrize("slot_bytes", [64, 1 << 20])
@pytest.mark.parametrize(
    ("counts", "columns", "dtype"),
    [
        ((3, 0, 41), (range(20), range(20, 50), range(50, 50)), torch.bfloat16),
        ((1, 1), (range(3), range(3, 5)), torch.float32),
        ((0, 7), (range(64), range(64, 70)), torch.uint8),
    ],
)
def test_columns_of_the_rows_of_all_ranks(
    groups_of: Make,
    slot_bytes: int,
    counts: tuple[int, ...],
    columns: tuple[range, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank has one expert, and its other rows are undefined; between two turns that gather."""
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", slot_bytes)
    size, rows, width = len(counts), sum(counts), columns[-1].stop
    begins = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    whole = part_of(0, 0, rows, width, dtype)

    def run(group: SharedMemoryGroup) -> list[torch.Tensor]:
        own, wide = range(begins[group.rank], begins[group.rank + 1]), part_of(group.rank, 1, rows, width + 3, dtype)
        wide[own.start : own.stop, :width] = whole[own.start : own.stop]
        found = []
        for _ in range(3):
            found.append(group.exchange(wide[:, :width], begins, range(size + 1), columns))
            group.gather(wide[:, :1], [1] * size)
        return found

    for rank, found in enumerate(together(groups_of(size), run)):
        for each in found:
            assert torch.equal(each, whole[:, columns[rank].start : columns[rank].stop])


def test_ranks_that_route_differently_are_noticed(groups_of: Make) -> None:
    def run(group: SharedMemoryGroup) -> torch.Tensor:
        begins = torch.tensor([0, 2 + group.rank, 5], dtype=torch.int32)
        return group.exchange(torch.ones(5, 4), begins, (0, 1, 2), [range(2)] * 2)

    assert any("does something else" in str(each) for each in together(groups_of(2), run))


@pytest.mark.parametrize("waits", [0.0, 0.3])
def test_a_rank_that_fails_is_not_waited_for(groups_of: Make, waits: float) -> None:
    """Whether the others sleep already or come later; and never again."""
    groups, left = groups_of(4), []

    def run(group: SharedMemoryGroup) -> None:
        if group.rank == 1:
            time.sleep(waits)
            groups_of.ranks[1].fail()
            return
        for _ in range(2):
            with pytest.raises(GroupError, match="rank 1 has failed"):
                group.gather(torch.zeros(1, 1), (1, 1, 1, 1))
        left.append(time.monotonic())

    start = time.monotonic()
    assert together(groups, run) == [None] * 4
    assert max(left) - start < waits + LEAVES_WITHIN
    assert {group.failed_rank for group in groups} == {1}


@pytest.mark.parametrize("waits", [0.0, 0.3])
def test_a_step_that_one_rank_leaves(groups_of: Make, waits: float) -> None:
    """Before its first turn, in the middle, and behind its last one, which the others need not learn. All go on."""
    have_ended = threading.Barrier(4 if groups_of.has_machines else 1)  # notes of two ranks may come in any order

    def run(group: SharedMemoryGroup) -> list[Any]:
        found: list[Any] = []
        for step in range(6):
            group.begin_step()
            try:
                for turn in range(4):
                    if group.rank == 1 and step in (1, 3) and turn == step:
                        time.sleep(waits)
                        raise OSError
                    found.append(group.gather(torch.tensor([[step + turn]]), (1, 1, 1, 1)).tolist())
                if group.rank == 1 and step == 4:
                    have_ended.wait()
                    raise OSError
            except (OSError, StepVoid):
                group.leave_step()
                found = found[: -turn if turn else None] if step != 4 else found
                found.append(step)
            else:
                group.end_step()
                if step == 4 and groups_of.has_machines:
                    have_ended.wait()
        return found

    whole = [[[[step + turn] * 4] for turn in range(4)] for step in range(6)]
    others = [*whole[0], 1, *whole[2], 3, *whole[4], *whole[5]]
    first, second, *more = together(groups_of(4), run)
    assert [first, *more] == [others] * 3
    assert second == [*others[:-4], 4, *others[-4:]]


@pytest.mark.parametrize("leaver", range(4))
@pytest.mark.parametrize("waits", [0.0, 0.2])
def test_a_step_of_two_groups_that_one_rank_leaves(leaver: int, waits: float) -> None:
    """Two lanes of two ranks, and all of them: others wait in either group, and none waits for ever."""
    grid = Grid(width=2, num_lanes=2)
    ranks = ranks_of(grid, timeout_seconds=10.0)
    found: list[list[int]] = [[] for _ in ranks]

    def run(rank: int) -> None:
        lane, everyone = (each for each in ranks[rank].steps if isinstance(each, SharedMemoryGroup))
        for step in range(4):
            for group in (lane, everyone):
                group.begin_step()
            try:
                for turn in range(3):
                    if rank == leaver and step in (1, 2) and turn == step:
                        time.sleep(waits)
                        raise OSError
                    if rank == 1 and step == 1:
                        time.sleep(waits / 2)  # one of its lane waits in the lane, the others in the other group
                    lane.gather(torch.tensor([[turn]]), (1, 1))
                    everyone.gather(torch.tensor([[turn]]), (1, 1, 1, 1))
            except (OSError, StepVoid):
                for group in (lane, everyone):
                    group.void_step()
                for group in (lane, everyone):
                    group.leave_step()
            else:
                for group in (lane, everyone):
                    group.end_step()
                found[rank].append(step)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))
    assert found == [[0, 3]] * 4


def test_a_step_is_left_although_a_rank_is_lost(groups_of: Make) -> None:
    first, second, _ = groups_of(3)
    for group in (first, second):
        group.begin_step()
    threading.Timer(0.2, groups_of.ranks[1].fail).start()
    with pytest.raises(GroupError, match="rank 1 has failed"):
        first.leave_step()


def test_others_can_say_that_a_rank_is_gone(groups_of: Make) -> None:
    first, _ = groups_of(2)
    threading.Timer(0.2, groups_of.ranks[1].fail).start()
    with pytest.raises(GroupError, match="rank 1 has failed"):
        first.gather(torch.zeros(2, 1), (1, 1))


def test_a_rank_that_cannot_be_made_closes_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(10.0)
    monkeypatch.setattr(extension, "is_used", lambda: False)
    with theirs:
        with pytest.raises(ConfigError, match="needs the compiled kernels"):
            ranks_on(0, 0, Grid(1, 2, 2), {1: ours.detach()}, has_own_cores=False, timeout_seconds=1.0)
        assert theirs.recv(1) == b""


def test_a_rank_that_does_not_come(groups_of: Make) -> None:
    first, _ = groups_of(2, timeout_seconds=0.3)
    with pytest.raises(GroupError, match=r"rank 1 did not come within 0 s \(--distributed-timeout-seconds\)"):
        first.gather(torch.zeros(2, 1), (1, 1))


@pytest.fixture
def first_and_socket() -> Iterator[tuple[Ranks, socket.socket]]:
    """Rank 0 of two machines with a rank each, and the other end of its connection."""
    grid, (ours, theirs) = Grid(width=2, num_nodes=2), socket.socketpair()
    memory = make_memory(grid)
    first = ranks_on(memory, 0, grid, {1: ours.detach()}, has_own_cores=False, timeout_seconds=0.5)
    os.close(memory)
    with theirs:
        yield first, theirs
    first.close()


@pytest.mark.parametrize("last", ["kind", "length", "place", "end"])
def test_a_machine_that_sends_nonsense(first_and_socket: tuple[Ranks, socket.socket], last: str) -> None:
    """A note has its kind, the number of the turn, a word, and length and place of what follows. Others learn the
    cause.
    """
    first, peer = first_and_socket
    kind, num_bytes = (3, 0) if last == "kind" else (0, -1 if last == "length" else 8)
    peer.sendall(NOTE.pack(kind, 1, 0, num_bytes, shared_memory.SLOT_BYTES - 7 if last == "place" else 0) + bytes(4))
    peer.shutdown(socket.SHUT_WR)
    assert first.group is not None
    cause = "its connection was closed" if last == "end" else "it has sent something that no rank sends"
    with pytest.raises(GroupError, match=f"rank 1 has failed: {cause}"):
        first.group.gather(torch.zeros(2, 1), (1, 1))
    assert first.failing.cause == cause


def test_a_machine_gets_only_the_rows_of_its_ranks(first_and_socket: tuple[Ranks, socket.socket]) -> None:
    """And sends only those of the others."""
    first, peer = first_and_socket
    owners_T, columns = torch.tensor([1, 0, 1, 0, 0], dtype=torch.int32), torch.arange(15.0).view(5, 3)
    assert first.group is not None
    with ThreadPoolExecutor(1) as thread:
        gathering = thread.submit(first.group.gather_rows, columns, (3, 1), owners_T)
        kind, turn, signature, num_bytes, begin = NOTE.unpack(peer.recv(NOTE.size, socket.MSG_WAITALL))
        sent = torch.frombuffer(bytearray(peer.recv(num_bytes, socket.MSG_WAITALL)), dtype=torch.float32)
        peer.sendall(NOTE.pack(kind, turn, signature, 12, 0) + struct.pack("=3f", 71, 73, 74))
        found = gathering.result()
    assert (num_bytes, begin) == (2 * 12, 3 * 12), "two rows behind the three of the first machine"
    assert torch.equal(sent.view(2, 3), columns[[0, 2]])
    assert torch.equal(found, torch.cat((columns[[1, 3, 4]], torch.tensor([[71.0], [73.0], [74.0]])), 1))


def test_a_connection_that_fails(first_and_socket: tuple[Ranks, socket.socket]) -> None:
    """The system's reason is told. The other end closes before it has read what was sent to it."""
    first, peer = first_and_socket

    def close() -> None:
        peer.recv(1, socket.MSG_PEEK)
        peer.close()

    assert first.group is not None
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(close)
        with pytest.raises(GroupError, match="rank 1 has failed: its connection has failed: Connection reset by peer"):
            first.group.gather(torch.zeros(2, 1), (1, 1))
        closing.result()


@pytest.fixture
def two_stages() -> Iterator[list[Ranks]]:
    """The ranks of two stages of two ranks, each stage on a machine of its own."""
    ranks = ranks_of(Grid(width=2, num_stages=2, num_nodes=2))
    yield ranks
    for each in ranks:
        each.close()


def test_a_link_that_ends_is_the_failure_of_the_other_rank(two_stages: list[Ranks]) -> None:
    """Ranks beside this one learn it too, with the cause. So nobody takes this one for the culprit."""
    behind, before = two_stages[3].behind, two_stages[1].before
    assert behind is not None
    assert before is not None
    behind.close()
    with pytest.raises(GroupError, match="rank 3 has failed: the connection was closed"):
        before.receive(1, 4, torch.float32)
    assert (two_stages[0].failing.failed_rank, two_stages[0].failing.cause) == (3, "its connection was closed")
    assert two_stages[0].group is not None
    with pytest.raises(GroupError, match="rank 3 has failed: its connection was closed"):
        two_stages[0].group.gather(torch.zeros(2, 1), (1, 1))


def test_a_link_that_ends_because_another_rank_has_failed(two_stages: list[Ranks]) -> None:
    """The waiting rank names the rank that failed first, not the one at the other end of the link."""
    before = two_stages[0].before
    assert before is not None
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(before.receive, 1, 4, torch.float32)
        while two_stages[0].whereabouts.all()[0].awaited != 2:
            time.sleep(0.01)
        two_stages[0].failing.fail_for(1, cause=STOPPED)
        with pytest.raises(GroupError, match="rank 1 has failed: its process was stopped by a signal"):
            waiting.result()


def test_a_frame_of_a_wrong_length(two_stages: list[Ranks]) -> None:
    """The connection was not closed: the other rank has sent nonsense."""
    behind, before = two_stages[3].behind, two_stages[1].before
    assert behind is not None
    assert before is not None
    behind.send(torch.zeros(3, 4))
    with pytest.raises(GroupError, match="rank 3 has failed: a frame has 48 bytes, and 16 are expected"):
        before.receive(1, 4, torch.float32)
    assert (two_stages[0].failing.failed_rank, two_stages[0].failing.cause) == (
        3,
        "it has sent something that no rank sends",
    )


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_machine_that_takes_nothing(first_and_socket: tuple[Ranks, socket.socket], is_lost: bool) -> None:
    """Its rank is late. If it is known to be lost, it is not waited for."""
    first, _ = first_and_socket
    if is_lost:
        threading.Timer(0.1, first.failing.fail_for, (1,)).start()
    words = "rank 1 has failed" if is_lost else "rank 1 did not come within 0 s"
    assert first.group is not None
    with pytest.raises(GroupError, match=words):
        first.group.gather(torch.zeros(16, 1 << 18), (1 << 18, 1 << 18))


@pytest.mark.parametrize(("rows", "widths"), [((2, 3), ((1, 1), (1, 1))), ((2, 2), ((1, 1), (1, 2)))])
def test_ranks_that_do_different_things(
    groups_of: Make, rows: tuple[int, int], widths: tuple[tuple[int, int], ...]
) -> None:
    """An error, not a wrong result or a hang."""

    def run(group: SharedMemoryGroup) -> None:
        own = widths[group.rank]
        group.gather(torch.zeros(rows[group.rank], own[group.rank]), own)

    for error in together(groups_of(2), run):
        assert isinstance(error, GroupError)
        assert "does something else" in str(error) or "has failed" in str(error)
