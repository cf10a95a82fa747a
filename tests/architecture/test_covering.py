"""Covering designs: every pair of values meets in `make test`, and no case of the product is lost."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import all_pairs, covering


@pytest.mark.parametrize("sizes", [(27, 5, 3, 5), (2, 2), (3, 4, 2), (5,), (1, 1, 4), (4, 4, 4, 4, 4)], ids=str)
def test_every_pair_meets(sizes: tuple[int, ...]) -> None:
    cases = all_pairs(sizes)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(case[a], case[b]) for case in cases} == set(product(range(sizes[a]), range(sizes[b])))
    largest = sorted(sizes)[-2:]
    assert len(cases) <= 1.6 * largest[0] * largest[-1], "far more cases than the two longest axes ask for"


def test_values_of_axes_that_are_apart_all_occur() -> None:
    cases = all_pairs((5, 6, 3), apart=[(0, 1)])
    assert {(case[0], case[2]) for case in cases} == set(product(range(5), range(3)))
    assert {(case[1], case[2]) for case in cases} == set(product(range(6), range(3)))
    assert len(cases) < 30
    for axis, size in enumerate((1, 6, 3)):
        alone = all_pairs((1, 6, 3), apart=[(0, 1), (1, 2)])
        assert {case[axis] for case in alone} == set(range(size))


def test_the_product_is_whole_and_the_rest_is_slow() -> None:
    cases = covering("abc", (1, 2), (True, False))
    assert [case.values for case in cases] == list(product("abc", (1, 2), (True, False)))
    assert sum(not case.marks for case in cases) == len(all_pairs((3, 2, 2))) < len(cases)
