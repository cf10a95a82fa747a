"""The bytes that ranks with whole experts send to each other, counted in the memory that they share.

Two lanes of two ranks share six experts. Ranks are threads here.

Dimensions: X tokens of both lanes, S slots, P = X * S pairs of a token and a slot, D hidden.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from quire import extension
from quire.distributed import shared_memory
from quire.distributed.layout import Grid, place_experts, shares
from quire.distributed.shared_memory import SharedMemoryGroup, make_memory, ranks_on
from quire.forward_batch import LaneRows
from quire.kernels import cpu
from quire.kernels.experts import combine, route
from quire.kernels.routing import Routing, RoutingRule
from quire.layer_spec.cuts import Placement
from quire.moe.dispatch import Dispatch
from quire.moe.stack import ExchangedStack

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

SIZE, WIDTH, D, E, S = 4, 2, 64, 6, 3
COUNTS = (5, 3)  # tokens of each lane
FLOAT_BYTES = 4
UNTOUCHED = 0xA5  # in every byte of the memory before the ranks send
SLOT_BYTES = 4096


class Node:
    """The ranks of a machine and the memory that they share."""

    def __init__(self) -> None:
        grid = Grid(width=SIZE)
        memory = make_memory(grid)
        found = [ranks_on(memory, rank, grid, has_own_cores=False, timeout_seconds=60.0).group for rank in range(SIZE)]
        self.groups = [group for group in found if isinstance(group, SharedMemoryGroup)]
        self._mapped = mmap.mmap(memory, 0)
        os.close(memory)
        group = extension.C.SharedGroup
        begin = group.first_part + group.num_bytes(size=SIZE, slot_bytes=0)
        slots = np.frombuffer(self._mapped, dtype=np.uint8)[begin : begin + 2 * SIZE * SLOT_BYTES]
        self.slots = slots.reshape(SIZE, 2 * SLOT_BYTES)

    def sent_bytes(self, run: Callable[[SharedMemoryGroup], Any]) -> tuple[list[int], list[Any]]:
        """What all ranks do together -> the bytes that each of them puts where the others read, and its result."""
        self.slots[:] = UNTOUCHED
        with ThreadPoolExecutor(SIZE) as threads:
            results = list(threads.map(run, self.groups))
        return [int((slot != UNTOUCHED).sum()) for slot in self.slots], results


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", SLOT_BYTES)
    return Node()


def rows(count: int, seed: int) -> torch.Tensor:
    """Float32, without a byte that says UNTOUCHED."""
    drawn = torch.randn((count, D), generator=torch.Generator().manual_seed(seed))
    raw = drawn.numpy().view(np.uint8)
    raw[raw == UNTOUCHED] += 1
    return drawn


def test_a_token_is_sent_once_and_not_once_for_each_expert(node: Node) -> None:
    """By the first rank of its lane: the other one has the same rows."""
    rows_of_lanes = [rows(count, lane) for lane, count in enumerate(COUNTS)]
    lanes = LaneRows.of(COUNTS)
    assert lanes is not None

    def dispatch(group: SharedMemoryGroup) -> torch.Tensor:
        lane = group.rank // WIDTH
        return Dispatch(group, lane, WIDTH).to_all(rows_of_lanes[lane], lanes)

    sent, found = node.sent_bytes(dispatch)
    assert sent == [COUNTS[0] * D * FLOAT_BYTES, 0, COUNTS[1] * D * FLOAT_BYTES, 0]
    for each in found:
        assert torch.equal(each, torch.cat(rows_of_lanes))


def test_a_row_comes_back_for_each_slot_and_is_summed_in_their_order(node: Node) -> None:
    """Also if several experts of a token are on one rank, which could add their rows up before it sends them."""
    own, X = place_experts(E, SIZE), sum(COUNTS)
    logits_XE = torch.randn((X, E), generator=torch.Generator().manual_seed(3))
    routing = route(logits_XE, RoutingRule(num_experts=E, num_active=S))
    rank_of = {expert: rank for rank, experts in enumerate(own) for expert in experts}
    ranks_XS = [[rank_of[expert] for expert in token] for token in routing.experts_TS.tolist()]
    num_rows = [sum(token.count(rank) for token in ranks_XS) for rank in range(SIZE)]
    assert any(len(set(token)) < S for token in ranks_XS), "no token has two experts on one rank"
    assert sum(num_rows) == X * S
    y_PD = rows(X * S, 4)

    class Stack:
        """The results of a rank's own experts; the other rows are undefined."""

        parts = ()

        def __init__(self, rank: int) -> None:
            first, last = placements[rank].firsts[rank : rank + 2]
            self.own = slice(int(routing.begins[first]), int(routing.begins[last]))

        def __call__(self, x: torch.Tensor, routing: Routing, *, of_tokens: bool) -> torch.Tensor:
            filled_PD = torch.full_like(y_PD, torch.nan)
            filled_PD[self.own] = y_PD[self.own]
            return filled_PD

    placements = [Placement(rank, own, tuple(shares(D, SIZE))) for rank in range(SIZE)]

    def bring_back(group: SharedMemoryGroup) -> torch.Tensor:
        stack: Any = Stack(group.rank)
        rows_PC = ExchangedStack(stack, placements[group.rank], group)(y_PD, routing, of_tokens=False)
        return combine(rows_PC, routing)

    sent, found = node.sent_bytes(bring_back)
    assert sent == [count * D * FLOAT_BYTES for count in num_rows]
    assert torch.equal(torch.cat(found, 1), combine(y_PD, routing))
