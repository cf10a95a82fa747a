"""Brings the rows of all lanes to every rank, because lanes share experts and each rank has some experts.

A rank computes all rows of its own experts, and sums some columns of all rows, like the ranks of one lane. So the bits
of a row do not depend on its neighbours or on the number of lanes.

Dimensions: T tokens of a lane, X tokens of all lanes, L lanes, D hidden.
"""

from __future__ import annotations

from torch import Tensor

from quire.distributed.group import Group
from quire.forward_batch import LaneRows


class Dispatch:
    """The dispatch of one rank.

    Args:
        group: all ranks of all lanes.
        lane: the lane of this rank.
        width: the number of ranks of a lane. All of them have the lane's rows, and the first one sends them.
    """

    def __init__(self, group: Group, lane: int, width: int) -> None:
        self.group, self._lane = group, lane
        self._firsts = [-(-rank // width) for rank in range(group.size + 1)]  # the other ranks send no rows

    def to_all(self, x_TD: Tensor, lanes: LaneRows) -> Tensor:
        """The rows of all lanes, one lane after the other, [X, D]. Raises as Group.exchange."""
        columns, num_rows = [range(x_TD.shape[1])] * self.group.size, sum(lanes.counts)
        return self.group.exchange(x_TD, lanes.begins_L1, self._firsts, columns, num_rows)

    def own(self, x_XD: Tensor, lanes: LaneRows) -> Tensor:
        """The rows of this lane among the rows of all lanes, [T, D]."""
        return x_XD.narrow(0, sum(lanes.counts[: self._lane]), lanes.counts[self._lane])
