"""Benchmarks wait for the costs that a server keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from quire.cost.calibrate import Fit
from quire.cost.model import CostModel
from quire.measure.kept_costs import wait_for_costs
from quire.planning.step_costs import KnownCost
from tests.cost.models import CONSTANTS, cost_model

START = Fit(CONSTANTS, 0.1)
CORRECTED = replace(START, factors={7: 1.09})


def waited(kept: Iterator[KnownCost], other_than: Fit | None = None) -> tuple[Fit, float]:
    """The costs, and the seconds on a clock that only waiting moves."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return wait_for_costs(lambda: next(kept), 60, other_than=other_than, clock=lambda: now[0], sleep=sleep), now[0]


def known(fit: Fit, is_measured: bool = True) -> KnownCost:
    return KnownCost(CostModel(cost_model().arithmetic, fit), "test", is_measured)


def test_assumed_costs_are_not_taken() -> None:
    assert waited(iter([known(START, False)] * 3 + [known(START)])) == (START, 1.5)


def test_costs_of_a_start_are_not_taken_for_corrected_ones() -> None:
    """A server keeps corrections some seconds after its last request. Before, two seconds were waited."""
    assert waited(iter([known(START)] * 9 + [known(CORRECTED)]), START) == (CORRECTED, 4.5)


@pytest.mark.parametrize(
    ("kept", "other_than", "said"), [(known(START, False), None, "measured"), (known(START), START, "corrected")]
)
def test_a_server_that_keeps_none(kept: KnownCost, other_than: Fit | None, said: str) -> None:
    with pytest.raises(TimeoutError, match=f"has not {said}.* after 60 s"):
        waited(iter([kept] * 200), other_than)
