"""Balances experts over ranks, so that all ranks get about the same number of tokens. It needs only numbers, no torch.

It searches for small changes, because every change moves weights. Two experts change places, or a copy of an expert
gives its place to a copy of another expert. The best change makes the sum of the squares of the ranks' loads smallest.
Each change lowers this sum, so the search ends.

Dimensions: E experts, P places of experts, R ranks. Rank r has places firsts[r] to firsts[r + 1], and no expert twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_GOOD_ENOUGH = 1.02  # the load of the busiest rank divided by the mean load
_LEAST_GAIN = 1e-5  # the least gain of a change, in squares of the mean load
_MOST_COPIED = 8  # experts of the busiest rank that may get another copy: the experts with the most tokens

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def loads_of_ranks(loads_E: Floats, experts_P: Ints, firsts: Sequence[int]) -> Floats:
    """Tokens of each rank, [R], if copies of an expert share its tokens."""
    shares_E = loads_E / np.maximum(np.bincount(experts_P, minlength=len(loads_E)), 1)
    sums = np.concatenate([[0.0], np.cumsum(shares_E[experts_P])])[np.asarray(firsts)]
    return np.diff(sums)


def balancedness(loads_R: Floats) -> float:
    """The mean load divided by the load of the busiest rank, in (0, 1]; 1 without any load."""
    most = float(loads_R.max())
    return float(loads_R.mean()) / most if most > 0 else 1.0


def improved(loads_E: Floats, experts_P: Ints, firsts: Sequence[int], most_changes: int) -> Ints:
    """The experts at all places after some changes; the same ones if no change is worth it.

    Args:
        loads_E: tokens of each expert.
        most_changes: places that may get another expert.
    """
    found = experts_P
    while (better := _changed(loads_E, found, firsts)) is not None:
        if np.count_nonzero(better != experts_P) > most_changes:
            break
        found = better
    return found


def _changed(loads_E: Floats, experts_P: Ints, firsts: Sequence[int]) -> Ints | None:
    """The experts after the best change; None: the places are good enough."""
    loads_R = loads_of_ranks(loads_E, experts_P, firsts)
    mean = loads_R.mean()
    busiest = int(loads_R.argmax())
    if loads_R[busiest] <= _GOOD_ENOUGH * mean:
        return None
    ranks_P = np.repeat(np.arange(len(loads_R)), np.diff(firsts))
    has_RE = np.zeros((len(loads_R), len(loads_E)), dtype=bool)
    has_RE[ranks_P, experts_P] = True
    step = (loads_E, experts_P, ranks_P, loads_R, has_RE, busiest)
    gain, changes = max((*_swaps(*step), *_copies(*step)), key=lambda change: change[0], default=(0.0, ()))
    if gain <= _LEAST_GAIN * mean * mean:
        return None
    better = experts_P.copy()
    for place, expert in changes:
        better[place] = expert
    return better


_Change = tuple[float, Sequence[tuple[int, int]]]  # the gain, and (place, expert)


def _swaps(
    loads_E: Floats, experts_P: Ints, ranks_P: Ints, loads_R: Floats, has_RE: NDArray[np.bool_], busiest: int
) -> Iterator[_Change]:
    """The best exchange of an expert of the busiest rank with an expert of another rank."""
    shares_P = (loads_E / np.maximum(has_RE.sum(0), 1))[experts_P]
    own, others = np.flatnonzero(ranks_P == busiest), np.flatnonzero(ranks_P != busiest)
    more = shares_P[own][:, None] - shares_P[others]
    gains = 2 * more * (loads_R[busiest] - loads_R[ranks_P[others]] - more)
    gains[has_RE[ranks_P[others]][:, experts_P[own]].T | has_RE[busiest, experts_P[others]]] = 0.0
    at, to = np.unravel_index(gains.argmax(), gains.shape)
    if gains[at, to] > 0:
        place, other = int(own[at]), int(others[to])
        yield float(gains[at, to]), ((place, int(experts_P[other])), (other, int(experts_P[place])))


def _copies(
    loads_E: Floats, experts_P: Ints, ranks_P: Ints, loads_R: Floats, has_RE: NDArray[np.bool_], busiest: int
) -> Iterator[_Change]:
    """Copies of busy experts of the busiest rank, in places of experts that have several copies."""
    copies_E = has_RE.sum(0)
    shares_E = loads_E / np.maximum(copies_E, 1)
    busy = sorted(experts_P[ranks_P == busiest].tolist(), key=lambda expert: -shares_E[expert])[:_MOST_COPIED]
    squares = float((loads_R**2).sum())
    for place in np.flatnonzero(copies_E[experts_P] > 1).tolist():
        rank, gone = int(ranks_P[place]), int(experts_P[place])
        gone_share = loads_E[gone] / (copies_E[gone] - 1)
        for expert in busy:
            if has_RE[rank, expert] or expert == gone:
                continue
            share = loads_E[expert] / (copies_E[expert] + 1)
            after_R = loads_R + has_RE[:, expert] * (share - shares_E[expert])
            after_R += has_RE[:, gone] * (gone_share - shares_E[gone])
            after_R[rank] += share - gone_share
            yield squares - float((after_R**2).sum()), ((place, expert),)
