"""The waiting queue. It knows two orders: the order of service (fcfs or priority), and the order of turns."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from quire.request import Request
from quire.settings import SchedulingPolicy

Key = tuple[float, ...]
OrderKey = Callable[[Request], Key]
TurnKey = Callable[[Request, int], Key]

# Requests with a smaller key are served first. Keys are unique, because `sequence` is unique. A preempted request keeps
# its key, so it returns to its old place, before all requests that came later.
ORDER_KEYS: dict[SchedulingPolicy, OrderKey] = {
    "fcfs": lambda request: (request.sequence,),
    "priority": lambda request: (request.priority, request.arrival_time, request.sequence),
}
# In a step that several prompts share, the prompt with the fewest tokens to compute has the first turn. But it never
# comes before a prompt of a higher priority.
TURN_KEYS: dict[SchedulingPolicy, TurnKey] = {
    "fcfs": lambda request, num_lacking: (num_lacking, request.sequence),
    "priority": lambda request, num_lacking: (request.priority, num_lacking, request.arrival_time, request.sequence),
}


class WaitingQueue:
    """Two heaps of the same requests: one by the order of service, and one by turn.

    `remove` only marks an entry. The entry is deleted when it comes to the top, or when most entries of the heap are
    marked.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._order_key, self._turn_key = ORDER_KEYS[policy], TURN_KEYS[policy]
        self._by_order: list[tuple[Key, int, Request]] = []
        self._by_turn: list[tuple[Key, int, Request]] = []
        # Waiting request -> the number of its stay, and the tokens that it lacks. Entries of earlier stays are void.
        self._stays: dict[Request, tuple[int, int]] = {}
        self._num_stays = 0
        self.num_lacking = 0  # the tokens that all waiting requests lack, as far as is known

    def __len__(self) -> int:
        return len(self._stays)

    def push(self, request: Request, num_lacking: int) -> None:
        """Add a request that does not wait yet. O(log n).

        Args:
            num_lacking: the number of tokens that it will have to compute, as far as is known.
        """
        assert request not in self._stays, f"{request.request_id} waits already"
        self._num_stays += 1
        self._stays[request] = self._num_stays, num_lacking
        self.num_lacking += num_lacking
        heapq.heappush(self._by_order, (self._order_key(request), self._num_stays, request))
        heapq.heappush(self._by_turn, (self._turn_key(request, num_lacking), self._num_stays, request))

    def first_in_order(self) -> tuple[Key, Request] | None:
        """The first request in the order of service, with its key; None: nobody waits."""
        return self._first(self._by_order)

    def first_in_turn(self) -> tuple[Key, Request] | None:
        """The first request in the order of turns, with its key; None: nobody waits."""
        return self._first(self._by_turn)

    def remove(self, request: Request) -> None:
        """Remove a request, wherever it stands. O(1) on average."""
        self.num_lacking -= self._stays.pop(request)[1]
        for heap in (self._by_order, self._by_turn):
            if len(heap) > 2 * len(self._stays) + 8:
                heap[:] = [entry for entry in heap if self._is_live(entry)]
                heapq.heapify(heap)

    def _first(self, heap: list[tuple[Key, int, Request]]) -> tuple[Key, Request] | None:
        while heap and not self._is_live(heap[0]):
            heapq.heappop(heap)
        return (heap[0][0], heap[0][2]) if heap else None

    def _is_live(self, entry: tuple[Key, int, Request]) -> bool:
        stay = self._stays.get(entry[2])
        return stay is not None and stay[0] == entry[1]
