"""Takes the memory of KV pages that will be handed out soon, while the engine is idle.

Fresh memory costs at its first write: 0.1 to 2 ms for each huge page, in the middle of a step. So it is taken while no
request waits. It takes only a lead over the pages that were ever in use. So a cache that is planned for many requests
does not hold the memory of the machine for a few.
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
MADV_POPULATE_WRITE = 23  # asm-generic/mman-common.h, Linux 5.14: takes pages, and keeps their content


class Prefault:
    """The memory of a KV cache, taken in the order in which its pages are first handed out: ascending.

    From its beginning: a page that was handed out may not have been written yet, and a page that has its memory keeps
    it.

    Args:
        pages: [pages, bytes of a page], contiguous.
        num_owners: ranks; each has one of this many pages.
        lead_bytes: bytes ahead of the pages that were in use.
        free_bytes: the system's free memory; under twice the lead nothing more is taken.
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
        """Take some memory ahead of the first `num_ever_used` pages; False: there is nothing to be done now.

        They are counted over all owners.
        """
        wanted = num_ever_used * self._page_bytes + self._lead_bytes
        if self._taken >= min(self._num_bytes, wanted) or self._free_bytes() < 2 * self._lead_bytes:
            return False
        if not _populate(self._bytes[self._taken : self._taken + PIECE_BYTES]):
            self._num_bytes = 0  # this system cannot do it
            return False
        self._taken += PIECE_BYTES
        return True


def _populate(memory: Tensor) -> bool:
    """Have the system take contiguous memory; False if it cannot."""
    begin = memory.data_ptr() & -mmap.PAGESIZE
    num_bytes = memory.data_ptr() + memory.nbytes - begin
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), MADV_POPULATE_WRITE) == 0:
        return True
    logger.debug("pages of the KV cache are not taken ahead: errno %d", ctypes.get_errno())
    return False
