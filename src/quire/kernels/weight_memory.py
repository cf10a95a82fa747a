"""Memory for packed weights: one after the other in large regions of huge pages.

A weight on its own is rarely a whole number of huge pages, and of a small one no page is. Reading them in small pages
costs the more the fewer rows share a weight: products of a 0.6B model on 1, 8 and 32 rows were 1.10, 1.09 and 1.03
times as fast with this in bfloat16, 1.06, 1.07 and 1.06 in 4 bits (benchmarks/NOTES.md, Zen 5).
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels import cpu

REGION_BYTES = 256 << 20  # of addresses: memory is taken as it is written
HUGE_PAGE = 2 << 20
ALIGNMENT = 64


class WeightMemory:
    """Hands out memory of regions; a region is given back when the last tensor in it is gone.

    Args:
        advise: told of a new region, uint8, before it is written.
    """

    def __init__(self, advise: Callable[[Tensor], None]) -> None:
        self._advise = advise
        self._lock = threading.Lock()
        self._region: weakref.ref[mmap.mmap] | None = None
        self._next = self._end = 0  # in the region

    def empty(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], one or more, not initialised, at a multiple of 64 bytes."""
        with self._lock:
            region = self._region() if self._region is not None else None
            if region is None or self._next + num_bytes > self._end:
                size = max(num_bytes, REGION_BYTES)
                region = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                whole = torch.frombuffer(region, dtype=torch.uint8)
                self._advise(whole)
                self._region, self._next = weakref.ref(region), -whole.data_ptr() % HUGE_PAGE
                self._end = self._next + size
            piece = torch.frombuffer(region, dtype=torch.uint8, count=num_bytes, offset=self._next)  # keeps the region
            self._next += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            return piece


_weights = WeightMemory(cpu.advise_huge_pages)


def empty(num_bytes: int) -> Tensor:
    """Memory for a weight that the compiled kernels read, see WeightMemory."""
    return _weights.empty(num_bytes)
