"""Measures how long KV blocks hold their content, for a sample of blocks. The metrics are vLLM's vllm:kv_block_*."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise

from quire.schedule import EvictedBlock

MAX_ACCESSES = 4  # reuse gaps come from this number of last accesses, as in vLLM, so that histograms are comparable


class _Stay:
    """The history of one block since it was handed out. Times are in seconds on the caller's clock."""

    __slots__ = ("accesses", "last_time", "start_time")

    def __init__(self, now: float) -> None:
        self.start_time = self.last_time = now
        self.accesses: deque[float] = deque(maxlen=MAX_ACCESSES)  # when requests found it in the prefix cache


class BlockResidency:
    """Follows a sample of the blocks from one allocation to the next.

    Args:
        sample_rate: the share of allocations that are followed, in (0, 1].
        clock: gives monotonic seconds.
        draw: gives uniform random numbers in [0, 1).
    """

    def __init__(
        self,
        sample_rate: float,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._sample_rate, self._clock, self._draw = sample_rate, clock, draw
        self._stays: dict[int, _Stay] = {}
        self._evicted: list[EvictedBlock] = []

    def on_allocated(self, blocks: Iterable[int]) -> None:
        """Note that these blocks are handed out. Their old content is gone."""
        now = self._clock()
        for block in blocks:
            if (stay := self._stays.pop(block, None)) is not None:
                gaps = [later - earlier for earlier, later in pairwise(stay.accesses)]
                self._evicted.append(EvictedBlock(now - stay.start_time, now - stay.last_time, gaps))
            if self._draw() < self._sample_rate:
                self._stays[block] = _Stay(now)

    def on_accessed(self, blocks: Iterable[int]) -> None:
        """Note that a request uses these blocks: it found them in the prefix cache, or shares them with its parent."""
        now = self._clock()
        for block in blocks:
            if (stay := self._stays.get(block)) is not None:
                stay.last_time = now
                stay.accesses.append(now)

    def forget(self) -> None:
        """Follow no block any more, because the cache was reset. This does not count as an eviction."""
        self._stays.clear()

    def take_evicted(self) -> list[EvictedBlock]:
        """The sampled blocks that were handed out again since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted
