"""The prefix cache: hits of later requests, the separation of requests, and the order of eviction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.formats.kv_groups import KvGroup
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.kv_cache_manager import KVCacheManager
from tests.scheduler.driver import Driver, request
from tests.scheduler.test_stateful import MODELS, group


def cached(driver: Driver, request_id: str, prompt: list[int], **fields: object) -> int:
    driver.run_all(request(request_id, prompt, 2, **fields))
    return driver.last(request_id).num_cached_tokens


def test_salt_and_adapter_isolate() -> None:
    driver = Driver()
    prompt = list(range(13))
    kinds: list[dict[str, object]] = [
        {},
        {"cache_salt": "x"},
        {"adapter": "x"},
        {"cache_salt": "x", "adapter": "x"},
    ]
    assert [cached(driver, f"cold{i}", prompt, **kind) for i, kind in enumerate(kinds)] == [0, 0, 0, 0]
    assert [cached(driver, f"warm{i}", prompt, **kind) for i, kind in enumerate(kinds)] == [12, 12, 12, 12]


def test_requests_can_leave_the_cache_unread() -> None:
    driver = Driver()
    prompt = list(range(13))
    cached(driver, "first", prompt)
    assert cached(driver, "skips", prompt, skip_reading_prefix_cache=True) == 0
    assert cached(driver, "prompt logprobs", prompt, prompt_logprobs=1) == 0
    assert cached(driver, "in spite of all", prompt, prompt_logprobs=1, skip_reading_prefix_cache=False) == 0
    assert cached(driver, "reads", prompt) == 12
    driver.scheduler.reset_prefix_cache()
    assert cached(driver, "after reset", prompt) == 0
    off = Driver(enable_prefix_caching=False)
    assert [cached(off, name, prompt) for name in "ab"] == [0, 0]
    assert off.pool.num_cached_blocks == 0


def test_a_prompt_of_whole_blocks_leaves_one_to_compute() -> None:
    """Without a token to compute there would be no logits."""
    driver = Driver()
    assert [cached(driver, name, list(range(12))) for name in ("first", "second")] == [0, 8]


def test_output_is_cached_too() -> None:
    driver = Driver()
    first = driver.run_all(request("first", range(6), 8))["first"]
    # 6 + 8 tokens. The last one is never computed: 13 are in the cache, 12 of them in full blocks.
    assert cached(driver, "continued", [*range(6), *first, 7, 7]) == 12


def test_tokens_in_flight_are_not_shared() -> None:
    """A lookup finds no block of a batch without a result."""
    driver = Driver(depth=2)
    driver.add(request("a", range(12), 4))
    driver.step()
    assert driver.pool.num_cached_blocks == 0
    driver.step()
    assert driver.pool.num_cached_blocks == 3


def num_found(driver: Driver, prompt: list[int]) -> int:
    """Blocks of a prompt that a lookup finds, without using them."""
    looked_up = Request("look-up", [*prompt, 0], SamplingParams(), 1, frozenset())
    return len(driver.kv.find_cached_prefix(looked_up).pages)


def test_eviction_takes_the_oldest_request_first_and_the_end_of_a_prefix_before_its_beginning() -> None:
    driver = Driver(num_blocks=8)
    old, new = [1] * 12, [2] * 12
    cached(driver, "old", old)
    cached(driver, "new", new)
    assert (num_found(driver, old), num_found(driver, new)) == (3, 3)
    cached(driver, "other", [3] * 14)  # 4 blocks: the 2 that hold nothing, and two of the oldest
    assert (num_found(driver, old), num_found(driver, new)) == (1, 3)


def test_a_hit_keeps_a_prefix_alive() -> None:
    driver = Driver(num_blocks=8)
    old, new = [1] * 12, [2] * 12
    cached(driver, "old", old)
    cached(driver, "new", new)
    assert cached(driver, "old is used", [*old, 5]) == 12
    cached(driver, "other", [3] * 14)
    assert (num_found(driver, old), num_found(driver, new)) == (3, 1)


def test_a_reset_holds_for_what_running_requests_compute_later() -> None:
    """Their later blocks follow from forgotten ones: once the beginning is computed anew, no lookup may find them."""
    driver = Driver()
    prompt = list(range(13))
    driver.add(request("runs", prompt, 12))
    driver.step()
    assert driver.pool.num_cached_blocks == 3
    driver.scheduler.reset_prefix_cache()
    driver.run()
    whole = [*prompt, *driver.tokens("runs")]
    assert driver.pool.num_cached_blocks == 0
    assert cached(driver, "the beginning", prompt) == 0
    assert cached(driver, "all of it", whole) == 12, "only what was computed after the reset"


def test_a_reset_holds_for_forks_of_running_requests() -> None:
    driver = Driver(max_num_seqs=2)
    prompt = list(range(13))
    driver.add(request("parent", prompt, 12))
    driver.step()
    driver.scheduler.reset_prefix_cache()
    driver.add(request("fork", prompt, 12, fork_of="parent"))
    driver.run()
    assert driver.last("fork").num_cached_tokens == 12, "it shares the prompt with its parent"
    assert driver.pool.num_cached_blocks == 0


def test_a_request_that_is_computed_again_after_a_reset_is_cached() -> None:
    driver = Driver()
    driver.add(request("runs", range(13), 4))
    driver.step()
    driver.scheduler.reset_prefix_cache()
    driver.scheduler.preempt_last()
    driver.run()
    driver.check_outputs()
    assert cached(driver, "later", list(range(13))) == 12


@pytest.mark.parametrize("groups", [(group("window", 9),), (group("full"), group("window", 6, 2))])
def test_as_much_is_found_with_several_steps_in_flight(groups: tuple[KvGroup, ...]) -> None:
    """Blocks behind a window are given back only once others can find them."""
    long = list(range(48))
    prompts = [long, [*long[:21], 60, 61], [*long[:37], 62], long, [1, 2], [*long[:21], 60, 61, 63, 64, 65]]
    found = []
    for depth in (1, 2, 3):
        driver = Driver(depth=depth, groups=groups, num_blocks=400, max_num_batched_tokens=8)
        found.append([cached(driver, f"r{index}", prompt) for index, prompt in enumerate(prompts)])
    assert found == [[0, 20, 36, 44, 0, 20]] * 3


class CountingPool(BlockPool):
    """Counts what it is asked."""

    num_lookups = 0

    def lookup(self, block_hash: bytes) -> int | None:
        self.num_lookups += 1
        return super().lookup(block_hash)


def looked_up(num_tokens: int) -> Request:
    return Request("look-up", list(range(num_tokens)), SamplingParams(), 1, frozenset())


def test_a_miss_takes_one_look_per_window() -> None:
    pool = CountingPool(8, 4)
    kv = KVCacheManager(pool, (group("window", 64),))
    assert not kv.find_cached_prefix(looked_up(4001)).num_tokens
    assert pool.num_lookups <= 4000 // 64 + 2


@given(
    groups=st.sampled_from([groups for groups in MODELS if all(each.spec.kind != "state" for each in groups)]),
    size=st.sampled_from([1, 2, 4]),
    missing=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 2)), max_size=8),
)
def test_the_longest_prefix_that_all_groups_can_serve_is_found(
    groups: tuple[KvGroup, ...], size: int, missing: set[tuple[int, int]]
) -> None:
    """A table has lost its page of some of twelve blocks: as if each length were tried, the longest first."""
    pool = BlockPool(36, size)
    kv = KVCacheManager(pool, groups)
    one = looked_up(12 * size + 1)
    kv.hash_prompt(one)
    columns = [each for each in groups for _ in each.tables()]
    for block in range(12):
        for column in range(len(columns)):
            if (block, column) not in missing:
                (page,) = pool.allocate(1)
                pool.register(page, one.block_hashes[block] + kv._suffixes[column])

    def can_serve(num_blocks: int) -> bool:
        return not any(
            (block, column) in missing
            for column, each in enumerate(columns)
            for block in range(each.first_needed(num_blocks * size) // size, num_blocks)
        )

    longest = next(count for count in range(12, -1, -1) if can_serve(count))
    assert kv.find_cached_prefix(one).num_tokens == longest * size


def test_a_prompt_takes_the_pages_that_are_left() -> None:
    """One request gives back a page that another still reads. There are too few pages for a whole step, so it is
    shorter.
    """
    driver = Driver(num_blocks=8, groups=(group("window", 8),), max_num_batched_tokens=16)
    prefix = list(range(40))
    cached(driver, "first", prefix)
    driver.run_all(request("short", [*prefix, 1], 6), request("long", [*prefix, *range(40)], 6))
    admitted = [new.request_id for batch in driver.batches for new in batch.new_rows]
    assert admitted == ["first", "short", "long"], "somebody was preempted"
    assert [driver.last(name).num_cached_tokens for name in ("short", "long")] == [40, 40]
