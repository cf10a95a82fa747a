"""Tensors of a stored object: the size of requests, the distance read ahead, and the memory that tensors get."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from quire.loader import object_store, streamed
from quire.loader.object_store import NUM_READERS, Bytes, StoredObject
from quire.loader.safetensors_headers import TensorEntry
from quire.loader.streamed import stream_tensors

PIECE = 1000


class Known(StoredObject):
    """An object in this process. `asked` has the places (begin, end) of requests."""

    asked: list[tuple[int, int]]

    @classmethod
    def of(cls, data: bytes) -> Known:
        known = cls("s3://models/known", "model.safetensors", len(data), None)
        known.__dict__.update(data=np.frombuffer(data, dtype=np.uint8), asked=[])
        return known

    def signed_url(self, seconds: float) -> str:
        raise NotImplementedError

    def fill(self, buffers: Sequence[Bytes], begin: int) -> None:
        if buffers:
            self.asked.append((begin, begin + sum(map(len, buffers))))
        for each in buffers:
            each[:] = self.__dict__["data"][begin : begin + len(each)]
            begin += len(each)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(streamed, "HEAP_BYTES", 100)


def entries_of(sizes: Sequence[int], gaps: Sequence[int] = ()) -> list[TensorEntry]:
    """Tensors of bytes, each after its gap."""
    found, end = [], 0
    for at, size in enumerate(sizes):
        begin = end + (gaps[at] if gaps else 0)
        end = begin + size
        found.append(TensorEntry(str(at), "uint8", (size,), begin, end))
    return found


def test_any_sizes_and_gaps() -> None:
    chosen = random.Random(0)
    for _ in range(200):
        sizes = [chosen.choice([0, 1, 99, 100, 999, PIECE, 1001, 3500]) for _ in range(chosen.randrange(1, 12))]
        gaps = [chosen.choice([0, 0, 1, 700]) for _ in sizes]
        entries = entries_of(sizes, gaps)
        known = Known.of(chosen.randbytes(entries[-1].end + 10))
        found = list(stream_tensors(known, entries))
        assert [entry for entry, _ in found] == entries
        for entry, tensor in found:
            assert np.array_equal(tensor.numpy(), known.__dict__["data"][entry.begin : entry.end]), (sizes, gaps)
        assert sum(end - begin for begin, end in known.asked) == sum(sizes), "no byte of a gap, none twice"
        assert all(end - begin <= PIECE for begin, end in known.asked)


def test_neighbours_share_a_request() -> None:
    known = Known.of(bytes(10_300))
    list(stream_tensors(known, entries_of([10] * 30 + [5000] * 2)))
    assert sorted(known.asked) == [(begin, min(begin + PIECE, 10_300)) for begin in range(0, 10_300, PIECE)]


def test_little_is_asked_for_ahead() -> None:
    known = Known.of(bytes(100_000))
    for entry, _ in stream_tensors(known, entries_of([100, 5000, 300] * 18)):
        assert max(end for _, end in known.asked) <= entry.end + (NUM_READERS + 1) * PIECE


def test_memory_of_tensors_that_are_gone_is_used_again() -> None:
    places = {tensor.data_ptr() for _, tensor in stream_tensors(Known.of(bytes(200_000)), entries_of([2000] * 100))}
    assert len(places) <= NUM_READERS + 3  # of tensors that are read ahead or still held, and of the one before


def held(tensors: Iterator[tuple[TensorEntry, torch.Tensor]], every: int) -> dict[int, torch.Tensor]:
    """Some of the tensors, whole or a part of them."""
    return {entry.begin: tensor[1500:] for at, (entry, tensor) in enumerate(tensors) if not at % every}


@pytest.mark.parametrize("every", [1, 3])
def test_tensors_that_are_kept_are_not_overwritten(every: int) -> None:
    known = Known.of(random.Random(1).randbytes(200_000))
    for begin, tensor in held(stream_tensors(known, entries_of([2000] * 100)), every).items():
        assert np.array_equal(tensor.numpy(), known.__dict__["data"][begin + 1500 : begin + 2000])


def test_memory_of_large_tensors_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of some models is larger than what is read ahead."""
    new: list[int] = []
    pages = streamed._pages

    def counted(num_bytes: int) -> Bytes:
        new.append(num_bytes)
        return pages(num_bytes)

    monkeypatch.setattr(streamed, "_pages", counted)
    sizes = [9000, 9000, 9000, 3000, 3000] * 8
    for _ in stream_tensors(Known.of(bytes(sum(sizes))), entries_of(sizes)):
        pass
    assert len(new) <= 10


def test_only_sizes_that_come_again_soon_are_remembered() -> None:
    entries = entries_of([500_000, 500_000, 2000, 700, 2000, 700, 90_000, 2000])
    assert streamed._recurring_sizes(entries, 50_000) == {2000, 700}


def test_little_memory_is_remembered() -> None:
    memory = streamed._Memory(10_000, {2000, 2500, 2400})
    tensors = [memory.take(size) for size in (2000, 2500, 2600, 2400) * 5]
    assert sum(map(len, memory._pieces)) <= 10_000
    assert 2600 not in map(len, memory._pieces), "a large one comes rarely"
    del tensors
    assert len({memory.take(2400).data_ptr() for _ in range(3)}) == 1, "gone at once"
