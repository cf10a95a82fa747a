"""The cost model: it learns from running steps, and answers the scheduler and the health check."""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import extension
from quire.cost.arithmetic import Load, StepArithmetic
from quire.cost.calibrate import FEW_STEPS_SPREAD, Fit, MeasuredStep, fit
from quire.cost.correct import HALF_COLD_SECONDS, SHORTEST_PAUSE, Correction
from quire.cost.model import CostModel
from quire.cost.step_time import MIN_SPREAD, Constants, prior, reading_share, step_seconds
from quire.cost.store import CalibrationFile
from tests.cost.models import CONSTANTS, cost_model, model_with

needs_extension = pytest.mark.skipif(extension.C is None, reason="needs the extension")
MAY_BE_LATE_BY = 20  # frontend/supervisor.py: a step that takes longer than this multiple of its prediction has hung
ARITHMETIC = cost_model().arithmetic
WITHOUT_HOST = replace(CONSTANTS, per_step=1e-6, per_logit_row=1e-7)


def load_of(num_tokens: int) -> Load:
    """A prompt of this number of tokens, or one decoded token."""
    return ARITHMETIC.load([0], [num_tokens], 1)


@pytest.mark.parametrize("num_tokens", [1, 2, 100, 256, 300, 2048])
@pytest.mark.parametrize("slowness", [0.3, 1.0, 10.0])
def test_what_every_start_has_measured_is_enough_for_health(num_tokens: int, slowness: float) -> None:
    """After a run of 256 tokens alone, whatever the machine: no healthy engine is killed, and a hang is noticed."""

    def seconds(load: Load) -> float:
        return slowness * step_seconds(ARITHMETIC.demand(load), CONSTANTS)

    first = load_of(256)
    cost = CostModel(ARITHMETIC, fit([MeasuredStep(ARITHMETIC.demand(first), seconds(first))], prior(2e10, 5e11)))
    predicted = cost.predict(load_of(num_tokens)).high
    assert seconds(load_of(num_tokens)) <= MAY_BE_LATE_BY * predicted, "a healthy engine would be killed"
    assert predicted <= MAY_BE_LATE_BY * seconds(load_of(num_tokens)), "a wedge would hardly be noticed"


def calls_of_a_step(cost: CostModel, num_rows: int) -> int:
    """Calls of functions, of Python and of C, for the prediction of a decode and its correction."""
    calls = itertools.count()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            next(calls)

    starts, counts = list(range(num_rows)), [1] * num_rows
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        load, predicted = cost.predict_rows(starts, counts, num_rows)
        cost.observe(load, predicted.seconds, 1.02 * predicted.seconds)
    finally:
        sys.setprofile(before)
    return next(calls)


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=needs_extension)])
def test_the_work_of_a_prediction_does_not_grow_with_rows_and_is_little(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server that has seen steps of ten sizes. In an engine most calls wait for their code from memory."""
    monkeypatch.setattr(extension, "is_used", lambda: is_compiled)
    cost = CostModel(StepArithmetic(model_with("full"), "bfloat16", None, "auto"), Fit(CONSTANTS, 0.05))
    sizes = [1 << size for size in range(10)]
    for num_rows in (*sizes, *sizes):
        few = calls_of_a_step(cost, num_rows)
    assert calls_of_a_step(cost, 1) == calls_of_a_step(cost, 256) == few <= (8 if is_compiled else 80)


def test_it_follows_what_the_machine_does() -> None:
    cost, rng = cost_model(), random.Random(0)
    for slowness in (1.0, 4.0, 0.5):
        for _ in range(400):
            load = load_of(rng.choice([1, 2, 5, 60, 512, 700]))
            seconds = slowness * step_seconds(ARITHMETIC.demand(load), CONSTANTS)
            cost.observe(load, cost.predict(load).seconds, seconds)
        for num_tokens in (1, 5, 60, 600):
            expected = slowness * step_seconds(ARITHMETIC.demand(load_of(num_tokens)), CONSTANTS)
            assert cost.predict(load_of(num_tokens)).seconds == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("slowness", [1.6, 0.6])
def test_a_machine_that_becomes_slower_is_noticed_within_some_steps(slowness: float) -> None:
    """Ten steps, where a sixteenth of each error would leave half of it, in noise of a twentieth."""
    cost, load, rng = cost_model(), load_of(4), random.Random(0)
    true = step_seconds(ARITHMETIC.demand(load), CONSTANTS)
    for num_steps, now, near in ((200, 1.0, 0.03), (10, slowness, 0.08), (10, 1.0, 0.08)):
        for _ in range(num_steps):
            cost.observe(load, cost.predict(load).seconds, now * true * rng.lognormvariate(0, 0.05))
        assert cost.predict(load).seconds == pytest.approx(now * true, rel=near)


@pytest.mark.parametrize("slowness", [1.5, 0.6])
def test_a_size_that_does_not_run_follows_a_change_of_the_machine_at_once(slowness: float) -> None:
    """Both have run often. Then five steps of one of them show that the machine is slower, or faster."""
    cost, running, resting = cost_model(), load_of(4), load_of(2)
    true = {load: step_seconds(ARITHMETIC.demand(load), CONSTANTS) for load in (running, resting)}
    for _ in range(100):
        for load, seconds in true.items():
            cost.observe(load, cost.predict(load).seconds, seconds)
    for _ in range(5):
        cost.observe(running, cost.predict(running).seconds, slowness * true[running])
    assert cost.predict(running).seconds == pytest.approx(slowness * true[running], rel=0.05)
    assert cost.predict(resting).seconds == pytest.approx(slowness * true[resting], rel=0.1)


def test_sizes_that_take_turns_do_not_hurry_each_other() -> None:
    """Their errors have opposite signs, which is no drift of the machine."""
    cost, first, second = cost_model(), load_of(2), load_of(3)
    true = {first: 1.3 * cost.predict(first).seconds, second: cost.predict(second).seconds / 1.3}
    for _ in range(20):
        for load, seconds in true.items():
            cost.observe(load, cost.predict(load).seconds, seconds)
    for load, seconds in true.items():
        assert cost.predict(load).seconds == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("share_of_delays", [0.0, 0.005, 0.03, 0.2])
def test_the_margin_is_what_recent_steps_have_needed(share_of_delays: float) -> None:
    """Rare long delays, which no normal distribution has: 99 of 100 steps beside a prompt are within the margin."""
    cost, rng = cost_model(), random.Random(0)

    def run(num_steps: int) -> float:
        within = 0
        for _ in range(num_steps):
            load = ARITHMETIC.load([50, 0], [1, rng.choice([20, 60, 300])], 1)
            predicted, margin = cost.predict(load).seconds, cost.margin(0.99)
            seconds = step_seconds(ARITHMETIC.demand(load), CONSTANTS) * rng.lognormvariate(0, 0.02)
            seconds *= 1.8 if rng.random() < share_of_delays else 1.0
            within += seconds <= predicted * margin
            cost.observe(load, predicted, seconds)
        return within / num_steps

    run(600)
    assert run(3000) >= 0.98
    assert (cost.margin(0.99) > 1.5) == (share_of_delays > 0.01)


@pytest.mark.parametrize("factors", [{}, {8: 1.0, 9: 1.5}, {8: 1.2, 9: 0.5}])
def test_a_row_beside_a_prompt_has_the_correction_of_its_step(factors: dict[int, float]) -> None:
    """The correction of another size says nothing about one more row."""
    seconds, row_seconds = CostModel(ARITHMETIC, Fit(CONSTANTS, 0.05, factors)).beside_prompts(256)
    factor = factors.get(8, 1.0)
    alone, beside = ARITHMETIC.load([0], [256], 1), ARITHMETIC.load([50] * 32 + [0], [1] * 32 + [256], 33)
    without, longer = (step_seconds(ARITHMETIC.demand(load), CONSTANTS) for load in (alone, beside))
    assert seconds == pytest.approx(factor * without)
    assert row_seconds == pytest.approx(factor * (longer - without) / 32, rel=0.2)


def test_decodes_say_nothing_about_steps_with_prompts() -> None:
    """They are many, and prompts are fitted into the others."""
    cost, decode, mixed = cost_model(), ARITHMETIC.load([50], [1], 1), ARITHMETIC.load([50, 0], [1, 30], 1)
    for load, slowness in ((mixed, 1.6), (decode, 1.0)):
        for _ in range(700):
            seconds = step_seconds(ARITHMETIC.demand(load), CONSTANTS)
            cost.observe(load, seconds, slowness * seconds)
    assert cost.margin(0.99) == pytest.approx(1.6)


def test_one_step_that_was_held_up_moves_little() -> None:
    cost, load = cost_model(), load_of(4)
    before = cost.predict(load).seconds
    for _ in range(20):
        cost.observe(load, before, before)
    cost.observe(load, before, 1000 * before)
    assert cost.predict(load).seconds < 1.25 * before


def test_on_a_noisy_machine_the_interval_widens_and_shrinks_again() -> None:
    cost, load, rng = cost_model(spread=0.05), load_of(4), random.Random(0)
    spreads = []
    for noise in (0.5, 0.0):
        for _ in range(200):
            predicted = cost.predict(load).seconds
            cost.observe(load, predicted, predicted * rng.lognormvariate(0, noise))
        spreads.append(cost.spread)
    assert spreads[0] > 0.5
    assert spreads[1] < 0.1
    found = cost.predict(load)
    assert found.high / found.seconds - 1 >= MIN_SPREAD * 0.99, "no machine repeats a step exactly"


def test_nine_of_ten_steps_lie_in_the_interval() -> None:
    cost, load, rng = cost_model(spread=FEW_STEPS_SPREAD), load_of(4), random.Random(0)
    true = cost.predict(load).seconds
    inside = []
    for index in range(2000):
        found, seconds = cost.predict(load), true * rng.lognormvariate(0, 0.1)
        if index >= 200:
            inside.append(found.low <= seconds <= found.high)
        cost.observe(load, found.seconds, seconds)
    assert 0.82 < sum(inside) / len(inside) < 0.97


def test_a_calibration_forgets_what_steps_have_taught() -> None:
    cost, load = cost_model(), load_of(4)
    cost.observe(load, 1.0, 2.0)
    cost.calibrate(Fit(CONSTANTS, 0.1))
    assert cost.predict(load).seconds == pytest.approx(step_seconds(ARITHMETIC.demand(load), CONSTANTS))


def test_a_later_start_knows_what_steps_have_corrected() -> None:
    cost, decode, prompt = cost_model(), load_of(4), load_of(500)
    true = cost.predict(decode).seconds
    for _ in range(50):
        cost.observe(decode, cost.predict(decode).seconds, 1.5 * true)
    later = cost_model()
    later.calibrate(cost.corrected_fit())
    assert later.predict(decode).seconds == pytest.approx(1.5 * true, rel=0.01)
    assert later.predict(prompt).seconds == cost.predict(prompt).seconds
    assert later.num_corrections == 0
    for _ in range(3):
        later.observe(decode, later.predict(decode).seconds, true)
    assert later.predict(decode).seconds < 1.3 * true, "the first steps of a start count more than an earlier start"


@pytest.mark.parametrize("cold", [0.0, 5e-3])
def test_what_a_pause_costs_is_learnt(cold: float) -> None:
    """Whatever the steps and the pauses are. Steps without a pause are predicted as before."""
    cost, rng, loads = cost_model(), random.Random(0), [load_of(count) for count in (1, 60, 200)]

    def seconds(load: Load, pause: float) -> float:
        return step_seconds(ARITHMETIC.demand(load), CONSTANTS) + cold * pause / (pause + HALF_COLD_SECONDS)

    for _ in range(60):
        load = rng.choice(loads)
        for pause in (rng.choice([0.15, 0.5, 3.0, 100.0]), 0.0, 0.002):
            measured = seconds(load, pause) * rng.lognormvariate(0, 0.03)
            cost.observe(load, cost.predict(load, pause).seconds, measured, pause)
    later = cost_model()
    later.calibrate(cost.corrected_fit())
    for load, pause in itertools.product(loads, (0.0, 0.3, 1.0, 20.0)):
        for known in (cost, later):
            assert known.predict(load, pause).seconds == pytest.approx(seconds(load, pause), rel=0.1)


def test_one_delayed_step_after_a_pause_is_no_rule() -> None:
    cost, load = cost_model(), load_of(60)
    true = cost.predict(load).seconds
    cost.observe(load, true, 1000 * true, SHORTEST_PAUSE)
    assert cost.predict(load, 1e9).seconds < 40 * true
    for _ in range(8):
        cost.observe(load, cost.predict(load, 5.0).seconds, true, 5.0)
    assert cost.predict(load, 5.0).seconds < 1.4 * true


def test_one_step_changes_little_of_what_an_earlier_start_has_learnt() -> None:
    """And other constants, which a calibration finds step by step, change nothing of it."""
    cost, load, cold = cost_model(), load_of(60), 0.05
    cost.calibrate(replace(cost.fit, cold=cold))
    true = cost.predict(load).seconds
    for ratio, pause in ((1.25, SHORTEST_PAUSE), (1.0, SHORTEST_PAUSE)):
        cost.observe(load, cost.predict(load, pause).seconds, ratio * true, pause)
        cost.calibrate(replace(cost.fit, cold=0.0))
        assert cold / 2 < cost.corrected_fit().cold < 2 * cold


def test_corrections_of_impossible_times_can_be_kept(tmp_path: Path) -> None:
    file = CalibrationFile(tmp_path / "kept", {"machine": "m"})
    for ratio in (1.0, 1e9, 1e-9):
        cost, load = cost_model(), load_of(4)
        for _ in range(500):
            predicted = cost.predict(load).seconds
            cost.observe(load, predicted, ratio * predicted)
        file.write(cost.corrected_fit())
        assert file.read() == cost.corrected_fit()


@given(st.integers(0, 20), st.integers(0, 3000), st.integers(0, 600), st.floats(0, 0.1))
def test_the_tokens_that_fit_in_a_time(num_decodes: int, start: int, most: int, seconds: float) -> None:
    cost = cost_model()
    starts, counts = [100] * num_decodes, [1] * num_decodes
    load = ARITHMETIC.load(starts, counts, num_decodes)
    count = cost.room_within(seconds, 0.5, starts, counts, num_decodes).fitting(start, most)
    assert 0 <= count <= most
    if count:
        assert cost.predict(ARITHMETIC.with_row(load, start, count, 1)).seconds <= seconds
    if count < most:
        assert cost.predict(ARITHMETIC.with_row(load, start, count + 1, 1)).seconds > seconds


@pytest.mark.parametrize(
    ("constants", "bound"),
    [
        (Constants(1.0, 0, 1e-11, 1e-12, 1e-11, 1e-12, 4e-11, 2.0), "host"),
        (Constants(1e-9, 0, 1e-3, 1e-12, 1e-11, 1e-12, 4e-11, 2.0), "memory"),
        (Constants(1e-9, 0, 1e-11, 1e-3, 1e-11, 1e-12, 4e-11, 2.0), "arithmetic"),
        (Constants(1e-9, 0, 1e-11, 1e-12, 1e-11, 1e-3, 4e-11, 2.0), "attention"),
    ],
)
def test_what_binds_is_named(constants: Constants, bound: str) -> None:
    assert cost_model(constants).predict(ARITHMETIC.load([500], [1], 1)).bound == bound


def test_a_step_that_fills_its_tiles_has_the_size_of_those_with_fewer_rows() -> None:
    correction = Correction(0.03, [], lambda size: 1.0)
    correction.add(24, 1.0, 2.0)
    correction.add(40, 1.0, 0.5)
    assert correction.factor(32) == correction.factor(17) > correction.factor(33) == correction.factor(64)
    assert correction.factor(1) == correction.factor(16), "no step is nearer than 24"


def test_a_size_that_nobody_asks_for_any_more_is_not_believed_to_be_slow_for_ever() -> None:
    """A scheduler with a target avoids sizes that it believes to be slow, so no step of that size corrects the
    belief.
    """
    cost, slow, usual = cost_model(), load_of(1000), load_of(10)
    true = cost.predict(slow).seconds
    for _ in range(6):
        cost.observe(slow, cost.predict(slow).seconds, 10 * true)
    assert cost.predict(slow).seconds > 3 * true
    for _ in range(2000):
        seconds = step_seconds(ARITHMETIC.demand(usual), CONSTANTS)
        cost.observe(usual, cost.predict(usual).seconds, seconds)
    assert cost.predict(slow).seconds < 1.1 * true


@pytest.mark.parametrize("slowness", [0.7, 1.4])
def test_sizes_that_are_not_run_stay_comparable_where_the_machine_changes(slowness: float) -> None:
    """Steps with drafts are the only ones that run, and their price is compared with that of steps without drafts."""
    cost, decode, verify = cost_model(), load_of(1), load_of(6)
    true = {load: step_seconds(ARITHMETIC.demand(load), CONSTANTS) for load in (decode, verify)}
    for load in (decode, verify) * 20:
        cost.observe(load, cost.predict(load).seconds, true[load])
    for _ in range(40):
        cost.observe(verify, cost.predict(verify).seconds, slowness * true[verify])
    found = cost.predict(verify).seconds / cost.predict(decode).seconds
    assert found == pytest.approx(true[verify] / true[decode], rel=0.12)


@pytest.mark.parametrize("slowness", [0.6, 1.65])
def test_a_slower_memory_slows_no_prompt(slowness: float) -> None:
    """Decodes read the weights, and prompts compute."""
    cost, decode, prompt = cost_model(WITHOUT_HOST), load_of(1), load_of(256)
    slower = replace(WITHOUT_HOST, per_weight_byte=slowness * WITHOUT_HOST.per_weight_byte)
    for _ in range(5):
        predicted = cost.predict(prompt).seconds
        cost.observe(prompt, predicted, step_seconds(ARITHMETIC.demand(prompt), WITHOUT_HOST))
    for _ in range(60):
        cost.observe(decode, cost.predict(decode).seconds, step_seconds(ARITHMETIC.demand(decode), slower))
    expected = step_seconds(ARITHMETIC.demand(prompt), slower)
    assert cost.predict(prompt).seconds == pytest.approx(expected, rel=0.1)


def test_how_much_of_a_step_is_reading() -> None:
    """It is what a small change of the memory's speed does to the step."""
    fast = WITHOUT_HOST
    slower = replace(
        fast,
        per_weight_byte=1.001 * fast.per_weight_byte,
        per_kv_byte=1.001 * fast.per_kv_byte,
        per_rescanned_byte=1.001 * fast.per_rescanned_byte,
    )
    shares = []
    for isa in ("", "amx"):
        arithmetic = cost_model(isa=isa).arithmetic
        for starts, counts in (([0], [1]), ([0], [20]), ([500] * 8, [1] * 8), ([0], [900])):
            demand = arithmetic.demand(arithmetic.load(starts, counts, len(starts)))
            shares.append(reading_share(demand, fast))
            change = step_seconds(demand, slower) / step_seconds(demand, fast) - 1
            assert shares[-1] == pytest.approx(1000 * change, rel=0.01)
    assert max(shares) > 0.5
    assert min(shares) < 0.1


def test_the_first_step_of_a_size_says_little_about_sizes_that_are_known() -> None:
    """It takes memory and is recorded, so it takes longer than later ones."""
    cost, decode = cost_model(), load_of(1)
    expected = cost.predict(decode).seconds
    for _ in range(100):
        cost.observe(decode, cost.predict(decode).seconds, expected)
    for num_tokens in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        load = load_of(num_tokens)
        cost.observe(load, cost.predict(load).seconds, 2 * cost.predict(load).seconds)
        cost.observe(decode, cost.predict(decode).seconds, expected)
    assert cost.predict(decode).seconds == pytest.approx(expected, rel=0.1)


def test_sizes_that_take_turns_are_corrected_one_by_one() -> None:
    """One is predicted too short and its neighbour too long: neither hides the error of the other."""
    cost, loads = cost_model(), {1.25: load_of(16), 0.8: load_of(32)}
    true = {factor: factor * cost.predict(load).seconds for factor, load in loads.items()}
    for factor, load in list(loads.items()) * 20:
        cost.observe(load, cost.predict(load).seconds, true[factor])
    for factor, load in loads.items():
        assert cost.predict(load).seconds == pytest.approx(true[factor], rel=0.08)


@pytest.mark.parametrize("isa", ["", "amx"])
@given(num_rows=st.integers(1, 40), start=st.integers(0, 3000), most=st.integers(0, 60))
def test_drafts_lengthen_a_step_as_predicted(isa: str, num_rows: int, start: int, most: int) -> None:
    """Also where another tile of rows begins: drafts that fill up a tile do not cost what the next one does."""
    cost, counts = cost_model(isa=isa), [1] * num_rows
    found = cost.with_drafts([start] * num_rows, most)
    assert len(found) == most + 1
    assert found == sorted(found)
    borders = [count for count in range(most + 1) if isa and (num_rows + count) % 16 <= 1]
    for count in {0, min(1, most), most, *borders}:
        counts[-1] = 1 + count
        load = cost.arithmetic.load([start] * num_rows, counts, sum(counts))
        assert found[count] == pytest.approx(cost.predict(load).seconds, rel=0.02)
