"""The places of ranks on machines."""

from __future__ import annotations

import pytest

from quire.distributed.layout import Grid


@pytest.mark.parametrize(
    "grid",
    [Grid(4, 1, 2), Grid(3, 1, 3), Grid(2, 2, 4), Grid(6, 2, 4), Grid(2, 4, 2), Grid(3, 2), Grid(2, num_lanes=3)],
)
def test_ranks_of_several_machines(grid: Grid) -> None:
    """One rank of each machine is connected to each rank of its stage on other machines. All connections are mutual."""
    for rank in range(grid.size):
        assert all(rank in grid.far(other) for other in grid.far(rank))
        assert all(grid.node(other) != grid.node(rank) for other in grid.far(rank))
        neighbours = {grid.before(rank), grid.behind(rank)} - {None}
        assert {each for each in neighbours if grid.node(each) != grid.node(rank)} <= {*grid.far(rank)}
        members = grid.stage_members(rank)
        here = [each for each in members if grid.node(each) == grid.node(rank)]
        told = [other for each in here for other in grid.peers(each)]
        assert sorted(told) == [each for each in members if each not in here]


def test_one_machine_needs_no_connections() -> None:
    assert all(not Grid(4, 2).far(rank) for rank in range(8))
