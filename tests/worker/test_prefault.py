"""The memory of KV pages is taken ahead of use, in order, up to the lead, and keeps written bytes."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch
from torch import Tensor

from quire.scheduler.block_pool import BlockPool
from quire.worker.prefault import Prefault

MIB = 1 << 20
NUM_PAGES = 8192
PAGE_BYTES = 4 * 4096

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise with MADV_POPULATE_WRITE")


def allocate() -> Tensor:
    """128 MiB that the system has just mapped: an allocator may hand out what a test before has used."""
    memory = mmap.mmap(-1, NUM_PAGES * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(NUM_PAGES, PAGE_BYTES)


def resident_bytes(cache: Tensor) -> int:
    """The part of its memory that has pages, by mincore(2): other memory of the process does not count."""
    libc = ctypes.CDLL(None, use_errno=True)
    begin = cache.data_ptr() & -mmap.PAGESIZE
    num_bytes = cache.data_ptr() + cache.nbytes - begin
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), pages) == 0, ctypes.get_errno()
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def run(prefault: Prefault, num_ever_used: int) -> int:
    """Steps until nothing is to be done."""
    steps = 0
    while prefault.step(num_ever_used):
        steps += 1
    return steps


def test_the_lead_is_taken_and_no_more() -> None:
    cache = allocate()
    prefault = Prefault(cache, lead_bytes=64 * MIB)
    assert resident_bytes(cache) < 4 * MIB
    assert run(prefault, 0) > 10, "in steps that are short"
    taken = resident_bytes(cache)
    assert 60 * MIB < taken < 76 * MIB  # huge pages are whole
    assert run(prefault, 0) == 0
    assert resident_bytes(cache) < taken + 4 * MIB


def test_pages_that_were_handed_out_and_never_written_get_memory() -> None:
    cache = allocate()
    cache[: NUM_PAGES // 4 : 2] = 3
    prefault = Prefault(cache, lead_bytes=0, free_bytes=lambda: 1 << 40)
    run(prefault, NUM_PAGES // 2)
    assert resident_bytes(cache[: NUM_PAGES // 2]) == NUM_PAGES // 2 * PAGE_BYTES
    assert bool((cache[: NUM_PAGES // 4 : 2] == 3).all())


def test_it_goes_on_where_use_has_come_to() -> None:
    cache = allocate()
    prefault = Prefault(cache, lead_bytes=16 * MIB)
    run(prefault, 0)
    before = resident_bytes(cache)
    run(prefault, 16 * MIB // PAGE_BYTES)
    assert 12 * MIB < resident_bytes(cache) - before < 28 * MIB


def test_what_was_written_stays() -> None:
    cache = allocate()
    cache[:100] = 3
    run(Prefault(cache, lead_bytes=1 << 30, free_bytes=lambda: 1 << 40), 0)
    assert bool((cache[:100] == 3).all())


def test_it_leaves_memory_to_others() -> None:
    free = 100 * MIB
    prefault = Prefault(allocate(), lead_bytes=64 * MIB, free_bytes=lambda: free)
    assert run(prefault, 0) == 0
    free = 128 * MIB
    assert run(prefault, 0) > 0


def test_new_blocks_are_handed_out_in_order() -> None:
    """What the lead is counted from."""
    pool = BlockPool(8, 16)
    first = pool.allocate(3)
    assert pool.num_ever_used == 3
    pool.register(first[0], b"hash")
    pool.release(first)
    pool.allocate(4)
    assert pool.num_ever_used == 5, "two came back, two are new"
    pool.allocate(4)
    assert pool.num_ever_used == 8
