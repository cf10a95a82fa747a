"""Requests that wait for something other than room: a shared prompt, or a resource that is being prepared."""

from __future__ import annotations

from concurrent.futures import Future
from weakref import WeakSet

import pytest

from quire.messages import AddRequest, joined
from quire.sampling_params import SamplingParams
from tests.scheduler.driver import Compilation, Driver, request


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


def test_continuations_may_come_in_one_message() -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=4, temperature=1.0, logprobs=1, prompt_logprobs=1)
    messages = [
        AddRequest(name, list(range(1, 20)), params.continuation(i), 4, fork_of="parent" if i else None)
        for i, name in enumerate(("parent", "fork1", "fork2"))
    ]
    together, apart = Driver(), Driver()
    apart.run_all(*messages)
    for message in messages:
        together.messages[message.request_id], together.deltas[message.request_id] = message, []
    together.core.add(joined(messages))
    together.run()
    assert together.deltas == apart.deltas


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


def test_the_grammar_of_a_request_that_has_left_is_let_go() -> None:
    """Nobody compiles it then: see Grammars."""
    preparations: WeakSet[Future[object]] = WeakSet()

    class Preparer:
        def use_tokenizer(self, *arguments: object) -> None: ...

        def prepare_grammar(self, text: str) -> Future[object]:
            preparation: Future[object] = Future()
            preparations.add(preparation)
            return preparation

    driver = Driver()
    driver.core._preparer = Preparer()
    for name in ("stays", "leaves"):
        driver.add(request(name, [1, 2, 3], grammar="g"))
    driver.core.step()
    assert len(preparations) == 2
    driver.core.abort(name for name in ("leaves", "unknown"))
    assert len(preparations) == 1
    driver.core.step()
    (stays,) = preparations
    stays.set_result("compiled")
    driver.run()
    assert driver.deltas["stays"]
    assert not driver.deltas["leaves"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_that_compiles_for_100_steps_delays_only_its_request(depth: int) -> None:
    """The batches before have the other requests alone; then it runs as any other."""
    crowd = [request(f"r{i}", [i, i + 1, 7], max_tokens=120 + i) for i in range(4)]
    driver, alone = (Driver(num_blocks=256, depth=depth) for _ in range(2))
    driver.add(request("slow", [3, 1, 4, 1, 5]), Compilation(100).is_ready)
    driver.run_all(*crowd)
    alone.run_all(*crowd)
    first = next(index for index, batch in enumerate(driver.batches) if "slow" in batch.request_ids)
    assert first == 100
    for batch, other in zip(driver.batches[:first], alone.batches, strict=False):
        assert batch == other


def test_who_is_ready_is_served_in_the_order_of_arrival() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(request("running", [1, 2], max_tokens=10))
    driver.add(request("slow", [3, 4]), Compilation(5).is_ready)
    driver.run_all(request("later", [5, 6]))
    assert list(dict.fromkeys(name for batch in driver.batches for name in batch.request_ids)) == [
        "running",
        "slow",
        "later",
    ]


def test_while_nothing_else_is_there_the_engine_rests() -> None:
    driver = Driver()
    naps: list[float] = []
    driver.core._sleep = naps.append
    driver.add(request("slow", [1, 2]), Compilation(7).is_ready)
    driver.run()
    assert len(naps) == 7
    driver.check_outputs()


def test_a_deferred_request_can_be_aborted() -> None:
    driver = Driver()
    driver.add(request("slow", [1, 2]), lambda: False)
    driver.step()
    assert driver.scheduler.num_deferred == 1
    driver.core.abort(["slow"])
    assert not driver.core.has_work()
    assert driver.scheduler.num_deferred == 0


def test_a_fork_is_deferred_until_the_result_of_the_prompt_is_here() -> None:
    """Not only until it is submitted: in the queue, without a free place, it would seem to wait for room."""
    driver = Driver(depth=2, max_num_seqs=2)
    driver.add(request("parent", [1, 2, 3], max_tokens=20))
    driver.add(request("fork", [1, 2, 3], seed=1, fork_of="parent"))
    driver.add(request("other", [4], max_tokens=20))
    scheduler = driver.scheduler
    first = scheduler.schedule()
    assert first is not None
    second = scheduler.schedule()
    assert second is not None
    assert second.request_ids == ["parent", "other"]
    assert scheduler.num_deferred == 1
    scheduler.update(first, driver.executor.submit(first).result())
    assert scheduler.schedule() is not None
    assert scheduler.num_deferred == 0
