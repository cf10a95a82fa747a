"""What the front end takes for a request: a line over the length of prompts, learnt from requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from quire.cost.overhead import Overhead, OverheadCorrection
from tests.cost.models import CONSTANTS, cost_model

TRUE = Overhead(4e-3, 1.2e-5)


def taught(lengths: Sequence[int], true: Overhead = TRUE, known: Overhead | None = None) -> OverheadCorrection:
    rng, correction = random.Random(0), OverheadCorrection(known)
    for _ in range(200):
        length = rng.choice(lengths)
        correction.add(length, true.seconds(length) * rng.lognormvariate(0, 0.1))
    return correction


def seconds(correction: OverheadCorrection, length: int) -> float:
    assert correction.overhead is not None
    return correction.overhead.seconds(length)


@pytest.mark.parametrize("known", [None, Overhead(1e-2, 3e-5)], ids=["first", "later"])
def test_it_is_learnt(known: Overhead | None) -> None:
    correction = taught([16, 200, 3000], known=known)
    for length in (1, 500, 3000):
        assert seconds(correction, length) == pytest.approx(TRUE.seconds(length), rel=0.3 if known else 0.1)


def test_requests_of_one_length_say_what_that_length_takes() -> None:
    """And other lengths have a share of it that is possible."""
    for length in (16, 1000):
        correction = taught([length])
        assert seconds(correction, length) == pytest.approx(TRUE.seconds(length), rel=0.1)
        assert seconds(correction, 1) > 0
        assert seconds(correction, 4 * length) < 5 * TRUE.seconds(length)
        for _ in range(5000):
            correction.add(length, TRUE.seconds(length))
        assert seconds(correction, length) == pytest.approx(TRUE.seconds(length), rel=0.02)
        assert seconds(correction, 4 * length) < 5 * TRUE.seconds(length)


@pytest.mark.parametrize("true", [Overhead(2e-2, -5e-6), Overhead(-5e-4, 1e-4)], ids=["falls", "below zero"])
def test_no_part_is_negative(true: Overhead) -> None:
    correction = taught([16, 200, 3000], true)
    assert correction.overhead is not None
    assert correction.overhead.per_request >= 0
    assert correction.overhead.per_prompt_token >= 0
    assert seconds(correction, 200) == pytest.approx(true.seconds(200), rel=0.4)


def test_a_request_that_was_held_up_is_no_rule() -> None:
    correction = taught([16, 200, 3000])
    before = seconds(correction, 200)
    correction.add(200, 1000.0)
    assert before < seconds(correction, 200) < 1.2 * before


def test_later_starts_know_it_and_fits_keep_it() -> None:
    cost = cost_model()
    assert cost.overhead is None
    for impossible in (-1.0, float("nan"), float("inf")):
        cost.observe_overhead(100, impossible)
    assert cost.corrected_fit().overhead is None
    for _ in range(100):
        cost.observe_overhead(100, 0.02)
    cost.calibrate(replace(cost.fit, constants=CONSTANTS))
    found = cost.corrected_fit().overhead
    assert found is not None
    assert found.seconds(100) == pytest.approx(0.02, rel=0.1)
    later = cost_model()
    later.calibrate(replace(cost.fit, overhead=found))
    later.observe_overhead(100, 0.02)
    assert later.overhead is not None
    assert later.overhead.seconds(100) == pytest.approx(found.seconds(100), rel=0.05)
