"""StepCost: within the factor that a step may be late by, from the first step on."""

from __future__ import annotations

import random

import pytest

from quire.engine.step_cost import StepCost

MAY_BE_LATE_BY = 20


def cost_of(num_tokens: int) -> float:
    """Seconds of a step that reads all weights once and then computes: as decoders behave."""
    return 0.1 + 0.01 * num_tokens


def test_nothing_is_known() -> None:
    assert StepCost().predict(100) == 0.0


@pytest.mark.parametrize("num_tokens", [1, 2, 100, 256, 300, 2048, 8192])
def test_a_size_that_was_not_seen(num_tokens: int) -> None:
    """After what every start has seen: a run of 256 tokens, and one token."""
    cost = StepCost()
    cost.add(256, cost_of(256))
    cost.add(1, cost_of(1))
    assert cost_of(num_tokens) <= MAY_BE_LATE_BY * cost.predict(num_tokens), "a healthy engine would be killed"
    assert cost.predict(num_tokens) <= MAY_BE_LATE_BY * cost_of(num_tokens), "a wedge would hardly be noticed"


def test_only_larger_steps_are_known() -> None:
    cost = StepCost()
    cost.add(256, 2.0)
    assert cost.predict(3) == 2.0


def test_it_follows_what_the_machine_does() -> None:
    cost = StepCost()
    rng = random.Random(0)
    for slowness in (1.0, 8.0, 0.5):
        for _ in range(200):
            num_tokens = rng.choice([1, 2, 5, 60, 512, 700])
            cost.add(num_tokens, slowness * cost_of(num_tokens))
        for num_tokens in (1, 5, 60, 600):
            assert cost.predict(num_tokens) == pytest.approx(slowness * cost_of(num_tokens), rel=0.5)


def test_one_outlier_is_forgotten() -> None:
    cost = StepCost()
    cost.add(4, 1.0)
    cost.add(4, 1000.0)
    for _ in range(20):
        cost.add(4, 1.0)
    assert cost.predict(4) == pytest.approx(1.0, rel=0.01)
