"""Ranks that are threads of this process, on one machine or on several: then their memory is not shared."""

from __future__ import annotations

import os
import socket

from quire.distributed.group import Ranks
from quire.distributed.layout import Grid
from quire.distributed.shared_memory import make_memory, ranks_on


def ranks_of(grid: Grid, timeout_seconds: float = 60.0) -> list[Ranks]:
    """All ranks, connected."""
    links: list[dict[int, int]] = [{} for _ in range(grid.size)]
    for rank in range(grid.size):
        for other in grid.far(rank):
            if other > rank:
                ours, theirs = socket.socketpair()
                links[rank][other], links[other][rank] = ours.detach(), theirs.detach()
    found = []
    for node in range(grid.num_nodes):
        memory = make_memory(grid)
        found += [
            ranks_on(memory, rank, grid, links[rank], has_own_cores=False, timeout_seconds=timeout_seconds)
            for rank in grid.ranks_of(node)
        ]
        os.close(memory)
    return found
