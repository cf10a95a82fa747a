"""Measures exchanges between ranks on CPUs: what one costs, and what a byte costs. All ranks measure at the same time.

Dimensions: N columns of all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from quire.cost.collectives import Link, Links, slowest
from quire.distributed.group import Group, Ranks
from quire.distributed.group import Link as RankLink

SMALL_BYTES, LARGE_BYTES = 4 << 10, 256 << 10  # of all ranks together
ROUNDS, SMALL_REPEATS, LARGE_REPEATS = 5, 20, 4  # rounds of at most so many exchanges
MOST_SECONDS = 0.1  # of the rounds of one size, unless so many single exchanges take longer


def measure_links(ranks: Ranks) -> Links:
    """What this rank's exchanges take. Kinds that it does not have cost nothing. Raises GroupError.

    All ranks must call it at the same time. Networks of 1 Gbit/s take 0.1 s. A slow network has shorter rounds: each
    size takes MOST_SECONDS or the time of eight exchanges, so a network with round trips of 50 ms takes less than 1 s.
    """
    grid, rank = ranks.grid, ranks.rank
    found: list[tuple[bool, Link]] = []
    groups = {group.size > grid.num_local: group for group in (ranks.group, ranks.everyone) if group is not None}
    for is_far, group in groups.items():  # of two groups of one kind, the larger one
        found.append((is_far, _gathers(group, max(group.size // grid.num_local, 1))))
    if ranks.before is not None:
        _answer(ranks.before)
    if ranks.behind is not None:
        behind = grid.behind(rank)
        assert behind is not None
        is_far = grid.node(rank) != grid.node(behind)
        found.append((is_far, _hops(ranks.behind, min(grid.width, grid.num_local) if is_far else 1)))
    return slowest(Links(far=link) if is_far else Links(near=link) for is_far, link in found)


def _gathers(group: Group, num_machines: int) -> Link:
    """The ranks of a group gather columns."""

    def gather(num_bytes: int) -> Callable[[], object]:
        width = num_bytes // group.size
        part_1N = torch.zeros((1, width), dtype=torch.uint8)
        return lambda: group.gather(part_1N, [width] * group.size)

    def agree(seconds: float) -> float:
        own_11 = torch.tensor([[seconds]], dtype=torch.float64)
        return float(group.gather(own_11, [1] * group.size).max())

    receivers = num_machines if num_machines > 1 else group.size
    return _link(gather, agree, 1 - 1 / receivers)


def _hops(behind: RankLink, num_senders: int) -> Link:
    """This rank sends rows to the next stage, and waits for the shortest answer. Each way is one exchange."""

    def there_and_back(num_bytes: int) -> Callable[[], object]:
        rows_1N = torch.zeros((1, num_bytes), dtype=torch.uint8)

        def run() -> None:
            behind.send(rows_1N)
            behind.receive_back(1, 1, torch.uint8)

        return run

    def tell(seconds: float) -> float:
        behind.send(torch.tensor([[seconds]], dtype=torch.float64))
        return seconds

    both_ways = _link(there_and_back, tell, num_senders)
    return Link(both_ways.per_exchange / 2, both_ways.per_byte)


def _answer(before: RankLink) -> None:
    """The other end of `_hops`."""
    token_11 = torch.zeros((1, 1), dtype=torch.uint8)

    def answer(num_bytes: int, count: int) -> None:
        for _ in range(count):
            before.receive(1, num_bytes, torch.uint8)
            before.send_back(token_11)

    for num_bytes, repeats in ((SMALL_BYTES, SMALL_REPEATS), (LARGE_BYTES, LARGE_REPEATS)):
        answer(num_bytes, 2)
        seconds = float(before.receive(1, 1, torch.float64))
        answer(num_bytes, ROUNDS * _affordable(repeats, seconds))


def _link(exchange: Callable[[int], Callable[[], object]], agree: Callable[[float], float], share: float) -> Link:
    """The line through the times of both sizes.

    Args:
        exchange: makes the exchange of a number of bytes.
        agree: from the time of an exchange on this rank to the one by which all its ranks decide.
        share: the bytes that a receiver gets, as a share of that number.
    """
    small = _seconds(exchange(SMALL_BYTES), SMALL_REPEATS, agree)
    large = _seconds(exchange(LARGE_BYTES), LARGE_REPEATS, agree)
    per_byte = max(large - small, 0.0) / (share * (LARGE_BYTES - SMALL_BYTES))
    return Link(max(small - share * SMALL_BYTES * per_byte, 0.0), per_byte)


def _affordable(repeats: int, seconds: float) -> int:
    """The exchanges of a round, at most `repeats`, if one takes `seconds`."""
    return max(1, min(repeats, int(MOST_SECONDS / (ROUNDS * seconds))))


def _seconds(run: Callable[[], object], most: int, agree: Callable[[float], float]) -> float:
    """The time of one call in the fastest round: other programs only delay exchanges.

    Args:
        most: the most calls of a round.
        agree: see `_link`.
    """
    run()  # ranks come at different times
    repeats = _affordable(most, agree(_time(run, 1)))
    return min(_time(run, repeats) for _ in range(ROUNDS))


def _time(run: Callable[[], object], count: int) -> float:
    """The mean time of some calls."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count
