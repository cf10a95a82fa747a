"""Ranks that exchange tensors between devices. Gloo stands in for NCCL, and CPU tensors for a GPU's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from quire.distributed.device_group import Agreement, DeviceGroup, on_devices
from quire.distributed.group import GroupError, Ranks, StepVoid
from quire.distributed.layout import Grid
from quire.distributed.shared_memory import make_memory, ranks_on
from quire.forward_batch import ForwardBatch, LayerCache, StepTable
from quire.kernels import cpu, reference
from quire.kernels.layer_rules import AttentionRule
from quire.worker.kv_cache import PagedCache
from tests.distributed.test_shared_memory import part_of
from tests.worker.fake_accelerator import FakeAccelerator, FakeTransport

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

LEAVES_WITHIN = 2.0  # seconds


def together(ranks: list[Ranks], run: Callable[[Ranks], Any]) -> list[Any]:
    """The result of each rank; an exception is its result."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        futures = [threads.submit(run, each) for each in ranks]
        return [future.exception() or future.result() for future in futures]


def ranks_of(size: int, num_stages: int = 1) -> list[Ranks]:
    """`size`: the ranks of a stage."""
    grid = Grid(width=size, num_stages=num_stages)
    memory = make_memory(grid)
    ranks = [ranks_on(memory, rank, grid, has_own_cores=False, timeout_seconds=60.0) for rank in range(grid.size)]
    os.close(memory)
    return together(ranks, lambda each: on_devices(each, FakeAccelerator()))


@pytest.fixture
def pair() -> Iterator[list[Ranks]]:
    ranks = ranks_of(2)
    yield ranks
    for each in ranks:
        each.close()


def group_of(ranks: Ranks) -> DeviceGroup:
    assert isinstance(ranks.group, DeviceGroup)
    return ranks.group


@pytest.mark.parametrize(
    ("widths", "rows", "dtype"),
    [
        ((5, 7), 3, torch.bfloat16),
        ((64, 64, 61), 33, torch.float32),
        ((8, 8, 8, 8), 1, torch.bfloat16),
        ((0, 3, 1, 0), 17, torch.int64),
        ((2, 0), 1, torch.uint8),
        ((0, 0), 4, torch.float32),
        ((4, 4), 0, torch.float32),
    ],
)
def test_columns_lie_side_by_side(widths: tuple[int, ...], rows: int, dtype: torch.dtype) -> None:
    """Of all ranks, or for the first one only, which may give the memory for them."""
    ranks = ranks_of(len(widths))

    def run(ranks: Ranks) -> list[torch.Tensor]:
        group, found = group_of(ranks), []
        for turn in range(3):
            wide = part_of(group.rank, turn, rows, widths[group.rank] + 4, dtype)
            part, out = wide[:, : widths[group.rank]], torch.zeros((rows, sum(widths)), dtype=dtype)
            if turn == 2:
                out[:, : widths[0]] = part if group.rank == 0 else 0
                found.append(group.gather_to_first(part, widths, out if group.rank == 0 else None))
                assert group.rank != 0 or found[-1] is out
            else:
                found.append(group.gather_to_first(part, widths) if turn else group.gather(part, widths))
        return found

    for rank, found in enumerate(together(ranks, run)):
        for turn, tensor in enumerate(found):
            parts = [
                part_of(each, turn, rows, widths[each] + 4, dtype)[:, : widths[each]] for each in range(len(widths))
            ]
            expected = torch.cat(parts, 1) if turn == 0 or rank == 0 else parts[rank][:, :0]
            assert torch.equal(tensor, expected), f"turn {turn} of rank {rank}"
    for each in ranks:
        each.close()


def test_a_transport_that_comes_after_a_failure_is_ended() -> None:
    """Nothing else would end its operations."""
    grid = Grid(width=2)
    memory = make_memory(grid)
    ranks = [ranks_on(memory, rank, grid, has_own_cores=False, timeout_seconds=60.0) for rank in range(2)]
    os.close(memory)
    made, both = [], threading.Barrier(2)

    class Late(FakeAccelerator):
        def connect(self, *arguments: Any) -> FakeTransport:
            both.wait(60)  # else one fails while the other is not here yet
            ranks[1].fail()
            while any(thread.name == "failed ranks" for thread in threading.enumerate()):
                time.sleep(0.01)
            made.append(super().connect(*arguments))
            return made[-1]

    found = together(ranks, lambda each: on_devices(each, Late()))
    assert [type(error) for error in found] == [GroupError, GroupError]
    assert [transport._aborted.done() for transport in made] == [True, True]


def test_the_file_of_a_meeting_stays() -> None:
    """A store opens it whenever it is used, and its number must not name another file then."""
    before = len(_meetings())
    ranks = ranks_of(2)
    threads = [thread for thread in threading.enumerate() if thread.name == "failed ranks"]
    for each in ranks:
        each.close()
    assert len(_meetings()) == before + 1
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)


def _meetings() -> list[str]:
    return [name for name in map(_target, os.listdir("/proc/self/fd")) if "quire-meeting" in name]


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def test_a_rank_may_leave_a_step_in_which_nothing_was_launched(pair: list[Ranks]) -> None:
    """The other rank learns it before it launches anything, and the next step works."""
    part = torch.ones((2, 3))

    def run(ranks: Ranks) -> torch.Tensor:
        ranks.begin_step()
        assert not ranks.is_committed
        if ranks.rank == 0:
            ranks.leave_step()
        else:
            with pytest.raises(StepVoid):
                group_of(ranks).agree()
            assert not ranks.is_committed
            ranks.leave_step()
        ranks.begin_step()
        found = group_of(ranks).gather(part, (3, 3))
        assert ranks.is_committed
        ranks.end_step()
        return found

    assert all(torch.equal(found, torch.ones((2, 6))) for found in together(pair, run))


def test_a_rank_that_fails_lets_the_others_go(pair: list[Ranks]) -> None:
    """One waits inside an operation of the device, which knows nothing of the failure."""
    part = torch.ones((2, 3))
    waits = threading.Event()

    def run(ranks: Ranks) -> float:
        ranks.begin_step()
        group_of(ranks).agree()
        if ranks.rank == 0:
            waits.wait()
            time.sleep(0.1)
            ranks.fail()
            return 0.0
        waits.set()
        start = time.monotonic()
        group_of(ranks).gather(part, (3, 3))  # it ends without a result, and without an error
        with pytest.raises(GroupError, match="rank 0 has failed"):
            ranks.check()
        return time.monotonic() - start

    found = together(pair, run)
    assert not any(isinstance(each, Exception) for each in found), found
    assert found[1] < LEAVES_WITHIN
    group_of(pair[0]).gather(part, (3, 3))  # otherwise Gloo would wait for it at the end


@pytest.mark.parametrize(
    ("firsts", "columns", "dtype"),
    [
        ((0, 2, 3, 5), (range(20), range(20, 50), range(50, 50)), torch.bfloat16),
        ((0, 1, 5), (range(3), range(3, 5)), torch.float32),
        ((0, 0, 5), (range(2), range(2, 70)), torch.uint8),
    ],
)
def test_columns_of_the_rows_of_all_ranks(
    firsts: tuple[int, ...], columns: tuple[range, ...], dtype: torch.dtype
) -> None:
    """A rank has the rows of several experts, and of none. Its other rows are undefined."""
    begins = torch.tensor([0, 3, 3, 7, 7, 19], dtype=torch.int32)
    rows, width = 19, columns[-1].stop
    whole, ranks = part_of(0, 0, rows, width, dtype), ranks_of(len(columns))

    def run(ranks: Ranks) -> list[torch.Tensor]:
        group = group_of(ranks)
        begin, end = begins[list(firsts[group.rank : group.rank + 2])].tolist()
        wide = part_of(group.rank, 1, rows, width + 3, dtype)
        wide[begin:end, :width] = whole[begin:end]
        found = [group.exchange(wide[:, :width], begins, firsts, columns) for _ in range(2)]
        return [*found, group.exchange(wide[:0], begins[:1].expand(6), firsts, columns)]

    for rank, (*found, nothing) in enumerate(together(ranks, run)):
        for each in found:
            assert torch.equal(each, whole[:, columns[rank].start : columns[rank].stop])
        assert nothing.shape == (0, len(columns[rank]))
    for each in ranks:
        each.close()


def test_pages_are_copied_between_owners() -> None:
    """A page may go to another rank, and all sources are read before any page is written."""
    pages, copies = torch.arange(6 * 32, dtype=torch.uint8).view(6, 32), [(0, 3), (4, 1), (1, 2), (2, 5)]
    expected, ranks = pages.clone(), ranks_of(2)
    for source, destination in copies:
        expected[destination] = pages[source]

    def run(ranks: Ranks) -> torch.Tensor:
        cache = PagedCache(pages[ranks.rank :: 2].clone(), [], num_owners=2)
        cache.copy_pages(copies, group_of(ranks))
        return cache.pages

    for rank, found in enumerate(together(ranks, run)):
        assert torch.equal(found, expected[rank::2])
    for each in ranks:
        each.close()


@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_over_a_divided_cache(has_sinks: bool) -> None:
    """Two pairs of neighbours, each with a cache of its own: a prompt beside a decode, on pages of both or of one."""
    heads, num_pages, P, E, random = (2, 1, 1, 2), 7, 4, 16, torch.Generator().manual_seed(2)
    tables_SM = torch.tensor([[5, 2, 0], [4, -1, -1]], dtype=torch.int32)
    lens_S, cu_S1 = torch.tensor([11, 3], dtype=torch.int32), torch.tensor([0, 6, 7], dtype=torch.int32)
    q_PTHE, caches_P2BGPE = (torch.randn(2, *sizes, generator=random) for sizes in ((7, 3, E), (2, num_pages, 1, P, E)))
    sinks_PH = torch.randn(2, 3, generator=random)
    rule, ranks = AttentionRule(0.3), ranks_of(len(heads))
    whole = [
        reference.paged_attention(q_THE, LayerCache(*both), tables_SM, lens_S, cu_S1, rule, sinks_H)
        for q_THE, both, sinks_H in zip(q_PTHE, caches_P2BGPE, sinks_PH if has_sinks else (None, None), strict=True)
    ]

    def own_heads(rank: int) -> slice:
        begin = sum(heads[rank - rank % 2 : rank])
        return slice(begin, begin + heads[rank])

    def run(ranks: Ranks) -> torch.Tensor:
        pair, owner = divmod(ranks.rank, 2)
        cache = LayerCache(*(each[owner::2] for each in caches_P2BGPE[pair]))
        tables = (StepTable(torch.empty(0), tables_SM),)
        batch = ForwardBatch(torch.empty(7), torch.empty(7), cu_S1, lens_S, tables, [cache])
        sinks_H = sinks_PH[pair, own_heads(ranks.rank)] if has_sinks else None
        return group_of(ranks).attend(q_PTHE[pair], cache, batch, rule, heads, 2, sinks_H)

    for rank, found in enumerate(together(ranks, run)):
        torch.testing.assert_close(found, whole[rank // 2][:, own_heads(rank)], atol=1e-6, rtol=1e-5)
    for each in ranks:
        each.close()


@pytest.mark.parametrize("width", [1, 2])
def test_rows_pass_through_the_stages_in_their_order(width: int) -> None:
    """Each rank of a stage sends to the rank in its place of the next stage."""
    ranks = ranks_of(width, num_stages=3)

    def run(ranks: Ranks) -> list[torch.Tensor]:
        place, found = ranks.grid.place(ranks.rank), []
        for step in range(4):
            ranks.begin_step()
            rows = torch.full((step + 1, 3), 10.0 * step + place)
            if ranks.before is not None:
                rows = ranks.before.receive(step + 1, 3, torch.float32) + 100
            found.append(rows)
            if ranks.behind is not None:
                sent = F.pad(rows, (0, 4 * (step % 2)))[:, :3]  # strided rows in every second step
                ranks.behind.send(sent)
                sent.fill_(torch.nan)  # they are sent: work that comes later may have their memory
            assert ranks.is_committed
            ranks.end_step()
        return found

    for rank, found in enumerate(together(ranks, run)):
        passed = 100.0 * ranks[rank].grid.stage(rank)
        for step, rows in enumerate(found):
            assert torch.equal(rows, torch.full((step + 1, 3), passed + 10.0 * step + rank % width)), rank
    for each in ranks:
        each.close()


@pytest.mark.parametrize("leaver", range(4))
def test_all_stages_leave_a_step_together(leaver: int) -> None:
    """Two stages of two ranks. Those that wait for the transfer have not launched it."""
    ranks = ranks_of(2, num_stages=2)

    def run(ranks: Ranks) -> list[int]:
        found = []
        for step in range(3):
            ranks.begin_step()
            try:
                if ranks.rank == leaver and step == 1:
                    raise OSError
                rows = torch.zeros(1, 2) if ranks.before is None else ranks.before.receive(1, 2, torch.float32)
                rows = group_of(ranks).gather(rows[:, :1], (1, 1))
                if ranks.behind is not None:
                    ranks.behind.send(rows)
            except (OSError, StepVoid):
                assert not ranks.is_committed
                ranks.leave_step()
            else:
                ranks.end_step()
                found.append(step)
        return found

    assert together(ranks, run) == [[0, 2]] * 4
    for each in ranks:
        each.close()


@pytest.mark.parametrize("waits", ["to send", "to receive"])
def test_a_stage_that_fails_lets_its_neighbours_go(waits: str) -> None:
    ranks = ranks_of(1, num_stages=2)
    last, first = ranks
    failing, waiting = (last, first) if waits == "to send" else (first, last)

    def run(ranks: Ranks) -> float:
        ranks.begin_step()
        ranks.steps[0].agree()  # type: ignore[attr-defined]
        if ranks is failing:
            time.sleep(0.2)
            ranks.fail()
            return 0.0
        start = time.monotonic()
        if ranks.behind is not None:
            ranks.behind.send(torch.ones(2, 3))
        else:
            assert ranks.before is not None
            ranks.before.receive(2, 3, torch.float32)
        with pytest.raises(GroupError, match=f"rank {failing.rank} has failed"):
            ranks.check()
        return time.monotonic() - start

    found = together(ranks, run)
    assert not any(isinstance(each, Exception) for each in found), found
    assert found[waiting.rank] < LEAVES_WITHIN


def test_no_transport_waits_for_the_end_of_another_one() -> None:
    """The device may wait in the second one, while the end of the first one waits for the device."""
    first, second = ranks_of(1, num_stages=2)
    (agreement,) = first.steps
    assert isinstance(agreement, Agreement)
    (links,) = agreement.transports
    is_over = threading.Event()

    class Waiting:
        def abort(self) -> None:
            is_over.wait()

    class Ending:
        def abort(self) -> None:
            links.abort()
            is_over.set()

    agreement.transports[:] = [Waiting(), Ending()]
    first.close()
    assert is_over.wait(LEAVES_WITHIN)
    second.close()


def test_the_transport_of_a_gpu() -> None:
    """Its process ends by itself long after our own time limit, which names the late rank."""
    if not dist.is_nccl_available():
        pytest.skip("this torch is built without NCCL")
    from quire.worker.accelerator import Cuda

    connected = Cuda.connect(object.__new__(Cuda), dist.HashStore(), 0, 1, timedelta(seconds=3))
    assert isinstance(connected, dist.ProcessGroupNCCL)
