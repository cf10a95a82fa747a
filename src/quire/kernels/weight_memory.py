"""Memory for packed weights. They lie one after the other in large regions of huge pages.

A single weight rarely fills whole huge pages, and a small one fills none. Small pages cost time, above all if few rows
use a weight. With this file, products of a 0.6B model on 1, 8 and 32 rows were 1.10, 1.09 and 1.03 times as fast in
bfloat16, and 1.06, 1.07 and 1.06 times as fast in 4 bits (benchmarks/NOTES.md, Zen 5).
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from quire.kernels import cpu

REGION_BYTES = 256 << 20  # a region only takes addresses; memory is taken when it is written
HUGE_PAGE = 2 << 20
MAP_NORESERVE = 0x4000  # from <asm-generic/mman.h>; Python before 3.13 has no name for it
ALIGNMENT = 64


Band = TypeVar("Band")


def map_huge_pages(num_bytes: int, *, is_reserved: bool = True) -> tuple[mmap.mmap, int]:
    """Map memory outside the heap. Returns the mapping, and the offset of its first huge page.

    Args:
        num_bytes: this number of bytes fits after that offset.
        is_reserved: True: the system may refuse memory that is not free now. False: only written pages count.

    Raises OSError or OverflowError if the system refuses the memory.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if is_reserved else MAP_NORESERVE)
    mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=flags)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    cpu.advise_huge_pages(whole)
    return mapped, -whole.data_ptr() % HUGE_PAGE


@dataclass
class _Region:
    """A mapping, and offsets in it: of the first weight, behind the last one, and the end."""

    mapped: weakref.ref[mmap.mmap]
    begin: int
    next: int
    end: int


class WeightMemory:
    """Hands out memory from regions. A region is given back to the system when its last tensor is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: list[_Region] = []  # the newest, which still has room, comes last

    def empty(self, num_bytes: int) -> Tensor:
        """A tensor uint8 [num_bytes], not initialised, at a multiple of 64 bytes. num_bytes is at least 1."""
        with self._lock:
            region = self._regions[-1] if self._regions else None
            mapped = None if region is None else region.mapped()
            if region is None or mapped is None or region.next + num_bytes > region.end:
                size = max(num_bytes, REGION_BYTES)
                mapped, begin = map_huge_pages(size)
                region = _Region(weakref.ref(mapped), begin, begin, begin + size)
                self._regions = [each for each in self._regions if each.mapped() is not None] + [region]
            piece = torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=region.next)  # keeps the region
            region.next += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            return piece

    def longest(self) -> Tensor | None:
        """The weights of the region with the most bytes of them, uint8 [n]; None: no region is held."""
        with self._lock:
            held = [(mapped, each) for each in self._regions if (mapped := each.mapped()) is not None]
            if not held:
                return None
            mapped, region = max(held, key=lambda pair: pair[1].next - pair[1].begin)
            return torch.frombuffer(mapped, dtype=torch.uint8, count=region.next - region.begin, offset=region.begin)


Memory = Callable[[int], Tensor]  # the memory for a packed weight of a number of bytes, like WeightMemory.empty
OF_PROCESS = WeightMemory()
WEIGHTS: Memory = OF_PROCESS.empty


def filled(
    num_bytes: int,
    bands: Iterable[Band],
    bytes_of: Callable[[Band], int],
    pack: Callable[[Band, Tensor], None],
    memory: Memory,
) -> Tensor:
    """Pack a weight for the compiled kernels, band after band.

    A band is dropped before the next one is made, because the next one may use its memory.

    Args:
        num_bytes: the size of the whole packed weight.
        bands: the bands of rows of the weight.
        bytes_of: gives the size of a packed band.
        pack: writes a band to memory of that size.
        memory: provides the memory for the whole weight.

    Raises ValueError if the sizes of the bands do not add up to num_bytes.
    """
    data, begin = memory(num_bytes), 0
    bands = iter(bands)
    band = next(bands, None)
    while band is not None:
        end = begin + bytes_of(band)
        if end > num_bytes:
            raise ValueError(f"the bands take {end} bytes or more, expected the {num_bytes} of the whole weight")
        pack(band, data[begin:end])
        begin, band = end, None
        band = next(bands, None)
    if begin < num_bytes:
        raise ValueError(f"the bands take {begin} bytes, expected the {num_bytes} of the whole weight")
    return data
