"""Handles whole pages of memory while weights are loaded: mapped files, and scratch memory outside the heap.

Pages are released band by band. So at any time, only a band of rows is in memory twice: from the checkpoint and packed.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from quire.formats.weight_format import PANEL_WIDTH
from quire.kernels import cpu
from quire.kernels.memory_piece import MemoryPiece
from quire.kernels.weight_memory import map_huge_pages

_CPU = torch.device("cpu")
_THREAD_BAND_BYTES = 4 << 20  # the part of a band for one thread: some panels of the widest rows

# Address -> size and mapping of a mapped file. If a mapping is gone, its addresses may have a new owner.
_mapped: dict[int, tuple[int, weakref.ref[mmap.mmap]]] = {}
# Several threads may load at the same time: adapters beside weights, and ranks that are threads of one process.
_lock = threading.Lock()


def map_file(file: BinaryIO) -> mmap.mmap:
    """Map a whole file, for read-only tensors. The file must not be empty. `release` drops the tensors' pages."""
    # The mapping is private and writable: torch takes it without a warning, and the file cannot change through it.
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    with _lock:
        for other in [other for other, (_, owner) in _mapped.items() if owner() is None]:
            del _mapped[other]
        _mapped[address] = (len(mapped), weakref.ref(mapped))
    return mapped


def release(tensor: Tensor) -> None:
    """Give the pages of a tensor back if they belong to a mapped file. A later read takes them from the file again."""
    if not (hasattr(mmap, "MADV_DONTNEED") and tensor.device.type == "cpu" and tensor.is_contiguous()):
        return
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    with _lock:
        mappings = list(_mapped.items())
    for address, (size, owner) in mappings:
        if address <= begin and end <= address + size and (mapped := owner()) is not None:
            first, last = page_floor(begin - address), page_floor(end - address)
            if first < last:
                mapped.madvise(mmap.MADV_DONTNEED, first, last - first)
            return


def row_bands(weight_NX: Tensor) -> Iterator[Tensor]:
    """The rows of a weight, in bands that keep all threads busy. A band has a multiple of PANEL_WIDTH rows.

    When the next band comes, the pages of the band before are released. On a GPU, the whole weight is one band.
    """
    if weight_NX.device.type != "cpu":
        yield weight_NX
        return
    panel_bytes = max(math.prod(weight_NX.shape[1:]) * weight_NX.dtype.itemsize, 1) * PANEL_WIDTH
    num_panels = max(_THREAD_BAND_BYTES * cpu.get_num_threads() // panel_bytes, 1)
    for band in torch.split(weight_NX, num_panels * PANEL_WIDTH):
        yield band
        release(band)


def copied(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of a tensor, made in bands. `dtype`: the dtype of the copy; None: the tensor's."""
    if tensor.dim() < 2:
        return tensor.to(dtype or tensor.dtype, copy=True)
    copy, begin = torch.empty_like(tensor, dtype=dtype), 0
    for band in row_bands(tensor):
        copy[begin : begin + len(band)] = band
        begin += len(band)
    return copy


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
    """An uninitialised tensor, for a step between the checkpoint and the packed weight.

    On a CPU it uses earlier scratch memory whose tensor is gone. Fresh pages cost more time than writing to them.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    with _lock:
        free = [piece for piece in _scratch if piece.is_free]
        piece = next((piece for piece in free if len(piece) >= num_bytes), None)
        if piece is None:
            if free:
                _scratch.remove(free[0])  # too small
            mapped, begin = map_huge_pages(num_bytes)
            piece = MemoryPiece(np.frombuffer(mapped, dtype=np.uint8, count=num_bytes, offset=begin))
            _scratch.append(piece)
        return piece.take(num_bytes).view(dtype).view(shape)


_scratch: list[MemoryPiece] = []


def trim() -> None:
    """Give the scratch memory back to the system, and also the freed memory of the heap if the C library is glibc."""
    with _lock:
        _scratch.clear()
    trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim_heap is not None:
        trim_heap(0)


def page_floor(offset: int) -> int:
    """The largest multiple of the page size that is at most `offset`, in bytes."""
    return offset - offset % mmap.PAGESIZE
