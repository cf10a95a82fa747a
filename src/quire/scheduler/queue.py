"""The waiting queue and the order of requests: first come first served, or by priority."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Literal

from quire.request import Request

SchedulingPolicy = Literal["fcfs", "priority"]
OrderKey = Callable[[Request], tuple[float, ...]]

# Requests with a smaller key are served first; unique, because `sequence` is. A preempted request keeps its key: it
# returns to where it stood, before everything that came later.
ORDER_KEYS: dict[SchedulingPolicy, OrderKey] = {
    "fcfs": lambda request: (request.sequence,),
    "priority": lambda request: (request.priority, request.arrival_time, request.sequence),
}


class WaitingQueue:
    """A heap. `remove` only marks: the entry goes when it surfaces, or when such entries are the majority."""

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._heap: list[tuple[tuple[float, ...], Request]] = []
        self._waiting: set[Request] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """O(log n). A request waits once."""
        assert request not in self._waiting, f"{request.request_id} waits already"
        self._waiting.add(request)
        heapq.heappush(self._heap, (self._key(request), request))

    def peek(self) -> Request | None:
        """The next request, or None."""
        heap = self._heap
        while heap and heap[0][1] not in self._waiting:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Request:
        """Take out the next request: O(log n). The queue is not empty."""
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        self._waiting.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Take out a request that will not come back, wherever it stands: O(1) on average."""
        self._waiting.remove(request)
        if len(self._heap) > 2 * len(self._waiting) + 8:
            self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
            heapq.heapify(self._heap)
