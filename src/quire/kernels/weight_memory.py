"""Memory for packed weights: one after the other in large regions of huge pages.

A weight on its own is rarely a whole number of huge pages, and of a small one no page is. Reading them in small pages
costs the more the fewer rows share a weight: products of a 0.6B model on 1, 8 and 32 rows were 1.10, 1.09 and 1.03
times as fast with this in bfloat16, 1.06, 1.07 and 1.06 in 4 bits (benchmarks/NOTES.md, Zen 5).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

REGION_BYTES = 256 << 20  # of addresses: memory is taken as it is written
ALIGNMENT = 64


class WeightMemory:
    """Hands out memory of regions; a region is given back when the last tensor in it is gone.

    Args:
        advise: told of a new region, uint8, before it is written.
    """

    def __init__(self, advise: Callable[[Tensor], None]) -> None:
        self._advise = advise
        self._lock = threading.Lock()
        self._region: weakref.ref[np.ndarray] | None = None
        self._used = 0

    def empty(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], not initialised, at a multiple of 64 bytes."""
        with self._lock:
            region = self._region() if self._region is not None else None
            if region is None or self._used + num_bytes > len(region):
                region = np.empty(max(num_bytes, REGION_BYTES) + ALIGNMENT, dtype=np.uint8)
                self._advise(torch.from_numpy(region))
                self._region, self._used = weakref.ref(region), -region.ctypes.data % ALIGNMENT
            piece = region[self._used : self._used + num_bytes]  # keeps the region
            self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            return torch.from_numpy(piece)
