"""How long KV blocks keep their content: exact times on a clock of the test's."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from quire.schedule import EvictedBlock, StepRecord
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.residency import BlockResidency
from tests.scheduler.driver import Driver, request


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_block_that_is_never_shared_is_idle_all_its_life(clock: Clock) -> None:
    pool = BlockPool(1, 4, residency := BlockResidency(1.0, clock))
    pool.release(pool.allocate(1))
    assert residency.take_evicted() == [], "its content is still there"
    clock.now += 8
    pool.allocate(1)
    assert residency.take_evicted() == [EvictedBlock(8.0, 8.0, [])]
    assert residency.take_evicted() == [], "reported once"


def test_accesses_give_idle_time_and_gaps(clock: Clock) -> None:
    pool = BlockPool(1, 4, residency := BlockResidency(1.0, clock))
    blocks = pool.allocate(1)
    for seconds in (1, 2, 4):  # found by others while it is in use, and while it is free
        clock.now += seconds
        pool.acquire(blocks)
        pool.release(blocks)
    pool.release(blocks)
    clock.now += 16
    pool.allocate(1)
    assert residency.take_evicted() == [EvictedBlock(23.0, 16.0, [2.0, 4.0])]


def test_gaps_are_those_of_the_last_four_accesses(clock: Clock) -> None:
    pool = BlockPool(1, 4, residency := BlockResidency(1.0, clock))
    blocks = pool.allocate(1)
    for seconds in (1, 2, 3, 4, 5, 6):
        clock.now += seconds
        pool.acquire(blocks)
    for _ in range(7):
        pool.release(blocks)
    pool.allocate(1)
    assert residency.take_evicted() == [EvictedBlock(21.0, 0.0, [4.0, 5.0, 6.0])]


def test_a_stay_begins_with_every_allocation(clock: Clock) -> None:
    pool = BlockPool(1, 4, residency := BlockResidency(1.0, clock))
    for _ in range(3):
        pool.release(pool.allocate(1))
        clock.now += 2
    assert residency.take_evicted() == [EvictedBlock(2.0, 2.0, [])] * 2


def test_only_the_sample_is_followed(clock: Clock) -> None:
    draws: Iterator[float] = iter([0.24, 0.25, 0.99, 0.0] + [0.9] * 4)
    pool = BlockPool(4, 4, residency := BlockResidency(0.25, clock, lambda: next(draws)))
    pool.release(pool.allocate(4))
    clock.now += 1
    pool.allocate(4)
    assert len(residency.take_evicted()) == 2, "of the draws 0.24, 0.25, 0.99 and 0.0 two are below 0.25"


def test_a_reset_says_nothing_about_eviction(clock: Clock) -> None:
    pool = BlockPool(1, 4, residency := BlockResidency(1.0, clock))
    pool.release(pool.allocate(1))
    pool.forget_all()
    clock.now += 5
    pool.allocate(1)
    assert residency.take_evicted() == []


def test_the_engine_reports_with_the_step(clock: Clock) -> None:
    driver = Driver(num_blocks=2, residency=BlockResidency(1.0, clock))
    driver.run_all(request("first", [1] * 5, 2))  # two blocks, one of them full
    clock.now += 3
    driver.run_all(request("hit", [1] * 5, 2))  # one of the two is found, the other handed out again
    clock.now += 4
    driver.add(request("evicts", [2] * 5, 2))
    driver.step()
    record = driver.core.last_record
    assert record is not None
    assert record.evicted_blocks is not None
    by_lifetime = sorted(record.evicted_blocks, key=lambda block: block.lifetime_seconds)
    assert by_lifetime == [EvictedBlock(4.0, 4.0, []), EvictedBlock(7.0, 4.0, [])]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=StepRecord) == record


def test_without_it_nothing_is_added_to_a_message() -> None:
    driver = Driver()
    driver.add(request("a", [1] * 5, 2))
    driver.step()
    assert b"evicted" not in msgspec.msgpack.encode(driver.core.last_record)
