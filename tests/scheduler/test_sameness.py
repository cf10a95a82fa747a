"""The same tokens under every schedule: chunk sizes, batch mates, preemption, prefix hits, depth, forks."""

from __future__ import annotations

from typing import Any

import pytest

from quire.messages import AddRequest, unpack
from quire.sampling_params import SamplingParams
from tests.scheduler.driver import Driver, request
from tests.scheduler.test_stateful import group

SIZE = 4  # block size
CHUNKS = [1, 7, SIZE - 1, SIZE, SIZE + 1, 64]
LENGTHS = [1, 2, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 2 * SIZE + 1, 23]


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 13 * salt + i * i) % 50 for i in range(length)]


def mixed() -> list[AddRequest]:
    """Prompts of every kind of length, some with common beginnings, some with forks, stops and other seeds."""
    messages = [request(f"len{n}", prompt(n), max_tokens=n % 6 + 1, seed=n) for n in LENGTHS]
    messages += [request(f"same{n}", prompt(n), max_tokens=9) for n in LENGTHS]
    messages += [request(f"fork{seed}", prompt(23), max_tokens=6, seed=seed, fork_of="len23") for seed in (1, 2)]
    messages += [request("stops", prompt(9, 1), max_tokens=40, stop_token_ids=list(range(0, 50, 9)), min_tokens=3)]
    return messages


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_chunk_size_does_not_change_tokens(chunk: int, depth: int, num_blocks: int) -> None:
    driver = Driver(long_prefill_token_threshold=chunk, depth=depth, num_blocks=num_blocks)
    driver.run_all(*mixed())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [1, 2, 5, 17])
def test_token_budget_does_not_change_tokens(budget: int, depth: int) -> None:
    Driver(max_num_batched_tokens=budget, depth=depth).run_all(*mixed())


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 30])
def test_batch_mates_do_not_change_tokens(max_num_seqs: int) -> None:
    Driver(max_num_seqs=max_num_seqs, depth=2).run_all(*mixed())


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("enable_chunked_prefill", [True, False])
def test_features_off_and_on_give_the_same_tokens(enable_prefix_caching: bool, enable_chunked_prefill: bool) -> None:
    driver = Driver(
        enable_prefix_caching=enable_prefix_caching, enable_chunked_prefill=enable_chunked_prefill, num_blocks=14
    )
    driver.run_all(*mixed())


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("chunk", [3, 64])
def test_preemption_at_any_one_step(depth: int, chunk: int) -> None:
    """Once at step k, for every k until the run ends before k."""
    for k in range(200):
        driver = Driver(depth=depth, long_prefill_token_threshold=chunk)
        messages = [
            request("a", prompt(10), max_tokens=7),
            request("b", prompt(10), seed=3),
            request("c", prompt(5, 2)),
        ]
        messages.append(request("fork", prompt(10), seed=9, fork_of="a"))
        for message in messages:
            driver.add(message)
        is_done = True

        def preempt(index: int, driver: Driver = driver, k: int = k) -> None:
            nonlocal is_done
            if index == k:
                is_done = False
                if driver.scheduler.num_running:
                    driver.scheduler.preempt_last()

        driver.run(preempt)
        driver.check_outputs()
        if is_done:
            assert k > 5
            return
    raise AssertionError("still running after 200 steps")


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_of_somebody_before_every_step(depth: int) -> None:
    """All but the first running request lose their blocks each time; each first one still gets its tokens."""
    driver = Driver(depth=depth)

    def preempt(index: int) -> None:
        while driver.scheduler.num_running > 1:
            driver.scheduler.preempt_last()

    for message in mixed():
        driver.add(message)
    driver.run(preempt)
    driver.check_outputs()
    assert sum(driver.last(r).num_preemptions for r in driver.messages) > 20


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", range(SIZE - 1, 3 * SIZE + 2))
def test_prefix_hit_at_every_boundary(length: int, depth: int) -> None:
    """A second request that shares exactly `length` tokens: the hit is the full blocks of them, less the last token."""
    for extra in (0, 1, SIZE - 1, SIZE, SIZE + 1):
        driver = Driver(depth=depth)
        driver.run_all(request("first", prompt(length) + prompt(SIZE + 1, 5)))
        second = request("second", prompt(length) + prompt(extra, 7))
        driver.run_all(second)
        common = min(length, len(second.prompt_token_ids) - 1)
        assert driver.last("second").num_cached_tokens == common // SIZE * SIZE


@pytest.mark.parametrize("length", LENGTHS)
def test_fully_cached_prompt_still_computes_a_token(length: int) -> None:
    driver = Driver()
    driver.run_all(request("first", prompt(length), max_tokens=1))
    driver.run_all(request("again", prompt(length), seed=1))
    assert driver.last("again").num_cached_tokens == (length - 1) // SIZE * SIZE


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 3, SIZE, 64])
@pytest.mark.parametrize("length", LENGTHS)
def test_forks_share_and_diverge(length: int, chunk: int, depth: int) -> None:
    driver = Driver(depth=depth, long_prefill_token_threshold=chunk)
    children = [request(f"child{i}", prompt(length), max_tokens=9, seed=i, fork_of="parent") for i in range(1, 4)]
    outputs = driver.run_all(request("parent", prompt(length), max_tokens=9), *children)
    assert len({tuple(tokens) for tokens in outputs.values()}) == 4, (
        "seeds make no difference: the test compares nothing"
    )
    computed = sum(batch.num_tokens for batch in driver.batches)
    # At depth 2 no token is computed in vain, because no request stops before its length.
    assert computed == length + 4 * 8 + 3, "a fork computes one token of the prompt"


def test_forks_use_one_copy_of_the_prompt() -> None:
    driver = Driver(num_blocks=12, max_num_batched_tokens=40)
    driver.add(request("parent", prompt(5 * SIZE + 1)))
    for i in range(3):
        driver.add(request(f"child{i}", prompt(5 * SIZE + 1), seed=i + 1, fork_of="parent"))
    driver.step()
    driver.step()
    assert driver.scheduler.num_running == 4
    assert driver.pool.num_used_blocks == 5 + 4
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize("event", ["preempt", "abort"])
@pytest.mark.parametrize("at", range(12))
def test_fork_whose_parent_goes(at: int, event: str) -> None:
    driver = Driver(long_prefill_token_threshold=3, depth=2)
    driver.add(request("parent", prompt(14)))
    driver.add(request("child", prompt(14), seed=5, fork_of="parent"))

    def lose_parent(index: int) -> None:
        if index == at and driver.running_ids()[:1] == ["parent"]:
            if event == "abort":
                driver.core.abort(["parent"])
            else:
                while driver.scheduler.num_running:
                    driver.scheduler.preempt_last()

    driver.run(lose_parent)
    driver.check_outputs(except_for=["parent"])


def test_fork_of_an_id_that_an_aborted_request_had() -> None:
    """The old request's batch is still in flight: its computed tokens do not count for the new parent."""
    driver = Driver(depth=2)
    driver.add(request("parent", prompt(23), max_tokens=9))
    driver.step()
    driver.step()
    driver.core.abort(["parent"])
    driver.run_all(request("parent", prompt(9, 1)), request("child", prompt(9, 1), seed=5, fork_of="parent"))


@pytest.mark.parametrize("parent", ["missing", "other"])
def test_fork_of_nobody_or_of_another_prompt_goes_the_ordinary_way(parent: str) -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add(request("other", prompt(9, 1), max_tokens=20))
    for _ in range(3):
        driver.step()
    driver.run_all(request("child", prompt(9, 2), fork_of=parent))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("option", ["prompt_logprobs", "skip_reading_prefix_cache"])
def test_forks_share_a_prompt_that_was_computed_anew(option: str, depth: int) -> None:
    """The part that the parent must not read from the prefix cache is computed once, for all continuations."""
    params = SamplingParams(n=3, seed=7, max_tokens=4, **{option: True})
    driver = Driver(depth=depth)
    driver.run_all(request("warm", prompt(23), max_tokens=1))
    before = sum(batch.num_tokens for batch in driver.batches)
    ids = ["parent", "fork1", "fork2"]
    messages = [
        AddRequest(name, prompt(23), params.continuation(i), 4, fork_of="parent" if i else None)
        for i, name in enumerate(ids)
    ]
    driver.run_all(*messages)
    assert sum(batch.num_tokens for batch in driver.batches) - before == 23 + 3 * 3 + 2, (
        "a fork computes one token of the prompt"
    )
    with_logprobs = [name for name in ids if driver.deltas[name][0].prompt_logprobs is not None]
    assert with_logprobs == (["parent"] if option == "prompt_logprobs" else [])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("option", ["prompt_logprobs", "skip_reading_prefix_cache"])
def test_forks_find_a_prompt_whose_first_continuation_has_ended(depth: int, option: str) -> None:
    """With one token it ends before the others begin. They compute the end of the prompt that fills no block."""
    params = SamplingParams(n=9, seed=7, max_tokens=1, **{option: True})
    driver = Driver(depth=depth)
    messages = [
        AddRequest(f"r{i}", prompt(23), params.continuation(i), 1, fork_of="r0" if i else None) for i in range(9)
    ]
    driver.run_all(*messages)
    assert sum(batch.num_tokens for batch in driver.batches) <= 23 + 8 * (23 % SIZE + SIZE)


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("max_num_seqs", "num_prompts", "num_steps", "num_overlapping_steps"), [(16, 1, 2, 3), (8, 2, 3, 4), (4, 3, 5, 6)]
)
def test_continuations_of_one_token_share_their_prompt(
    max_num_seqs: int,
    num_prompts: int,
    num_steps: int,
    num_overlapping_steps: int,
    depth: int,
    enable_prefix_caching: bool,
) -> None:
    """They end in their first step. Those that have no place in it share the prompt of one of them.

    The last of nine has nobody to share with, so it does not wait. If steps overlap, the last token of the first one is
    a step of its own, and later ones find a continuation that runs.
    """
    driver = Driver(depth=depth, max_num_seqs=max_num_seqs, enable_prefix_caching=enable_prefix_caching)
    params = SamplingParams(n=9, seed=7, max_tokens=1, temperature=1.0)
    messages = [
        AddRequest(f"r{i}", prompt(23), params.continuation(i), 1, fork_of="r0" if i else None) for i in range(9)
    ]
    driver.run_all(*messages)
    if depth > 1:
        num_prompts, num_steps = 1, num_overlapping_steps
    num_read = 20 * (num_prompts - 1) if enable_prefix_caching else 0
    assert sum(batch.num_tokens for batch in driver.batches) == num_prompts * 23 - num_read + (9 - num_prompts)
    assert len(driver.batches) == num_steps


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("of_all", "arguments", "num_steps"),
    [
        ({}, {"enable_chunked_prefill": False}, 2),
        ({}, {"max_num_seqs": 1}, 3),
        ({}, {"groups": [group("state"), group("full")]}, 1),
        ({"prompt_logprobs": 1}, {}, 1),
    ],
    ids=["whole prompts", "one place", "state", "prompt logprobs"],
)
def test_a_continuation_of_one_token_waits_for_nobody_that_cannot_share(
    of_all: dict[str, Any], arguments: dict[str, Any], num_steps: int, depth: int
) -> None:
    """Its prompt is one piece. Each continuation computes it. Prompts in one piece wait for the first one, because its
    prompt may be cached then.
    """
    driver = Driver(depth=depth, max_num_batched_tokens=80, enable_prefix_caching=False, **arguments)
    messages = [
        request(f"r{i}", prompt(23), max_tokens=1, seed=i, fork_of="r0" if i else None, **of_all) for i in range(3)
    ]
    driver.run_all(*messages)
    assert [count for batch in driver.batches for count in batch.num_scheduled_tokens] == [23] * 3
    assert len(driver.batches) == num_steps


@pytest.mark.parametrize("depth", [1, 2])
def test_a_continuation_shares_the_prompt_of_another_one_than_the_first(depth: int) -> None:
    """The first one has ended when there is a place again."""
    driver = Driver(depth=depth, max_num_seqs=3, enable_prefix_caching=False)
    driver.add(request("r0", prompt(23), max_tokens=2))
    for i, max_tokens in enumerate((9, 3, 5), start=1):
        driver.add(request(f"r{i}", prompt(23), max_tokens=max_tokens, seed=i, fork_of="r0"))
    driver.run()
    driver.check_outputs()
    assert sum(batch.num_tokens for batch in driver.batches) == 23 + 3 + (1 + 8 + 2 + 4)


@pytest.mark.parametrize("chunk", [1, SIZE, 64])
def test_prompt_logprobs_come_whole_with_the_first_token(chunk: int) -> None:
    """Accumulated over chunks and over a preemption at any step; the prefix cache is not read for them."""
    results = []
    for preempt_at in (None, 0, 1, 2, 3):
        driver = Driver(long_prefill_token_threshold=chunk, depth=2)
        driver.run_all(request("warm", prompt(11)))
        driver.add(request("a", prompt(11), prompt_logprobs=2, logprobs=1))

        def preempt(index: int, driver: Driver = driver, at: int | None = preempt_at) -> None:
            if index == at and driver.scheduler.num_running:
                driver.scheduler.preempt_last()

        driver.run(preempt)
        driver.check_outputs()
        first, *rest = driver.deltas["a"]
        assert first.num_cached_tokens == 0
        assert [unpack(p).token_ids[0] for p in first.prompt_logprobs or []] == prompt(11)[1:]
        assert all(delta.prompt_logprobs is None for delta in rest)
        assert [p.token_ids[0] for d in driver.deltas["a"] for p in d.logprobs or []] == driver.tokens("a")
        results.append(first.prompt_logprobs)
    assert all(r == results[0] for r in results)
