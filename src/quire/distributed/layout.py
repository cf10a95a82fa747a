"""The places of ranks, and how ranks share layers, experts, heads and pages. Integers only."""

from __future__ import annotations

from dataclasses import dataclass

MOST_RANKS = 64  # of a group: kMaxRanks of csrc/include/quire/shared_group.h
MOST_LINKS = MOST_RANKS + 1  # of a rank with other machines: one for each in its stage, and one for each neighbour


@dataclass(frozen=True)
class Grid:
    """The places of all ranks, in pipeline stages or in lanes. A model may have stages or lanes, but not both.

    Rank 0 is in the last stage. It samples, and the engine runs in its process.

    Attributes:
        width: the number of ranks that share a stage or a lane (tensor parallelism).
        num_stages: the number of pipeline stages. Each has some of the layers.
        num_nodes: the number of machines. Each has whole stages, whole lanes, or the same part of one stage.
        num_lanes: the number of lanes (data parallelism). Lanes share only experts. Their ranks lie one lane after the
            other.
    """

    width: int = 1
    num_stages: int = 1
    num_nodes: int = 1
    num_lanes: int = 1

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.width * self.num_stages * self.num_lanes

    @property
    def num_local(self) -> int:
        """The number of ranks on each machine."""
        return self.size // self.num_nodes

    def node(self, rank: int) -> int:
        """The machine of a rank. Machine 0 has the last stages."""
        return rank // self.num_local

    def ranks_of(self, node: int) -> range:
        """The ranks of a machine."""
        return range(node * self.num_local, (node + 1) * self.num_local)

    def stage(self, rank: int) -> int:
        """The stage of a rank. Stage 0 has the first layers."""
        return self.num_stages - 1 - rank // (self.width * self.num_lanes)

    def lane(self, rank: int) -> int:
        """The lane of a rank."""
        return rank // self.width % self.num_lanes

    def place(self, rank: int) -> int:
        """The index of a rank among the ranks of its stage or lane."""
        return rank % self.width

    def stage_members(self, rank: int) -> tuple[int, ...]:
        """All ranks of the stage or lane of a rank."""
        first = rank - self.place(rank)
        return tuple(range(first, first + self.width))

    def before(self, rank: int) -> int | None:
        """The rank of the previous stage that sends the input to this rank; None: this is the first stage."""
        return rank + self.width if self.num_stages > 1 and rank + self.width < self.size else None

    def behind(self, rank: int) -> int | None:
        """The rank of the next stage that gets the output of this rank; None: this is the last stage."""
        return rank - self.width if self.num_stages > 1 and rank >= self.width else None

    def widest_members(self, rank: int) -> tuple[int, ...]:
        """All ranks of the widest group of a rank, which may be on several machines: its stage, or all lanes."""
        return tuple(range(self.size)) if self.num_lanes > 1 else self.stage_members(rank)

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks of its widest group to which a rank is connected: on each other machine, the one in its place."""
        members = self.widest_members(rank)
        return tuple(each for each in members if each != rank and (each - rank) % self.num_local == 0)

    def far(self, rank: int) -> tuple[int, ...]:
        """All ranks of other machines with which a rank exchanges rows."""
        neighbours = (each for each in (self.before(rank), self.behind(rank)) if each is not None)
        return (*self.peers(rank), *(each for each in neighbours if self.node(each) != self.node(rank)))

    def groups(self, node: int = 0) -> list[tuple[int, ...]]:
        """All groups of ranks of a machine that exchange something or agree on something.

        They are the ranks of a stage or of a lane, and all ranks of all lanes. Stages also have pairs of a sender and a
        receiver, and all ranks of the machine if they are few. A stage, and all lanes, may have ranks on other machines
        too.
        """
        here = self.ranks_of(node)
        stages = [self.stage_members(rank) for rank in here[:: self.width] if self.width > 1]
        if self.num_lanes > 1:
            return [*stages, self.widest_members(here[0])]
        pairs = [(rank, rank - self.width) for rank in here[self.width :]]
        everyone = [tuple(here)] if self.width < len(here) <= MOST_RANKS else []
        return stages + pairs + everyone


@dataclass(frozen=True)
class PageShare:
    """A rank's share of a KV cache that neighbouring ranks of a stage have together.

    Page p is page p // num_owners of owner p % num_owners. So each owner has one page in every num_owners pages.

    Attributes:
        num_owners: the number of ranks that share the cache; 1: the rank has all pages.
        owner: the index of this rank among them.
    """

    num_owners: int = 1
    owner: int = 0

    @classmethod
    def of(cls, num_owners: int, place: int) -> PageShare:
        """The share of the rank at this place of its stage: see Grid.place."""
        return cls(num_owners, place % num_owners)

    def num_pages(self, total: int) -> int:
        """The number of pages for which each owner has memory, if the cache has `total` pages."""
        return -(-total // self.num_owners)


ALL_PAGES = PageShare()


def shares(size: int, num_ranks: int, unit: int = 1) -> list[range]:
    """Cut `size` elements into ranges of whole units, one for each rank.

    Ranges differ by at most one unit, and the first ones are the largest. The last unit may be short. Some ranges are
    empty if there are fewer units than ranks.
    """
    num_units = -(-size // unit)
    least, more = divmod(num_units, num_ranks)
    stops = [(rank + 1) * least + min(rank + 1, more) for rank in range(num_ranks)]
    starts = [0, *stops[:-1]]
    return [range(start * unit, min(stop * unit, size)) for start, stop in zip(starts, stops, strict=True)]


def place_experts(
    num_experts: int, num_ranks: int, strategy: str = "linear", num_redundant: int = 0
) -> tuple[tuple[int, ...], ...]:
    """The experts of each rank. The numbers of experts differ by at most one, and the first ranks have the most.

    Args:
        strategy: `linear`: neighbouring experts are on one rank. `round_robin`: they are on different ranks.
        num_redundant: the number of additional copies of experts. Copies are of experts 0, 1, 2, ... in turn, and the
            places are linear then.
    """
    if strategy == "round_robin" and not num_redundant:
        return tuple(tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks))
    places = shares(num_experts + num_redundant, num_ranks)
    return tuple(tuple(place % num_experts for place in own) for own in places)


def head_shares(num_q_heads: int, num_kv_heads: int, num_ranks: int, unit: int = 1) -> list[tuple[range, range]]:
    """For each rank: its query heads, and the KV heads that they read.

    A rank has whole groups of `unit` KV heads, unless there are fewer groups than ranks. Then several ranks have the
    same KV head, and share its query heads. The first rank has the most. A range of query heads is empty if there are
    fewer heads than ranks.
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
