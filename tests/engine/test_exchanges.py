"""What ranks exchange in a step, beside what the cost model counts; and the links that a start measures.

Ranks are threads here.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

from quire.cost.collectives import TOLD_BYTES, Link
from quire.distributed.layout import Grid
from quire.distributed.shared_memory import SharedMemoryGroup
from quire.kernels import cpu
from quire.messages import AddRequest
from quire.sampling_params import SamplingParams
from quire.worker.link_times import measure_links
from tests.distributed.machines import ranks_of
from tests.engine.ranks import started

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

PROMPT_TOKENS = 7


class Received:
    """For each member of each group, the bytes that it gets from others in each exchange."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_member: dict[SharedMemoryGroup, list[int]] = {}
        gather_to = SharedMemoryGroup.gather_to

        def counted(
            group: SharedMemoryGroup, reader: int | None, part: Tensor, widths: Sequence[int], out: Any = None
        ) -> Tensor:
            is_reader = reader in (None, group.rank)
            others = sum(widths) - widths[group.rank] if is_reader else 0
            self.by_member.setdefault(group, []).append(part.shape[0] * others * part.element_size())
            return gather_to(group, reader, part, widths, out)

        monkeypatch.setattr(SharedMemoryGroup, "gather_to", counted)

    def most(self) -> list[int]:
        """The most that a member gets in each exchange. All members come to the same exchanges."""
        return [max(each) for each in zip(*self.by_member.values(), strict=True)]


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(2, 1), (1, 2)])
def test_a_step_exchanges_what_is_counted(num_ranks: int, num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of a new length: its step is not recorded yet, so all operations are called."""
    core = started(num_ranks, num_stages=num_stages).core
    assert core.cost is not None
    received = Received(monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    core.add(AddRequest("a", list(range(10, 10 + PROMPT_TOKENS)), params, max_tokens=1))
    while core.has_work():
        core.step()
    core.shutdown()
    arithmetic = core.cost.arithmetic
    demand = arithmetic.demand(arithmetic.load([0], [PROMPT_TOKENS], 1))
    exchanged = received.most()
    assert (len(exchanged), sum(exchanged)) == (demand.near_exchanges, demand.near_bytes)
    assert demand.far_exchanges == 0
    assert num_stages == 2 or TOLD_BYTES in exchanged


@pytest.mark.parametrize("grid", [Grid(2), Grid(1, 2), Grid(2, num_nodes=2), Grid(1, 2, 2), Grid(2, 2, 2)], ids=str)
def test_links_are_measured_by_all_ranks(grid: Grid) -> None:
    """Kinds that a layout does not have cost nothing."""
    found = ranks_of(grid)
    with ThreadPoolExecutor(grid.size) as threads:
        links = list(threads.map(measure_links, found))
    for ranks in found:
        ranks.close()
    has_near = grid.num_local > 1
    has_far = grid.num_nodes > 1
    assert any(each.near.per_exchange > 0 for each in links) == has_near
    assert any(each.far.per_exchange > 0 for each in links) == has_far
    assert has_near or all(each.near == Link() for each in links)
    assert has_far or all(each.far == Link() for each in links)
    assert all(0 <= seconds < 0.1 for each in links for link in each for seconds in link)


def test_a_start_measures_its_links_and_predicts_with_them() -> None:
    engine = started(2)
    cost = engine.core.cost
    engine.core.shutdown()
    assert cost is not None
    links = cost.fit.constants.links
    assert links.near.per_exchange > 0
    assert links.far == Link()
    shown = engine.resolved.settings["expected_exchange_seconds"]
    assert 0 < shown.value < 1 / engine.resolved.settings["expected_tokens_per_second"].value
    assert "exchanges in a machine of " in shown.detail
    assert "this start measured steps" in shown.detail
