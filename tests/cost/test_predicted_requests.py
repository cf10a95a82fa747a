"""benchmarks/predict.py compares requests with the sums of their steps' predictions, and with the sums of both ends."""

from __future__ import annotations

import random
from itertools import cycle

import pytest

from benchmarks import predict
from quire.cost.calibrate import Fit
from quire.simulate.executor import UntaughtCost
from tests.cost.models import CONSTANTS, cost_model
from tests.scheduler.driver import TimedDriver

WORK = predict.Work([], (20, 30, 40), late_prompt=10)


def _run(*slowness: float) -> dict[str, list[list[float]]]:
    """The requests of a load whose steps take these multiples of their prediction, in turns."""
    multiples = cycle(slowness)
    cost = UntaughtCost(cost_model().arithmetic, Fit(CONSTANTS, 0.25))
    driver = TimedDriver(cost, slowness=lambda: next(multiples))
    return predict.run(driver.core, WORK, random.Random(0), 100, lambda: driver.now)


@pytest.mark.parametrize(
    ("slowness", "is_inside"), [(1.0, True), (1.2, True), (1.3, False), (0.82, True), (0.78, False)]
)
def test_intervals_are_those_of_the_steps(slowness: float, is_inside: bool) -> None:
    found = _run(slowness)
    assert len(found["ttft"]) == 4
    assert len(found["itl"]) == predict.OUTPUT_TOKENS - 1
    for quantity in predict.QUANTITIES[1:]:
        ratio = slowness if quantity == "throughput" else 1 / slowness
        assert predict.errors_of(found[quantity]) == pytest.approx([abs(ratio - 1)] * len(found[quantity]))
        assert {predict.is_inside(value) for value in found[quantity]} == {is_inside}, quantity
    assert set(found[predict.RUNNING]) == {is_inside}


def test_errors_of_both_signs_cancel_in_a_sum() -> None:
    """No single step lies in its interval, and the answers of all requests together do."""
    found = _run(1.35, 0.65)
    assert not any(found[predict.RUNNING])
    assert not any(predict.is_inside(value) for value in found["itl"])
    assert all(predict.is_inside(value) for value in found["throughput"])
