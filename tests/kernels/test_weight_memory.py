"""Packed weights lie one after the other in large regions, which are given back with the last weight in them."""

from __future__ import annotations

import gc

import pytest
import torch

from quire.kernels import cpu, weight_memory
from quire.kernels.weight_memory import ALIGNMENT, WeightMemory


@pytest.fixture
def advised() -> list[tuple[int, int]]:
    return []


@pytest.fixture
def memory(advised: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> WeightMemory:
    monkeypatch.setattr(weight_memory, "REGION_BYTES", 1 << 20)
    monkeypatch.setattr(cpu, "advise_huge_pages", lambda region: advised.append((region.data_ptr(), region.nbytes)))
    return WeightMemory()


def test_weights_follow_each_other(memory: WeightMemory, advised: list[tuple[int, int]]) -> None:
    first, second, third = memory.empty(100), memory.empty(ALIGNMENT), memory.empty(1)
    assert first.dtype == torch.uint8
    assert first.shape == (100,)
    assert first.untyped_storage().nbytes() == 100, "a weight's storage is its own bytes, and not the region's"
    assert first.data_ptr() % ALIGNMENT == 0
    assert (second.data_ptr() - first.data_ptr(), third.data_ptr() - second.data_ptr()) == (2 * ALIGNMENT, ALIGNMENT)
    [(address, num_bytes)] = advised
    assert address <= first.data_ptr()
    assert third.data_ptr() < address + num_bytes


def test_what_does_not_fit_gets_a_region(memory: WeightMemory, advised: list[tuple[int, int]]) -> None:
    kept = [memory.empty(1 << 19) for _ in range(3)] + [memory.empty(3 << 20)]
    assert len(advised) == 3
    for number, tensor in enumerate(kept):
        tensor.fill_(number)
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        assert any(address <= begin and end <= address + num_bytes for address, num_bytes in advised)
    assert all((tensor == number).all() for number, tensor in enumerate(kept)), "two weights overlap"


def test_the_longest_weights(memory: WeightMemory) -> None:
    assert memory.longest() is None
    first, second = memory.empty(1 << 19), memory.empty(100)
    third = memory.empty(1 << 20)
    for number, tensor in enumerate((first, second, third)):
        tensor.fill_(number)
    longest = memory.longest()
    assert longest is not None
    assert longest.data_ptr() == third.data_ptr()
    assert (longest == 2).all()
    assert longest.nbytes == 1 << 20
    del longest, third, tensor
    gc.collect()
    longest = memory.longest()
    assert longest is not None
    assert longest.data_ptr() == first.data_ptr()
    assert longest.nbytes == (1 << 19) + 2 * ALIGNMENT, "the room behind the last weight is left out"


def test_a_region_goes_with_its_last_weight(memory: WeightMemory, advised: list[tuple[int, int]]) -> None:
    first, second = memory.empty(10), memory.empty(10)
    view = first[2:4]
    del first, second
    gc.collect()
    assert memory.empty(10).data_ptr() - view.data_ptr() == 2 * ALIGNMENT - 2
    assert len(advised) == 1
    del view
    gc.collect()
    memory.empty(10)
    assert len(advised) == 2
