"""Whole pages of memory while weights are loaded: mapped files, scratch memory outside the heap, and their release.

At any time only a band of rows is in memory both as checkpoint and as packed weight.
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
_THREAD_BAND_BYTES = 4 << 20  # a thread's part of a weight: some panels of the widest rows

# Addresses and sizes of mapped files, with the mappings. The addresses of a mapping that is gone may have a new owner.
_mapped: dict[int, tuple[int, weakref.ref[mmap.mmap]]] = {}
# Several threads may load: adapters beside weights, and ranks that are threads of one process.
_lock = threading.Lock()


def map_file(file: BinaryIO) -> mmap.mmap:
    """A mapping of a whole file, which must not be empty, for read-only tensors. `release` drops their pages."""
    # Private and writable: torch takes the buffer without a warning, and the file cannot be changed through it.
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    with _lock:
        for other in [other for other, (_, owner) in _mapped.items() if owner() is None]:
            del _mapped[other]
        _mapped[address] = (len(mapped), weakref.ref(mapped))
    return mapped


def release(tensor: Tensor) -> None:
    """Give back the pages of a tensor if they belong to a mapped file. A later read takes them from the file."""
    if not (hasattr(mmap, "MADV_DONTNEED") and tensor.device.type == "cpu" and tensor.is_contiguous()):
        return
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    with _lock:
        mappings = list(_mapped.items())
    for address, (size, owner) in mappings:
        if address <= begin and end <= address + size and (mapped := owner()) is not None:
            first, last = _page_floor(begin - address), _page_floor(end - address)
            if first < last:
                mapped.madvise(mmap.MADV_DONTNEED, first, last - first)
            return


def row_bands(weight_NX: Tensor) -> Iterator[Tensor]:
    """The rows of a weight in order, in bands of a multiple of PANEL_WIDTH that keep all threads busy.

    The next band releases the pages of the band before. On a GPU the whole weight is one band.
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
    """A copy that is made in bands; `dtype`: the dtype of the copy."""
    if tensor.dim() < 2:
        return tensor.to(dtype or tensor.dtype, copy=True)
    copy, begin = torch.empty_like(tensor, dtype=dtype), 0
    for band in row_bands(tensor):
        copy[begin : begin + len(band)] = band
        begin += len(band)
    return copy


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
    """An uninitialised tensor for a step between checkpoint and packed weight.

    On CPU it uses earlier scratch memory without a tensor, because fresh pages cost more than writing to them.
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
    """Give back the scratch memory, and the heap's freed memory if the C library can do that (glibc)."""
    with _lock:
        _scratch.clear()
    trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim_heap is not None:
        trim_heap(0)


def _page_floor(offset: int) -> int:
    return offset - offset % mmap.PAGESIZE
