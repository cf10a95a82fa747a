"""Tensors of an object in an object store: read straight into their memory, and never written to a disk."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch

from quire.kernels.memory_piece import MemoryPiece
from quire.kernels.weight_memory import map_huge_pages
from quire.layers.weight_slot import ExtentOf
from quire.loader.extents import all_of, ranges_read
from quire.loader.object_store import NUM_READERS, Bytes, StoredObject, fill_ahead, piece_bytes
from quire.loader.safetensors_headers import TensorEntry

REQUEST_BYTES = 1 << 20  # a request for a piece of a tensor is worth this many bytes
HEAP_BYTES = 1 << 20  # the largest tensor in the heap: the heap would keep the memory of larger ones
REUSE = 1.25  # the share of the bytes in memory that is memory used again
# A tensor may get the memory of an earlier tensor of its size. At most this many times the bytes that are read ahead
# lie between them.
NEAR = 4

_Found: TypeAlias = tuple[TensorEntry, torch.Tensor]


def stream_tensors(
    source: StoredObject, entries: Sequence[TensorEntry], extent_of: ExtentOf = all_of
) -> Iterator[_Found]:
    """Yield (entry, tensor) in the order of the entries, which are in the order of their places.

    Only the parts in `extent_of` are read. The other bytes of a tensor are not defined.

    A request has neighbours, or a part of a large tensor. Beside the tensors that the caller keeps, memory holds the
    bytes read ahead, tensors that are packed together, and a quarter of both. Raises like `fill_ahead`.
    """
    piece = piece_bytes(source.size)
    ahead = NUM_READERS * piece
    sizes = _recurring_sizes(entries, NEAR * ahead)
    memory = _Memory(int(REUSE * (ahead + 2 * max(sizes, default=0))), sizes)
    for found in fill_ahead(source, _parts(entries, extent_of, piece, memory)):
        while found:
            yield found.pop(0)


def _recurring_sizes(entries: Sequence[TensorEntry], near: int) -> set[int]:
    """The sizes of tensors after which another tensor of the same size comes soon.

    Tensors of layers have such sizes, and embeddings have not.
    """
    found: set[int] = set()
    last: dict[int, int] = {}
    for entry in entries:
        size = entry.end - entry.begin
        if entry.begin - last.get(size, -near - 1) <= near:
            found.add(size)
        last[size] = entry.begin
    return found


def _parts(
    entries: Sequence[TensorEntry], extent_of: ExtentOf, piece: int, memory: _Memory
) -> Iterator[tuple[int, list[Bytes], list[_Found]]]:
    """The requests, of at most `piece` bytes each: (place, memory of the bytes, tensors that are whole then)."""
    begin = end = 0
    buffers: list[Bytes] = []
    whole: list[_Found] = []
    for entry in entries:
        tensor = memory.take(entry.end - entry.begin)
        for part in ranges_read(entry, extent_of(entry.name), REQUEST_BYTES):
            if part.start != end and (buffers or whole):
                yield begin, buffers, whole
                buffers, whole = [], []
            free, end = tensor.numpy()[part.start - entry.begin : part.stop - entry.begin], part.start
            while len(free):
                if buffers and end - begin == piece:
                    yield begin, buffers, whole
                    buffers, whole = [], []
                begin = begin if buffers else end
                count = min(len(free), piece - (end - begin))
                buffers.append(free[:count])
                free, end = free[count:], end + count
            del free
        whole.append((entry, tensor.view(getattr(torch, entry.dtype)).view(entry.shape)))
        del tensor
    if whole:
        yield begin, buffers, whole


class _Memory:
    """Memory for tensors. The memory of tensors that are gone is used again, because new pages cost more than writing
    to them.

    Args:
        num_bytes: the memory that is kept. More is given back when its tensor is gone.
        sizes: the sizes of tensors whose memory is remembered.
    """

    def __init__(self, num_bytes: int, sizes: Collection[int]) -> None:
        self._num_bytes, self._sizes = num_bytes, sizes
        self._pieces: list[MemoryPiece] = []  # the oldest first

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], not initialised."""
        if num_bytes < HEAP_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes not in self._sizes:
            return MemoryPiece(_pages(num_bytes)).take(num_bytes)
        piece = next((each for each in self._pieces if len(each) == num_bytes and each.is_free), None)
        if piece is None:
            piece = MemoryPiece(_pages(num_bytes))
            self._pieces.append(piece)
            while sum(map(len, self._pieces)) > self._num_bytes:
                free = (at for at, each in enumerate(self._pieces[:-1]) if each.is_free)
                del self._pieces[next(free, 0)]
        return piece.take(num_bytes)


def _pages(num_bytes: int) -> Bytes:
    """Memory in huge pages. With small new pages, the rate is a seventh lower (benchmarks/NOTES.md)."""
    mapped, begin = map_huge_pages(num_bytes)
    return np.frombuffer(mapped, dtype=np.uint8, count=num_bytes, offset=begin)
