"""The events of recent requests: only times and counts, without prompts and outputs, in bounded memory."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

from quire.outputs import FinishReason, RequestMetrics

MAX_TIMELINES = 512  # 9 KB each at most
# Deltas of one continuation. More deltas are merged in pairs, so a longer request has coarser chunks.
MAX_CHUNKS = 512


class TokenChunks:
    """The times of a continuation's tokens, as (seconds since the arrival, tokens). Appending is cheap."""

    __slots__ = ("_counts", "_pending", "_seconds", "_stride")

    def __init__(self) -> None:
        self._seconds, self._counts = array("d"), array("q")
        self._stride = 1  # deltas per chunk
        self._pending = 0  # deltas in the last chunk

    def add(self, seconds: float, num_tokens: int) -> None:
        """Add a delta. A chunk of several deltas has the time of the last one."""
        if 0 < self._pending < self._stride:
            self._seconds[-1] = seconds
            self._counts[-1] += num_tokens
            self._pending += 1
            return
        if len(self._seconds) == MAX_CHUNKS:
            self._halve()
        self._seconds.append(seconds)
        self._counts.append(num_tokens)
        self._pending = 1

    def _halve(self) -> None:
        self._seconds = self._seconds[1::2]
        self._counts = array("q", [a + b for a, b in zip(self._counts[::2], self._counts[1::2], strict=True)])
        self._stride *= 2

    def __len__(self) -> int:
        return len(self._seconds)

    def items(self) -> list[tuple[float, int]]:
        """(seconds, tokens), in order."""
        return list(zip(self._seconds, self._counts, strict=True))


@dataclass(slots=True)
class ContinuationTimeline:
    """The events of one of the n continuations."""

    chunks: TokenChunks = field(default_factory=TokenChunks)
    finish_reason: FinishReason | None = None
    finished_seconds: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestTimeline:
    """The events of one prompt. Seconds count from `metrics.arrival_time`; `arrived_at` is its Unix time."""

    request_id: str
    arrived_at: float
    queued_seconds: float  # the time when it was sent to the engine
    num_prompt_tokens: int
    metrics: RequestMetrics  # it changes until the request ends
    continuations: list[ContinuationTimeline]


class Timelines:
    """The most recent requests by request id, with running ones. The oldest is forgotten first."""

    def __init__(self, capacity: int = MAX_TIMELINES) -> None:
        self._capacity = capacity
        self._by_id: OrderedDict[str, RequestTimeline] = OrderedDict()

    def open(
        self, request_id: str, metrics: RequestMetrics, num_prompt_tokens: int, n: int, now: float
    ) -> RequestTimeline:
        """Begin a request's timeline. `now` is on the clock of its arrival time."""
        queued = max(now - metrics.arrival_time, 0.0)
        timeline = RequestTimeline(
            request_id,
            time.time() - queued,
            queued,
            num_prompt_tokens,
            metrics,
            [ContinuationTimeline() for _ in range(n)],
        )
        self._by_id[request_id] = timeline
        self._by_id.move_to_end(request_id)
        while len(self._by_id) > self._capacity:
            self._by_id.popitem(last=False)
        return timeline

    def get(self, request_id: str) -> RequestTimeline | None:
        """The timeline of a request; None if it is unknown or forgotten."""
        return self._by_id.get(request_id)

    def __len__(self) -> int:
        return len(self._by_id)
