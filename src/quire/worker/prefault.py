"""Takes the pages of KV blocks that will be handed out soon, while there is nothing else to do.

Fresh memory costs at its first write: 0.1 to 2 ms for each huge page, in the middle of a step. The system gives it to
whoever asks when nobody waits. Only a lead over the blocks that were ever in use is taken, so that a cache planned for
many requests does not hold the memory of the machine for a few.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence

from torch import Tensor

from quire.cost import devices
from quire.forward_batch import LayerCache
from quire.logs import get_logger

logger = get_logger(__name__)

LEAD_BYTES = 1 << 30
PIECE_BYTES = 2 << 20  # at once: a huge page, so that a request that comes meanwhile waits for one at most
MADV_POPULATE_WRITE = 23  # asm-generic/mman-common.h, Linux 5.14: takes pages, leaves what is in them


class Prefault:
    """The pages of a KV cache, taken in the order in which blocks are first handed out: ascending.

    Args:
        lead_bytes: how far ahead of the blocks that were in use.
        free_bytes: what the system has left; under twice the lead nothing more is taken.
    """

    def __init__(
        self,
        caches: Sequence[LayerCache],
        lead_bytes: int = LEAD_BYTES,
        free_bytes: Callable[[], int] = devices.free_memory_bytes,
    ) -> None:
        self._tensors = [tensor for cache in caches for tensor in cache.tensors() if tensor.device.type == "cpu"]
        self._num_blocks = len(self._tensors[0]) if self._tensors and sys.platform == "linux" else 0
        block_bytes = sum(tensor[0].nbytes for tensor in self._tensors) if self._num_blocks else 1
        self._lead = lead_bytes // block_bytes
        self._piece = max(1, PIECE_BYTES // max((tensor[0].nbytes for tensor in self._tensors), default=1))
        self._least_free, self._free_bytes = 2 * lead_bytes, free_bytes
        self._block, self._next_tensor = 0, 0

    def step(self, num_ever_used: int) -> bool:
        """Take some pages ahead of the first `num_ever_used` blocks; False: there is nothing to be done now."""
        if self._next_tensor == 0:
            self._block = max(self._block, num_ever_used)
            if self._block >= min(self._num_blocks, num_ever_used + self._lead):
                return False
            if self._free_bytes() < self._least_free:
                return False
        tensor = self._tensors[self._next_tensor]
        if not _populate(tensor[self._block : self._block + self._piece]):
            self._num_blocks = 0  # not on this system
            return False
        self._next_tensor += 1
        if self._next_tensor == len(self._tensors):
            self._block, self._next_tensor = self._block + self._piece, 0
        return True


def _populate(blocks: Tensor) -> bool:
    """Take the pages of contiguous memory; False if the system cannot."""
    begin = blocks.data_ptr() & -mmap.PAGESIZE
    num_bytes = blocks.data_ptr() + blocks.nbytes - begin
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), MADV_POPULATE_WRITE) == 0:
        return True
    logger.debug("pages of the KV cache are not taken ahead: errno %d", ctypes.get_errno())
    return False
