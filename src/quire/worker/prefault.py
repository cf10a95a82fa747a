"""Touches the memory of KV pages that will be handed out soon, while the engine is idle.

The first write to fresh memory is slow: 0.1 to 2 ms for each huge page, in the middle of a step. So this memory is
touched while no request waits. Only a limited number of bytes ahead of the used pages is touched. So a cache that is
planned for many requests does not take the memory of the machine while there are few.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable

from torch import Tensor

from quire.logs import get_logger
from quire.planning import devices

logger = get_logger(__name__)

LEAD_BYTES = 1 << 30
PIECE_BYTES = 2 << 20  # a huge page at a time, so that a request that comes meanwhile waits for at most one
MADV_POPULATE_WRITE = 23  # asm-generic/mman-common.h, Linux 5.14: provides pages, and keeps their content


class Prefault:
    """Provides the memory of a KV cache in the order in which its pages are first handed out: ascending.

    It begins with the first page, because a page that was handed out may not have been written yet. A page that has its
    memory keeps it.

    Args:
        pages: uint8 [pages, bytes of a page], contiguous.
        num_owners: the number of ranks that share the cache. Each has one page in every `num_owners` pages.
        lead_bytes: the bytes to provide ahead of the pages that were in use.
        free_bytes: gives the free memory of the system. If it is below twice the lead, nothing more is provided.
    """

    def __init__(
        self,
        pages: Tensor,
        num_owners: int = 1,
        lead_bytes: int = LEAD_BYTES,
        free_bytes: Callable[[], int] = devices.free_memory_bytes,
    ) -> None:
        self._bytes, self._page_bytes = pages.view(-1), pages.shape[1] // num_owners
        self._num_bytes = pages.nbytes if pages.device.type == "cpu" and sys.platform == "linux" else 0
        self._lead_bytes, self._free_bytes = lead_bytes, free_bytes
        self._taken = 0  # bytes

    def step(self, num_ever_used: int) -> bool:
        """Provide some memory. False: there is nothing to do now.

        Args:
            num_ever_used: the number of pages that were ever in use, counted over all owners. They are the first pages.
        """
        wanted = num_ever_used * self._page_bytes + self._lead_bytes
        if self._taken >= min(self._num_bytes, wanted) or self._free_bytes() < 2 * self._lead_bytes:
            return False
        if not _populate(self._bytes[self._taken : self._taken + PIECE_BYTES]):
            self._num_bytes = 0  # the system cannot do it, so nothing is left to do
            return False
        self._taken += PIECE_BYTES
        return True


def _populate(memory: Tensor) -> bool:
    """Let the system provide the pages of contiguous memory; False if it cannot."""
    begin = memory.data_ptr() & -mmap.PAGESIZE
    num_bytes = memory.data_ptr() + memory.nbytes - begin
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), MADV_POPULATE_WRITE) == 0:
        return True
    logger.debug("pages of the KV cache are not taken ahead: errno %d", ctypes.get_errno())
    return False
