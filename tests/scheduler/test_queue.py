"""WaitingQueue: order, return after preemption, removal from the middle."""

from __future__ import annotations

import random

from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler.queue import ORDER_KEYS, WaitingQueue


def make(sequence: int, priority: int = 0, arrival_time: float = 0.0) -> Request:
    r = Request(f"r{sequence}", [1], SamplingParams(), 1, frozenset())
    r.sequence, r.priority, r.arrival_time = sequence, priority, arrival_time
    return r


def drain(queue: WaitingQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_fcfs_ignores_priority_and_arrival_time() -> None:
    queue = WaitingQueue(ORDER_KEYS["fcfs"])
    for r in (make(0, 5, 9.0), make(1, 0, 3.0), make(2, -1, 1.0)):
        queue.push(r)
    assert drain(queue) == ["r0", "r1", "r2"]
    assert queue.peek() is None


def test_priority_then_arrival_then_sequence() -> None:
    queue = WaitingQueue(ORDER_KEYS["priority"])
    for r in (make(0, 1, 0.0), make(1, 0, 2.0), make(2, 0, 1.0), make(3, 0, 1.0), make(4, -3, 9.0)):
        queue.push(r)
    assert drain(queue) == ["r4", "r2", "r3", "r1", "r0"]


def test_who_returns_stands_where_he_stood() -> None:
    queue = WaitingQueue(ORDER_KEYS["fcfs"])
    requests = [make(i) for i in range(4)]
    for r in requests:
        queue.push(r)
    first, second = queue.pop(), queue.pop()
    queue.push(second)  # preempted, newest first
    queue.push(first)
    assert drain(queue) == ["r0", "r1", "r2", "r3"]


def test_removal_anywhere_and_the_heap_does_not_grow() -> None:
    """10,000 requests come and go behind one that waits."""
    queue, rng, alive = WaitingQueue(ORDER_KEYS["fcfs"]), random.Random(0), {}
    queue.push(make(0))
    for i in range(1, 10_000):
        alive[i] = make(i)
        queue.push(alive[i])
        if len(alive) > 20:
            queue.remove(alive.pop(rng.choice(list(alive))))
    assert len(queue) == len(alive) + 1
    assert len(queue._heap) < 100, "removed requests stay in memory"
    assert drain(queue) == ["r0", *(f"r{i}" for i in sorted(alive))]
