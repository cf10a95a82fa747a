"""The waiting queue and the order of requests: first come first served, or by priority; and the next turn."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from quire.request import Request
from quire.settings import SchedulingPolicy

Key = tuple[float, ...]
OrderKey = Callable[[Request], Key]
TurnKey = Callable[[Request, int], Key]

# Requests with a smaller key are served first; unique, because `sequence` is. A preempted request keeps its key. It
# returns to its old place, before all requests that came later.
ORDER_KEYS: dict[SchedulingPolicy, OrderKey] = {
    "fcfs": lambda request: (request.sequence,),
    "priority": lambda request: (request.priority, request.arrival_time, request.sequence),
}
# In a step that prompts share, the prompt that lacks the fewest tokens has the first turn, but never before a more
# urgent prompt.
TURN_KEYS: dict[SchedulingPolicy, TurnKey] = {
    "fcfs": lambda request, num_lacking: (num_lacking, request.sequence),
    "priority": lambda request, num_lacking: (request.priority, num_lacking, request.arrival_time, request.sequence),
}


class WaitingQueue:
    """Two heaps of the same requests, by order and by turn.

    `remove` only marks: an entry goes when it surfaces, or when such entries are the majority of a heap.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._order_key, self._turn_key = ORDER_KEYS[policy], TURN_KEYS[policy]
        self._by_order: list[tuple[Key, int, Request]] = []
        self._by_turn: list[tuple[Key, int, Request]] = []
        self._stays: dict[Request, int] = {}  # waiting requests: entries of an earlier stay are void
        self._num_stays = 0

    def __len__(self) -> int:
        return len(self._stays)

    def push(self, request: Request, num_lacking: int) -> None:
        """O(log n). A request waits once. `num_lacking` is how many tokens it will have to compute, as far as known."""
        assert request not in self._stays, f"{request.request_id} waits already"
        self._num_stays += 1
        self._stays[request] = self._num_stays
        heapq.heappush(self._by_order, (self._order_key(request), self._num_stays, request))
        heapq.heappush(self._by_turn, (self._turn_key(request, num_lacking), self._num_stays, request))

    def first_in_order(self) -> tuple[Key, Request] | None:
        """The next request if prompts go in order, with the order's key."""
        return self._first(self._by_order)

    def first_in_turn(self) -> tuple[Key, Request] | None:
        """The next request if prompts share steps, with the turn's key."""
        return self._first(self._by_turn)

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it stands: O(1) on average."""
        del self._stays[request]
        for heap in (self._by_order, self._by_turn):
            if len(heap) > 2 * len(self._stays) + 8:
                heap[:] = [entry for entry in heap if self._is_live(entry)]
                heapq.heapify(heap)

    def _first(self, heap: list[tuple[Key, int, Request]]) -> tuple[Key, Request] | None:
        while heap and not self._is_live(heap[0]):
            heapq.heappop(heap)
        return (heap[0][0], heap[0][2]) if heap else None

    def _is_live(self, entry: tuple[Key, int, Request]) -> bool:
        return self._stays.get(entry[2]) == entry[1]
