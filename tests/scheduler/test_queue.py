"""WaitingQueue: order, return after preemption, removal from the middle."""

from __future__ import annotations

import random

from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler.queue import WaitingQueue


def make(sequence: int, priority: int = 0, arrival_time: float = 0.0) -> Request:
    r = Request(f"r{sequence}", [1], SamplingParams(), 1, frozenset())
    r.sequence, r.priority, r.arrival_time = sequence, priority, arrival_time
    return r


def drain(queue: WaitingQueue) -> list[str]:
    return [pop(queue).request_id for _ in range(len(queue))]


def pop(queue: WaitingQueue) -> Request:
    entry = queue.first_in_order()
    assert entry is not None
    queue.remove(entry[1])
    return entry[1]


def turns(queue: WaitingQueue) -> list[str]:
    names = []
    while (entry := queue.first_in_turn()) is not None:
        names.append(entry[1].request_id)
        queue.remove(entry[1])
    return names


def test_fcfs_ignores_priority_and_arrival_time() -> None:
    queue = WaitingQueue("fcfs")
    for r in (make(0, 5, 9.0), make(1, 0, 3.0), make(2, -1, 1.0)):
        queue.push(r, 1)
    assert drain(queue) == ["r0", "r1", "r2"]
    assert queue.first_in_order() is None


def test_priority_then_arrival_then_sequence() -> None:
    queue = WaitingQueue("priority")
    for r in (make(0, 1, 0.0), make(1, 0, 2.0), make(2, 0, 1.0), make(3, 0, 1.0), make(4, -3, 9.0)):
        queue.push(r, 1)
    assert drain(queue) == ["r4", "r2", "r3", "r1", "r0"]


def test_who_returns_stands_where_he_stood() -> None:
    queue = WaitingQueue("fcfs")
    requests = [make(i) for i in range(4)]
    for r in requests:
        queue.push(r, 1)
    first, second = pop(queue), pop(queue)
    queue.push(second, 1)  # preempted, newest first
    queue.push(first, 1)
    assert drain(queue) == ["r0", "r1", "r2", "r3"]


def test_removal_anywhere_and_the_heap_does_not_grow() -> None:
    """10,000 requests come and go behind one that waits."""
    queue, rng, alive = WaitingQueue("fcfs"), random.Random(0), {}
    queue.push(make(0), 1)
    for i in range(1, 10_000):
        alive[i] = make(i)
        queue.push(alive[i], 1)
        if len(alive) > 20:
            queue.remove(alive.pop(rng.choice(list(alive))))
    assert len(queue) == len(alive) + 1
    assert max(len(queue._by_order), len(queue._by_turn)) < 100, "removed requests stay in memory"
    assert drain(queue) == ["r0", *(f"r{i}" for i in sorted(alive))]


def test_the_shortest_has_the_first_turn_and_priority_comes_before_length() -> None:
    lengths = [(0, 5), (0, 2), (-1, 9), (0, 2)]
    for policy, order in (("fcfs", ["r1", "r3", "r0", "r2"]), ("priority", ["r2", "r1", "r3", "r0"])):
        queue = WaitingQueue(policy)  # type: ignore[arg-type]
        for i, (priority, length) in enumerate(lengths):
            queue.push(make(i, priority), length)
        assert turns(queue) == order


def test_who_returns_with_another_length_has_one_turn() -> None:
    """The entry of the first stay, which was not looked at since, is void."""
    queue, returning = WaitingQueue("fcfs"), make(0)
    queue.push(returning, 1)
    queue.push(make(1), 5)
    assert pop(queue) is returning
    queue.push(returning, 9)
    assert turns(queue) == ["r1", "r0"]
