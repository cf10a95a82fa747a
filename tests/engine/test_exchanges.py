"""What ranks exchange in a step, beside what the cost model counts; and the links that a start measures.

Ranks are threads here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import Tensor

from quire.cost.collectives import TOLD_BYTES, Link
from quire.distributed.layout import Grid
from quire.distributed.shared_memory import SharedMemoryGroup
from quire.kernels import cpu
from quire.messages import AddRequest
from quire.sampling_params import SamplingParams
from quire.worker.link_times import ROUNDS, measure_links
from tests.distributed.machines import ranks_of
from tests.engine.ranks import started
from tests.engine.test_rank_processes import EXPERTS

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

PROMPT_TOKENS = 7


@dataclass(frozen=True)
class Exchanged:
    """What a rank does in one exchange. Bytes are those that others may get, of all columns."""

    num_bytes: int
    reader: int | None  # the place in the group of the only rank that gets something; None: all ranks do
    share: float = 1.0  # of the columns, that a rank on the same machine gets
    is_routed: bool = False  # the router decides how many rows each rank brings, so only the mean is known


class Exchanges:
    """The exchanges of all groups, which are lists of ranks."""

    def __init__(self, grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
        self._grid, self._members = grid, dict[SharedMemoryGroup, tuple[int, ...]]()
        self._found: dict[tuple[int, ...], dict[int, list[Exchanged]]] = {}
        begin, gather_to, exchange = (
            getattr(SharedMemoryGroup, name) for name in ("__init__", "gather_to", "exchange")
        )

        def begun(group: SharedMemoryGroup, shared: Any, members: tuple[int, ...], *more: Any) -> None:
            begin(group, shared, members, *more)
            self._members[group] = members

        def gathered(
            group: SharedMemoryGroup, reader: int | None, part: Tensor, widths: Sequence[int], out: Any = None
        ) -> Tensor:
            self._add(group, Exchanged(part.shape[0] * widths[group.rank] * part.element_size(), reader))
            return gather_to(group, reader, part, widths, out)

        def exchanged(
            group: SharedMemoryGroup,
            rows: Tensor,
            begins: Tensor,
            firsts: Sequence[int],
            columns: Sequence[range],
            num_rows: int | None = None,
        ) -> Tensor:
            first, last = begins[firsts[group.rank]], begins[firsts[group.rank + 1]]
            num_bytes = int(last - first) * rows.shape[1] * rows.element_size()
            share = len(columns[group.rank]) / rows.shape[1]
            self._add(group, Exchanged(num_bytes, None, share, is_routed=num_rows is None))
            return exchange(group, rows, begins, firsts, columns, num_rows)

        monkeypatch.setattr(SharedMemoryGroup, "__init__", begun)
        monkeypatch.setattr(SharedMemoryGroup, "gather_to", gathered)
        monkeypatch.setattr(SharedMemoryGroup, "exchange", exchanged)

    def _add(self, group: SharedMemoryGroup, what: Exchanged) -> None:
        of_rank = self._found.setdefault(self._members[group], {})
        of_rank.setdefault(self._members[group][group.rank], []).append(what)

    def forget(self) -> None:
        self._found.clear()

    def of_lane(self, lane: int) -> dict[bool, list[float]]:
        """For exchanges within a machine (False) and between machines: the bytes that come to the receiver that gets
        the most, in each exchange in which ranks of a lane take part.
        """
        received: dict[bool, list[float]] = {False: [], True: []}
        for members, of_rank in self._found.items():
            if all(self._grid.lane(rank) != lane for rank in members):
                continue
            is_far = len({self._grid.node(rank) for rank in members}) > 1
            for each in zip(*(of_rank[rank] for rank in members), strict=True):
                received[is_far].append(self._received(members, each, lane, is_far=is_far))
        return received

    def _received(self, members: Sequence[int], each: Sequence[Exchanged], lane: int, *, is_far: bool) -> float:
        what, place = each[0], self._grid.node if is_far else int
        readers = members if what.reader is None else [members[what.reader]]
        shares = dict(zip(members, (1.0 if is_far else one.share for one in each), strict=True))
        found = {
            rank: shares[rank]
            * sum(one.num_bytes for other, one in zip(members, each, strict=True) if place(other) != place(rank))
            for rank in readers
        }
        if what.is_routed:
            return sum(found.values()) / len(found)
        return max(num_bytes for rank, num_bytes in found.items() if self._grid.lane(rank) == lane)


# Ranks have equal parts of everything.
EVEN = EXPERTS | {"num_experts": 8, "moe_intermediate_size": 256, "hidden_size": 128, "vocab_size": 4096}
WHOLE: dict[str, Any] = {"enable_expert_parallel": True}
CODE: dict[str, Any] = {"model_impl": "transformers"}


@pytest.mark.parametrize(
    ("grid", "has_experts", "more"),
    [
        (Grid(2), False, {}),
        (Grid(1, 2), False, {}),
        (Grid(4), False, {}),
        (Grid(4, num_nodes=2), False, {}),
        (Grid(2, 2, 2), False, {}),
        (Grid(2), False, CODE),
        (Grid(2), True, {}),
        (Grid(4), True, WHOLE),
        (Grid(4, num_nodes=2), True, WHOLE),
        (Grid(2), True, CODE),
        (Grid(1, num_lanes=2), True, WHOLE),
        (Grid(2, num_lanes=2), True, WHOLE),
        (Grid(1, num_lanes=2, num_nodes=2), True, WHOLE),
        (Grid(1, num_lanes=4, num_nodes=2), True, WHOLE),
        (Grid(2, num_lanes=2, num_nodes=2), True, WHOLE),
    ],
    ids=str,
)
def test_a_step_exchanges_what_is_counted(
    grid: Grid, has_experts: bool, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of a new length in each lane: its step is not recorded yet, so all operations are called."""
    folder = None
    if has_experts:
        (tmp_path / "config.json").write_text(json.dumps(EVEN))
        folder, more = tmp_path, more | {"load_format": "dummy", "max_model_len": 128}
    if CODE.items() <= more.items():
        assert transformers.LlamaForCausalLM  # threads that import a lazy module at the same time may not find a class
    exchanged = Exchanges(grid, monkeypatch)
    sizes = {"num_stages": grid.num_stages, "nnodes": grid.num_nodes, "data_parallel_size": grid.num_lanes}
    core = started(grid.width, folder, **sizes, **more).core
    assert core.cost is not None
    exchanged.forget()
    params, has_lanes = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), grid.num_lanes > 1
    for lane in range(grid.num_lanes):
        prompt = list(range(10, 10 + PROMPT_TOKENS))
        core.add(AddRequest(f"r{lane}", prompt, params, max_tokens=1, lane=lane if has_lanes else None))
    while core.has_work():
        core.step()
    core.shutdown()
    arithmetic = core.cost.arithmetic
    load = arithmetic.load([0], [PROMPT_TOKENS], 1)
    demand = arithmetic.demand(load._replace(other_tokens=(grid.num_lanes - 1) * PROMPT_TOKENS))
    for lane in range(grid.num_lanes):
        found = exchanged.of_lane(lane)
        near, far = found[False], found[True]
        hops = 1 if grid.num_stages > 1 and grid.num_nodes > 1 else 0  # over a connection, which is no group
        assert (len(near), len(far)) == (demand.near_exchanges, demand.far_exchanges - hops)
        assert sum(near) == pytest.approx(demand.near_bytes, rel=1e-9)
        assert hops or sum(far) == pytest.approx(demand.far_bytes, rel=1e-9)
        assert grid.width == 1 or TOLD_BYTES in near + far


@pytest.mark.parametrize(
    "grid",
    [
        *(Grid(2), Grid(1, 2), Grid(2, num_nodes=2), Grid(1, 2, 2), Grid(2, 2, 2)),
        *(Grid(1, num_lanes=2), Grid(1, num_lanes=2, num_nodes=2), Grid(2, num_lanes=2, num_nodes=2)),
    ],
    ids=str,
)
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


@pytest.mark.parametrize("grid", [Grid(2), Grid(1, 2)], ids=str)
def test_a_slow_network_is_measured_with_few_exchanges(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks repeat equally often, though each has times of its own. Hops there and back are two exchanges."""
    calls, gather_to = list[SharedMemoryGroup](), SharedMemoryGroup.gather_to

    def slow(group: SharedMemoryGroup, *arguments: Any) -> Tensor:
        calls.append(group)
        time.sleep(0.025 + 0.002 * group.rank)
        return gather_to(group, *arguments)

    monkeypatch.setattr(SharedMemoryGroup, "gather_to", slow)
    found = ranks_of(grid)
    with ThreadPoolExecutor(grid.size) as threads:
        links = list(threads.map(measure_links, found))
    for ranks in found:
        ranks.close()
    exchanges = 3 + ROUNDS if grid.num_stages == 1 else 2 * (2 + ROUNDS) + 1
    assert len(calls) == 2 * 2 * exchanges
    assert max(each.near.per_exchange for each in links) > 0.02


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
