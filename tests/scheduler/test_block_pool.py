"""BlockPool and BlockHasher: reference counts, order of eviction, revival, and the inputs of a hash."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler.block_hash import BlockHasher
from quire.scheduler.block_pool import BlockPool


def digest(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def test_blocks_are_handed_out_once_and_come_back() -> None:
    pool = BlockPool(5, 4)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4], "block 0 is an ordinary block"
    assert pool.num_free_blocks == 0
    pool.check([first, second])
    pool.release(second)
    pool.check([first])
    assert pool.num_used_blocks == 2
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(second)


def test_more_than_is_free_is_refused() -> None:
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        BlockPool(2, 4).allocate(3)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(num_blocks, block_size)


def test_eviction_takes_uncached_blocks_first_and_then_the_least_recently_used() -> None:
    pool = BlockPool(6, 4)
    blocks = pool.allocate(6)
    for block in (1, 2, 4, 5):
        pool.register(blocks[block], digest(block))
    pool.release(blocks)
    assert pool.free_blocks()[2:] == [1, 2, 4, 5], "cached blocks are evicted in the order in which they were freed"
    assert set(pool.free_blocks()[:2]) == {0, 3}, "blocks without content go first"

    pool.acquire([2])  # used again: now the most recent
    pool.release([2])
    taken = pool.allocate(3)
    assert set(taken) == {0, 3, 1}
    assert [pool.lookup(digest(i)) for i in (1, 2, 4, 5)] == [None, 2, 4, 5]
    pool.check([taken])
    assert pool.free_blocks() == [4, 5, 2]


def test_a_free_block_is_revived_with_its_content_until_it_is_handed_out() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.register(block, digest(0))
    pool.release([block])
    assert pool.lookup(digest(0)) == block
    pool.acquire([block])
    pool.acquire([block])
    assert pool.ref_count(block) == 2
    assert pool.num_free_blocks == 1
    pool.release([block])
    pool.check([[block]])
    pool.release([block])
    pool.allocate(2)
    assert pool.lookup(digest(0)) is None


def test_of_equal_contents_the_first_block_is_found() -> None:
    pool = BlockPool(3, 4)
    one, two = pool.allocate(2)
    pool.register(one, digest(0))
    pool.register(two, digest(0))
    assert pool.lookup(digest(0)) == one
    assert pool.num_cached_blocks == 1
    pool.release([two, one])
    assert pool.free_blocks()[-1] == one, "the block that is found is kept longest"
    pool.forget_all()
    assert pool.lookup(digest(0)) is None
    pool.check([])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=60))
def test_any_history_adds_up(history: list[tuple[int, int]]) -> None:
    """Against a plain list of owners: allocate, share, release, register, revive."""
    pool, tables = BlockPool(8, 2), []
    for action, number in history:
        if action == 0 and number <= pool.num_free_blocks:
            tables.append(pool.allocate(number))
        elif action == 1 and tables:
            shared = list(tables[number % len(tables)])
            pool.acquire(shared)
            tables.append(shared)
        elif action == 2 and tables:
            pool.release(reversed(tables.pop(number % len(tables))))
        elif action == 3 and tables:
            for block in tables[number % len(tables)]:
                pool.register(block, digest(block))
        elif action == 4 and (block := pool.lookup(digest(number))) is not None:
            assert block == number
            pool.acquire([block])
            tables.append([block])
        pool.check(tables)
        assert pool.num_used_blocks == len({block for table in tables for block in table})
        assert pool.num_free_among(range(8)) == pool.num_free_blocks


def hashes(prompt: list[int], output: list[int], size: int = 4, **fields: str) -> list[bytes]:
    request = Request("r", prompt, SamplingParams(), 10, frozenset(), output_token_ids=output, **fields)  # type: ignore[arg-type]
    return list(BlockHasher(size).extend(request, (len(prompt) + len(output)) // size))


def test_hash_chain_by_its_definition() -> None:
    parent = hashlib.sha256(b"(None, None, 0)").digest()
    expected = []
    for start in (0, 4):
        parent = hashlib.sha256(parent + struct.pack("<4q", *range(start, start + 4))).digest()
        expected.append(parent)
    assert hashes(list(range(10)), []) == expected


@pytest.mark.parametrize("num_prompt", range(1, 13))
def test_prompt_and_output_hash_alike_wherever_the_border_is(num_prompt: int) -> None:
    tokens = list(range(100, 113))
    assert hashes(tokens[:num_prompt], tokens[num_prompt:]) == hashes(tokens, [])


def test_a_hash_names_everything_before_it() -> None:
    tokens = list(range(16))
    base = hashes(tokens, [])
    for changed in range(16):
        other = hashes([*tokens[:changed], 99, *tokens[changed + 1 :]], [])
        same = changed // 4
        assert other[:same] == base[:same]
        assert not set(other[same:]) & set(base), f"token {changed} is missing in a later hash"


def test_adapter_and_salt_separate() -> None:
    kinds = [{}, {"adapter": "a"}, {"cache_salt": "a"}, {"adapter": "a", "cache_salt": "a"}, {"cache_salt": "None"}]
    kinds += [{"adapter": "a', 'b"}, {"adapter": "a", "cache_salt": "b"}, {"cache_salt": "\ud800"}]
    assert len({hashes([1, 2, 3, 4], [], **kind)[0] for kind in kinds}) == len(kinds)


def test_hashes_are_extended_not_recomputed() -> None:
    request = Request("r", list(range(9)), SamplingParams(), 10, frozenset())
    hasher = BlockHasher(4)
    first = hasher.extend(request, 1)[0]
    request.output_token_ids += [5, 6, 7]
    assert hasher.extend(request, 3)[0] is first
    assert request.block_hashes == hashes([*range(9), 5, 6, 7], [])
    with pytest.raises(AssertionError, match="unknown tokens"):
        hasher.extend(request, 4)
