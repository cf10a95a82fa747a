"""The fit finds constants that predict steps it has not seen, also from noisy ones."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.cost.arithmetic import Demand, StepArithmetic
from quire.cost.calibrate import Fit, MeasuredStep, Rows, all_seconds, fit, points
from quire.cost.collectives import NO_LINKS, Exchanges, Link, Links, Traffic
from quire.cost.correct import MAX_RATIO
from quire.cost.model import CostModel
from quire.cost.step_time import Constants, amounts, prior, step_seconds
from quire.cost.store import CalibrationFile
from tests.cost.models import model_with

TRUE = Constants(2e-4, 5e-5, 4e-11, 2e-12, 5e-11, 4e-12, 4e-11, 2.3)
GUESS = prior(2e10, 5e11)
ARITHMETIC = StepArithmetic(model_with("full", "window"), "bfloat16", None, "auto")


def demand_of(rows: Rows) -> Demand:
    starts, counts = zip(*rows, strict=True)
    return ARITHMETIC.demand(ARITHMETIC.load(starts, counts, len(rows)))


def measured(noise: float, rng: random.Random) -> list[MeasuredStep]:
    demands = [demand_of(rows) for rows in points(128, 2048, 4096, 100_000, 16)]
    return [MeasuredStep(each, step_seconds(each, TRUE) * rng.lognormvariate(0, noise)) for each in demands]


def errors(steps: list[MeasuredStep], rng: random.Random) -> list[float]:
    """Relative, of steps that were not measured: decodes, with and without a prompt."""
    model = CostModel(ARITHMETIC, fit(steps, GUESS))
    found = []
    for _ in range(200):
        rows = [(rng.randint(1, 2000), 1) for _ in range(rng.randint(1, 100))]
        rows += [(rng.randint(0, 1500), rng.randint(2, 500))] * rng.randint(0, 1)
        starts, counts = zip(*rows, strict=True)
        load = ARITHMETIC.load(starts, counts, len(rows))
        found.append(abs(model.predict(load).seconds / step_seconds(ARITHMETIC.demand(load), TRUE) - 1))
    return found


def test_times_of_all_steps_are_those_of_each() -> None:
    demands = [step.demand for step in measured(0.0, random.Random(0))]
    demands += [
        demands[0]._replace(weight_bytes=0.0, linear_flops=0.0, rescanned_bytes=1e6),
        demands[0]._replace(num_logits=0),
    ]
    table, constants = np.array([amounts(demand) for demand in demands]), np.array([TRUE.fitted, GUESS.fitted])
    expected = [[step_seconds(demand, each) for demand in demands] for each in (TRUE, GUESS)]
    np.testing.assert_allclose(all_seconds(table, constants), expected, rtol=1e-13)


def test_exact_steps_give_exact_predictions() -> None:
    rng = random.Random(0)
    assert max(errors(measured(0.0, rng), rng)) < 0.02


def test_exchanges_of_ranks_are_not_fitted_and_not_counted_twice() -> None:
    """Measured steps contain them. Known links stay as they are, and the other constants explain the rest alone."""
    arithmetic = StepArithmetic(
        model_with("full", "window"), "bfloat16", None, "auto", "", Exchanges(Traffic(9, 30e3, 1e4), Traffic(1, 2e3))
    )
    links = Links(Link(1e-4, 1e-9), Link(5e-4, 1e-8))
    true, rng = replace(TRUE, links=links), random.Random(0)
    demands = []
    for rows in points(128, 2048, 4096, 100_000, 16):
        starts, counts = zip(*rows, strict=True)
        demands.append(arithmetic.demand(arithmetic.load(starts, counts, len(rows))))
    found = fit([MeasuredStep(each, step_seconds(each, true)) for each in demands], replace(GUESS, links=links))
    assert found.constants.links == links
    model, faster = (
        CostModel(arithmetic, found),
        CostModel(arithmetic, Fit(replace(found.constants, links=NO_LINKS), 0.1)),
    )
    for _ in range(50):
        load = arithmetic.load([rng.randint(1, 2000)] * 20, [1] * 20, 20)
        demand = arithmetic.demand(load)
        assert model.predict(load).seconds == pytest.approx(step_seconds(demand, true), rel=0.02)
        exchanged = model.predict(load).seconds - faster.predict(load).seconds
        assert exchanged == pytest.approx(9 * 1e-4 + 20 * (30e3 + 1e4) * 1e-9 + 5e-4 + 20 * 2e3 * 1e-8)
    slower = found.slower(1.5).constants
    assert step_seconds(demands[0], slower) == pytest.approx(1.5 * step_seconds(demands[0], found.constants))


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_machine_learns_from_short_steps_what_attention_costs(seed: int) -> None:
    """It measures no step of over half a second, and predicts one of three seconds."""
    slow, rng = Constants(2e-4, 5e-5, 1e-8, 1e-9, 8e-8, 2e-9, 4e-11, 2.3), random.Random(seed)
    demands = [demand_of(rows) for rows in points(128, 2048, 4096, 100_000, 16)]
    times = [(demand, step_seconds(demand, slow), rng.lognormvariate(0, 0.05)) for demand in demands]
    steps = [MeasuredStep(demand, seconds * noise) for demand, seconds, noise in times if seconds < 0.5]
    prompt, found = demand_of([(0, 700)]), fit(steps, prior(4e7, 1e9)).constants
    assert step_seconds(prompt, slow) > 2.5
    assert step_seconds(prompt, found) == pytest.approx(step_seconds(prompt, slow), rel=0.08)


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_a_step_that_was_held_up(seed: int) -> None:
    """Whichever step it is."""
    steps = measured(0.03, random.Random(seed))
    for index, step in enumerate(steps):
        held_up = [*steps[:index], MeasuredStep(step.demand, 3 * step.seconds), *steps[index + 1 :]]
        assert statistics.median(errors(held_up, random.Random(seed))) < 0.06


def test_a_calibration_learns_what_many_rows_cost_on_amx() -> None:
    """They go over the weights again, and the steps that are measured tell it apart from products."""
    arithmetic = StepArithmetic(model_with("full", "window"), "bfloat16", None, "auto", "amx")

    def demand(rows: Rows) -> Demand:
        starts, counts = zip(*rows, strict=True)
        return arithmetic.demand(arithmetic.load(starts, counts, len(rows)))

    steps = [demand(rows) for rows in points(128, 2048, 4096, 100_000, 16)]
    found = fit([MeasuredStep(each, step_seconds(each, TRUE)) for each in steps], GUESS).constants
    assert found.per_rescanned_byte == pytest.approx(TRUE.per_rescanned_byte, rel=0.1)
    for num_rows in (20, 40, 48, 90):
        wanted = step_seconds(demand([(50, 1)] * num_rows), TRUE)
        assert step_seconds(demand([(50, 1)] * num_rows), found) == pytest.approx(wanted, rel=0.02)


def test_the_interval_says_how_noisy_the_steps_were() -> None:
    rng = random.Random(0)
    quiet, noisy = (fit(measured(noise, rng), GUESS).spread for noise in (0.01, 0.3))
    assert quiet < 0.06
    assert noisy > 0.2


def test_the_interval_holds_times_that_do_not_count_for_the_constants() -> None:
    """A third of all times is longer by a half. The same times of each step are no further steps."""
    steps = measured(0.01, random.Random(0))
    several = [replace(step, times=(step.seconds, step.seconds, 1.5 * step.seconds)) for step in steps]
    equal = [replace(step, times=(step.seconds,) * 3) for step in steps]
    quiet, noisy, same = (fit(each, GUESS) for each in (steps, several, equal))
    assert noisy.constants == quiet.constants == same.constants
    assert noisy.spread == pytest.approx(0.5, rel=0.1)
    assert same.spread == pytest.approx(quiet.spread, rel=0.2)


def test_the_widest_interval_can_be_kept(tmp_path: Path) -> None:
    """Steps that other programs held up for most of their time: the calibration is written and read."""
    found = fit(measured(9.0, random.Random(0)), GUESS)
    assert found.spread == MAX_RATIO
    CalibrationFile(tmp_path / "calibrations", {}).write(found)
    assert CalibrationFile(tmp_path / "calibrations", {}).read() == found


def test_one_step_moves_the_guess() -> None:
    """Before the calibration, a start knows one step: predictions are of its size, and their interval is wide."""
    demand = demand_of([(0, 256)])
    seconds = 10 * step_seconds(demand, GUESS)
    found = fit([MeasuredStep(demand, seconds)], GUESS)
    assert step_seconds(demand, found.constants) == pytest.approx(seconds, rel=0.1)
    assert found.spread >= 0.5


@pytest.mark.parametrize(
    ("max_num_seqs", "budget", "max_model_len", "num_tokens"),
    [(128, 2048, 4096, 100_000), (1, 64, 200, 64), (4, 4, 2, 16), (256, 2048, 40_960, 704), (128, 2048, 4096, 1088)],
)
def test_points_are_steps_that_the_engine_may_take(
    max_num_seqs: int, budget: int, max_model_len: int, num_tokens: int
) -> None:
    """Each row has blocks of its own, also where the KV cache is small."""
    found = list(points(max_num_seqs, budget, max_model_len, num_tokens, 16))
    assert found
    for rows in found:
        assert len(rows) <= max_num_seqs
        assert sum(count for _, count in rows) <= budget
        assert sum(-(-(start + count) // 16) * 16 for start, count in rows) <= num_tokens
        assert all(start >= 0 and count >= 1 and start + count <= max_model_len for start, count in rows)
