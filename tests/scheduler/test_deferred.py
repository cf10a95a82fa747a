"""Continuations that wait for the prompt they share: not among those that wait for room, and what they share counts."""

from __future__ import annotations

from quire.messages import AddRequest
from quire.sampling_params import SamplingParams
from tests.scheduler.driver import Driver


def test_continuations_wait_for_their_prompt_not_for_room() -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=4)
    driver = Driver(long_prefill_token_threshold=8, max_num_batched_tokens=64)
    prompt = list(range(1, 20))  # three chunks
    waits = []

    def look(index: int) -> None:
        record = driver.core.last_record
        if record is not None:
            waits.append((record.num_waiting, record.num_deferred))

    for i, name in enumerate(("parent", "fork1", "fork2")):
        driver.add(AddRequest(name, prompt, params.continuation(i), 4, fork_of="parent" if i else None))
    driver.run(look)
    assert waits[:2] == [(2, 2), (2, 2)], "the others wait while the first one computes the prompt"
    assert waits[-1] == (0, 0)
    assert [driver.deltas[name][0].num_cached_tokens for name in ("parent", "fork1", "fork2")] == [0, 18, 18]


def test_requests_without_room_are_not_deferred() -> None:
    driver = Driver(max_num_seqs=1)
    waits = []

    def look(index: int) -> None:
        record = driver.core.last_record
        if record is not None:
            waits.append((record.num_waiting, record.num_deferred))

    params = SamplingParams(max_tokens=3)
    for name in ("a", "b"):
        driver.add(AddRequest(name, [1, 2, 3], params, 3))
    driver.run(look)
    assert (1, 0) in waits
    assert all(deferred == 0 for _, deferred in waits)
