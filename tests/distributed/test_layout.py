"""The places of ranks on machines."""

from __future__ import annotations

import pytest

from quire.distributed.layout import Grid


@pytest.mark.parametrize(
    "grid",
    [
        *(Grid(4, 1, 2), Grid(3, 1, 3), Grid(2, 2, 4), Grid(6, 2, 4), Grid(2, 4, 2), Grid(3, 2), Grid(2, num_lanes=3)),
        *(Grid(2, 1, 2, num_lanes=4), Grid(1, 1, 4, num_lanes=4), Grid(3, 1, 3, num_lanes=3)),
    ],
)
def test_ranks_of_several_machines(grid: Grid) -> None:
    """One rank of each machine is connected to each rank of its stage on other machines, or of all lanes.

    All connections are mutual. A machine has all ranks of its groups, but for the widest one.
    """
    for rank in range(grid.size):
        assert all(rank in grid.far(other) for other in grid.far(rank))
        assert all(grid.node(other) != grid.node(rank) for other in grid.far(rank))
        neighbours = {grid.before(rank), grid.behind(rank)} - {None}
        assert {each for each in neighbours if grid.node(each) != grid.node(rank)} <= {*grid.far(rank)}
        members = grid.widest_members(rank)
        assert {*grid.stage_members(rank)} <= {*members}
        here = [each for each in members if grid.node(each) == grid.node(rank)]
        told = [other for each in here for other in grid.peers(each)]
        assert sorted(told) == [each for each in members if each not in here]
        others = [group for group in grid.groups(grid.node(rank)) if group != members and rank in group]
        assert all(grid.node(each) == grid.node(rank) or grid.num_stages > 1 for group in others for each in group)
        assert members in grid.groups(grid.node(rank)) or len(members) == 1


def test_one_machine_needs_no_connections() -> None:
    assert all(not Grid(4, 2).far(rank) for rank in range(8))
