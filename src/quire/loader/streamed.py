"""Tensors of an object in an object store: read straight into memory, pieces ahead, and never written to a disk."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from quire.loader.object_store import StoredObject, read_ahead
from quire.loader.safetensors_headers import TensorEntry


def stream_tensors(source: StoredObject, entries: Sequence[TensorEntry]) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """Yield (entry, tensor with memory of its own) in the order of the entries, which is that of their places.

    Beside the tensors that the caller keeps, the pieces that are read ahead are in memory. Raises like `read_ahead`.
    """
    pieces = read_ahead(source, _spans(entries))
    rest = np.empty(0, dtype=np.uint8)
    for entry in entries:
        # Not from the heap, which would keep the memory of tensors that are gone.
        memory = mmap.mmap(-1, max(entry.end - entry.begin, 1))
        data, filled = np.frombuffer(memory, dtype=np.uint8, count=entry.end - entry.begin), 0
        while filled < len(data):
            if not len(rest):
                rest = next(pieces)
            count = min(len(rest), len(data) - filled)
            data[filled : filled + count] = rest[:count]
            rest, filled = rest[count:], filled + count
        dtype: torch.dtype = getattr(torch, entry.dtype)
        tensor = (
            torch.frombuffer(memory, dtype=dtype).view(entry.shape)
            if len(data)
            else torch.empty(entry.shape, dtype=dtype)
        )
        del data, memory
        yield entry, tensor
        del tensor


def _spans(entries: Sequence[TensorEntry]) -> Iterator[tuple[int, int]]:
    """The places of the entries, neighbours together."""
    begin = end = 0
    for entry in entries:
        if entry.begin != end:
            if begin < end:
                yield begin, end
            begin = entry.begin
        end = entry.end
    if begin < end:
        yield begin, end
