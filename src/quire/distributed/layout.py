"""Which rank has which units of something that ranks share. Integers only."""

from __future__ import annotations


def shares(size: int, num_ranks: int, unit: int = 1) -> list[range]:
    """Ranges of whole units side by side, one per rank. They differ by at most one unit, the first are the largest.

    The last unit may be short. A range is empty if there are fewer units than ranks.
    """
    num_units = -(-size // unit)
    least, more = divmod(num_units, num_ranks)
    stops = [(rank + 1) * least + min(rank + 1, more) for rank in range(num_ranks)]
    starts = [0, *stops[:-1]]
    return [range(start * unit, min(stop * unit, size)) for start, stop in zip(starts, stops, strict=True)]


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
