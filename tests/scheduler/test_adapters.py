"""Adapters that come, wait for a place, take turns, are read again, and go: every request gets the same as alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import AdapterError
from quire.messages import AdapterState, LoadAdapter, UnloadAdapter
from quire.scheduler.adapter_turns import PATIENCE
from tests.examples import examples
from tests.lora.shelf import Shelf, digest_of
from tests.scheduler.driver import Driver, request


def driver_of(num_adapters: int, *, most: int, max_loras: int, **arguments: object) -> Driver:
    """Adapters 0 .. are known, from the paths /0 .., and none is in memory."""
    shelf = Shelf(most, {f"/{i}": str(i) for i in range(num_adapters)})
    driver = Driver(shelf=shelf, max_loras=max_loras, **arguments)  # type: ignore[arg-type]
    assert driver.core.adapters is not None
    for i in range(num_adapters):
        driver.core.adapters.load(LoadAdapter(i, f"/{i}", digest_of(str(i))))
    return driver


def load(driver: Driver, path: str, operation: int = 1) -> AdapterState:
    """Step until the answer is there."""
    assert driver.core.adapters is not None
    driver.core.adapters.load(LoadAdapter(operation, path))
    for _ in range(1000):
        driver.step()
        for state in driver.core.adapters.take_states():
            if state.operation == operation:
                return state
    raise AssertionError("no answer")


def unload(driver: Driver, content: str, path: str) -> None:
    assert driver.core.adapters is not None
    driver.core.adapters.unload(UnloadAdapter(digest_of(content), path))


@pytest.mark.parametrize("depth", [1, 2])
def test_base_and_adapters_in_one_batch(depth: int) -> None:
    driver = driver_of(3, most=3, max_loras=3, depth=depth)
    driver.run_all(*(request(f"{i}", [1, 2, 3], 30, adapter=None if i == 3 else digest_of(str(i))) for i in range(4)))
    assert max(len(batch.request_ids) for batch in driver.batches) == 4


def test_a_load_is_answered_and_idle_engines_go_on_with_it() -> None:
    driver = Driver(shelf=Shelf(2, {"/a": "a"}), max_loras=2)
    state = load(driver, "/a")
    assert state.facts is not None
    assert state.facts.digest == digest_of("a")
    assert not driver.core.has_work()
    assert load(driver, "/missing").error_code == AdapterError.code
    driver.run_all(request("r", [1], adapter=digest_of("a")))


def test_an_unknown_adapter_is_refused() -> None:
    driver = driver_of(1, most=1, max_loras=1)
    driver.add(request("r", [1], adapter="nobody's"))
    assert driver.step()[0].error_code == AdapterError.code


def test_a_request_waits_for_its_adapter_and_others_do_not() -> None:
    driver = driver_of(1, most=1, max_loras=1)
    driver.add(request("slow", [1, 2], adapter=digest_of("0")))
    driver.run_all(request("base", [1, 2], 12))
    assert driver.batches[0].request_ids == ["base"]
    assert "slow" in driver.batches[3].request_ids, "it was read beside the first three steps"


def test_300_adapters_through_32_places() -> None:
    """No deadlock, the limits are kept (Driver checks each batch), and outputs are as alone."""
    rng = random.Random(0)
    driver = driver_of(300, most=32, max_loras=8, max_num_seqs=16, num_blocks=256)
    messages = [
        request(f"r{i}", [i % 7, 3], 4, adapter=digest_of(str(min(int(rng.paretovariate(0.5)), 299))))
        for i in range(700)
    ]
    pending = iter(messages)

    def arrive(step: int) -> None:
        for message in (next(pending, None) for _ in range(3)):
            if message is not None:
                driver.add(message)

    arrive(0)
    driver.run(arrive)
    driver.check_outputs()
    assert len(driver.messages) == 700
    assert driver.shelf is not None
    assert len({message.adapter for message in messages}) > 32 < driver.shelf.num_loads
    assert driver.shelf.most_readings == 4, "the next ones follow without waiting for a step"


@pytest.mark.parametrize("most", [2, 4])
def test_who_was_overtaken_for_64_steps_has_the_next_place(most: int) -> None:
    """Two adapters with new requests in every step would keep both places for ever; with `most` 2, memory too."""
    driver = driver_of(3, most=most, max_loras=2, max_num_seqs=16)
    start = None
    for step in range(400):
        for i in range(2):
            driver.add(request(f"{step} {i}", [1, step % 50], 3, adapter=digest_of(str(i))))
        if step == 20:
            driver.add(request("overtaken", [1], 3, adapter=digest_of("2")))
        driver.step()
        if start is None and driver.batches and "overtaken" in driver.batches[-1].request_ids:
            start = step
    assert start is not None
    assert PATIENCE <= start - 20 < PATIENCE + 30
    driver.run()
    driver.check_outputs()


def test_a_free_place_goes_to_who_waits_longest() -> None:
    driver = driver_of(4, most=4, max_loras=1)
    for i in (2, 1, 3, 0):
        driver.add(request(f"{i}", [1], 2, adapter=digest_of(str(i))))
    driver.run()
    assert list(dict.fromkeys(name for batch in driver.batches for name in batch.request_ids)) == ["2", "1", "3", "0"]


def test_unloading_leaves_running_and_preempted_requests_their_version() -> None:
    """The new version is under the same path; the preempted request could not read its own again."""
    driver = driver_of(3, most=2, max_loras=2, num_blocks=16)
    old = digest_of("0")
    driver.add(request("old", [1, 2], 20, adapter=old))
    while not driver.deltas["old"]:
        driver.step()
    assert driver.shelf is not None
    driver.shelf.contents["/0"] = "new"
    assert load(driver, "/0").facts is not None
    unload(driver, "0", "/0")
    driver.scheduler.preempt_last()
    driver.scheduler._drop_stopped()
    for i in (1, 2):
        driver.add(request(f"{i}", [1, 2], 9, adapter=digest_of(str(i))))
    driver.add(request("new", [1, 2], 9, adapter=digest_of("new")))
    driver.run()
    driver.check_outputs()
    driver.step()
    assert old not in driver.shelf.in_memory, "nobody needs it"
    driver.add(request("late", [1], adapter=old))
    assert driver.step()[0].error_code == AdapterError.code


def test_two_registrations_of_one_content() -> None:
    driver = Driver(shelf=Shelf(2, {"/a": "a", "/b": "a"}), max_loras=2)
    assert load(driver, "/a").facts == load(driver, "/b").facts
    unload(driver, "a", "/a")
    driver.run_all(request("r", [1], adapter=digest_of("a")))
    assert driver.core.adapters is not None
    assert not driver.core.adapters.is_busy
    unload(driver, "a", "/b")
    assert driver.core.adapters.is_busy, "an idle engine forgets it too"
    driver.step()
    assert not driver.core.adapters.is_busy
    assert driver.core.adapters is not None
    assert digest_of("a") not in driver.core.adapters


def test_files_that_changed_end_their_requests_and_no_others() -> None:
    driver = driver_of(2, most=2, max_loras=2)
    assert driver.shelf is not None
    driver.shelf.contents["/0"] = "other"
    for i in range(2):
        driver.add(request(f"{i}", [1], adapter=digest_of(str(i))))
    driver.run()
    driver.check_outputs(except_for=["0"])
    assert driver.last("0").error_code == "adapter_changed"
    driver.shelf.contents["/0"] = "0"
    driver.add(request("again", [1], adapter=digest_of("0")))
    driver.run()
    driver.check_outputs(except_for=["0"])


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (MemoryError(), "out_of_memory"),
        (RuntimeError("[enforce fail] can't allocate memory"), "out_of_memory"),
        (KeyError("x"), "bad_adapter"),
    ],
)
def test_a_load_that_fails_otherwise(failure: Exception, code: str) -> None:
    driver = driver_of(1, most=1, max_loras=1)
    assert driver.shelf is not None
    driver.shelf.failures["/1"] = failure
    assert load(driver, "/1").error_code == code
    driver.run_all(request("r", [1], adapter=digest_of("0")))


def test_aborted_requests_leave_nothing() -> None:
    driver = driver_of(2, most=1, max_loras=1)
    for i in range(2):
        driver.add(request(f"{i}", [1, 2], 9, adapter=digest_of(str(i))))
    for _ in range(6):
        driver.step()
    driver.core.abort(["0", "1"])
    driver.run()
    assert not driver.scheduler.adapters._running
    assert not driver.scheduler.adapters._waiting


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_any_history(data: st.DataObject) -> None:
    """Few places, few blocks, preemption, forks, aborts, loads and unloads: limits hold and every request ends."""
    draw = data.draw
    max_loras = draw(st.integers(1, 3))
    driver = driver_of(
        5,
        most=max_loras + draw(st.integers(0, 2)),
        max_loras=max_loras,
        num_blocks=draw(st.integers(6, 20)),
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=20,
        depth=draw(st.integers(1, 3)),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        max_shared_prefill_tokens=draw(st.sampled_from([0, 4])),
    )
    assert driver.core.adapters is not None
    registered = {str(i): f"/{i}" for i in range(5)}
    aborted = []
    for number in range(draw(st.integers(1, 30))):
        name, content = f"r{number}", draw(st.sampled_from(["base", *"01234"]))
        if content == "base" or content in registered:
            prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
            adapter = None if content == "base" else digest_of(content)
            priority = draw(st.integers(0, 2))
            driver.add(request(name, prompt, draw(st.integers(1, 9)), adapter=adapter, priority=priority))
            if draw(st.booleans()):
                driver.add(request(f"{name}+", prompt, 4, adapter=adapter, priority=priority, seed=5, fork_of=name))
        for _ in range(draw(st.integers(0, 6))):
            driver.step()
        if draw(st.integers(0, 9)) == 0:
            driver.core.abort([name])
            aborted.append(name)
        if content in registered and draw(st.integers(0, 9)) == 0:
            unload(driver, content, registered.pop(content))
    driver.run()
    driver.check_outputs(except_for=aborted)
