"""The places of ranks, and the units of each rank in something that ranks share. Integers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """All ranks: stages one after the other, each shared by ranks side by side. Or lanes, which share only experts.

    The first rank is in the last stage. It samples, and the engine is in its process.

    Attributes:
        width: ranks that share a stage.
        num_stages: each has some of the layers.
        num_nodes: machines, each with as many whole stages.
        num_lanes: the lanes of a stage, which lie one after the other; `width` ranks share each. There are lanes,
            stages, or none of both.
    """

    width: int = 1
    num_stages: int = 1
    num_nodes: int = 1
    num_lanes: int = 1

    @property
    def size(self) -> int:
        """All ranks."""
        return self.width * self.num_stages * self.num_lanes

    @property
    def num_local(self) -> int:
        """Ranks on each machine."""
        return self.size // self.num_nodes

    def node(self, rank: int) -> int:
        """The machine of a rank. The first one has the last stages."""
        return rank // self.num_local

    def ranks_of(self, node: int) -> range:
        """The ranks of a machine."""
        return range(node * self.num_local, (node + 1) * self.num_local)

    def stage(self, rank: int) -> int:
        """The stage of a rank; 0 has the first layers."""
        return self.num_stages - 1 - rank // (self.width * self.num_lanes)

    def lane(self, rank: int) -> int:
        """The lane of a rank."""
        return rank // self.width % self.num_lanes

    def place(self, rank: int) -> int:
        """Which part of its stage, or lane, a rank has."""
        return rank % self.width

    def stage_members(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's stage, or lane."""
        first = rank - self.place(rank)
        return tuple(range(first, first + self.width))

    def before(self, rank: int) -> int | None:
        """The rank of the stage before, from which a rank gets its input; None: it is in the first stage."""
        return rank + self.width if self.num_stages > 1 and rank + self.width < self.size else None

    def behind(self, rank: int) -> int | None:
        """The rank of the stage behind; None: it is in the last one."""
        return rank - self.width if self.num_stages > 1 and rank >= self.width else None

    def groups(self, node: int = 0) -> list[tuple[int, ...]]:
        """The ranks of a machine that exchange something: the ranks of a stage, of a lane, of all lanes; a sender and a
        receiver.
        """
        here = self.ranks_of(node)
        stages = [self.stage_members(rank) for rank in here[:: self.width] if self.width > 1]
        if self.num_lanes > 1:
            return [*stages, tuple(here)]
        return stages + [(rank, rank - self.width) for rank in here[self.width :]]


@dataclass(frozen=True)
class PageShare:
    """The part of a rank of a KV cache that neighbours in a stage have together.

    Page p is page p // num_owners of the owner p % num_owners. So a rank has one of num_owners pages, whichever pages a
    request gets.

    Attributes:
        num_owners: 1: the rank has all pages.
        owner: this rank's number among them.
    """

    num_owners: int = 1
    owner: int = 0

    @classmethod
    def of(cls, num_owners: int, place: int) -> PageShare:
        """Of the rank in this place of its stage."""
        return cls(num_owners, place % num_owners)

    def num_pages(self, total: int) -> int:
        """That each owner has memory for."""
        return -(-total // self.num_owners)


def shares(size: int, num_ranks: int, unit: int = 1) -> list[range]:
    """Ranges of whole units side by side, one per rank. They differ by at most one unit, the first are the largest.

    The last unit may be short. A range is empty if there are fewer units than ranks.
    """
    num_units = -(-size // unit)
    least, more = divmod(num_units, num_ranks)
    stops = [(rank + 1) * least + min(rank + 1, more) for rank in range(num_ranks)]
    starts = [0, *stops[:-1]]
    return [range(start * unit, min(stop * unit, size)) for start, stop in zip(starts, stops, strict=True)]


def place_experts(
    num_experts: int, num_ranks: int, strategy: str = "linear", num_redundant: int = 0
) -> tuple[tuple[int, ...], ...]:
    """The experts of each rank; ranks differ by at most one, and the first ones have the most.

    Args:
        strategy: `linear`: neighbours are on one rank. `round_robin`: they are on different ones.
        num_redundant: the first experts, in turns, are there once more. They are placed linearly.
    """
    if strategy == "round_robin" and not num_redundant:
        return tuple(tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks))
    places = shares(num_experts + num_redundant, num_ranks)
    return tuple(tuple(place % num_experts for place in own) for own in places)


def head_shares(num_q_heads: int, num_kv_heads: int, num_ranks: int, unit: int = 1) -> list[tuple[range, range]]:
    """Of each rank: its heads of q, and the heads of k and v that these read.

    Ranks have whole groups of `unit` heads of k and v, unless there are fewer groups than ranks. Then several ranks
    have the same head of k and v, and share its heads of q. The first rank has the most. A range of q is empty if there
    are fewer heads than ranks.
    """
    queries = num_q_heads // num_kv_heads
    if num_ranks <= -(-num_kv_heads // unit):
        heads = shares(num_kv_heads, num_ranks, unit)
        return [(range(kv.start * queries, kv.stop * queries), kv) for kv in heads]
    found = []
    for head, ranks in enumerate(reversed(shares(num_ranks, num_kv_heads))):
        for own in shares(queries, len(ranks)):
            begin = head * queries
            found.append((range(begin + own.start, begin + own.stop), range(head, head + 1)))
    return found
