"""Covering designs: of a product of axes, the cases in which every pair of values meets. The others are slow tests.

Most defects show with one value (a format, an awkward size) or with two that meet (Kuhn, Wallace and Gallo, "Software
Fault Interactions and Implications for Software Testing", IEEE TSE 30(6), 2004). `make test` runs the cover, and
`make test-full` the whole product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import combinations, combinations_with_replacement, product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def covering(*axes: Sequence[Any], apart: Collection[tuple[int, int]] = ()) -> list[ParameterSet]:
    """Every case of the product, in its order; cases that a cover of all pairs does not need are marked slow.

    Args:
        apart: pairs of axes, the earlier one first, whose values need not meet: they share no code, or other tests
            have them meet.
    """
    cover = all_pairs([len(axis) for axis in axes], apart)
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(axes, case, strict=True)), marks=() if case in cover else pytest.mark.slow
        )
        for case in product(*(range(len(axis)) for axis in axes))
    ]


def in_turn(groups: Sequence[Sequence[tuple[Any, ...]]], values: Sequence[Any]) -> list[ParameterSet]:
    """The cases of all groups, each with one of the values in turn; with the other values they are marked slow.

    Each group begins with another value, so that cases at the same place of neighbouring groups have different ones.
    """
    return [
        pytest.param(*(*case, value), marks=() if (group_at + case_at) % len(values) == value_at else pytest.mark.slow)
        for group_at, cases in enumerate(groups)
        for case_at, case in enumerate(cases)
        for value_at, value in enumerate(values)
    ]


def all_pairs(sizes: Sequence[int], apart: Collection[tuple[int, int]] = ()) -> set[tuple[int, ...]]:
    """Cases, as an index into each axis, so that every two values of different axes meet in one, unless they are apart.

    Greedy: of the pairs that are left, the first one is completed by the values that meet most others for the first
    time, and of those by the one that has been taken least. The same sizes give the same cases.
    """
    axes = range(len(sizes))
    if len(sizes) < 2:
        return set(product(*map(range, sizes)))
    pairs = [pair for pair in combinations(axes, 2) if pair not in apart]
    left = {(a, i, b, j): None for a, b in pairs for i, j in product(range(sizes[a]), range(sizes[b]))}
    left |= {(a, i, a, i): None for a in axes for i in range(sizes[a])}  # of an axis that is apart from all others
    cases: set[tuple[int, ...]] = set()
    taken: Counter[tuple[int, int]] = Counter()  # by axis and value
    while left:
        a, i, b, j = next(iter(left))
        chosen = {a: i, b: j}
        for axis in axes:
            if axis not in chosen:
                chosen[axis] = max(
                    range(sizes[axis]),
                    key=lambda value: (_num_new(left, chosen, axis, value), -taken[axis, value]),
                )
        case = tuple(chosen[axis] for axis in axes)
        taken.update(enumerate(case))
        for first, second in combinations_with_replacement(axes, 2):
            left.pop((first, case[first], second, case[second]), None)
        cases.add(case)
    return cases


def _num_new(left: dict[tuple[int, int, int, int], None], chosen: dict[int, int], axis: int, value: int) -> int:
    """Pairs that are left and that this value of an axis would make with the chosen ones."""
    return sum(
        ((axis, value, other, at) if axis < other else (other, at, axis, value)) in left for other, at in chosen.items()
    )
