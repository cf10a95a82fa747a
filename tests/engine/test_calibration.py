"""Measured steps of an engine: they do not disturb requests, their time is bounded, and they give the constants."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quire.demo
from quire.config import EngineConfig
from quire.cost.arithmetic import Load
from quire.cost.calibrate import Fit, Rows, fit
from quire.cost.model import CostModel
from quire.cost.overhead import Overhead
from quire.cost.step_time import prior, step_seconds
from quire.engine.calibration import KEPT_STEPS, MAX_SECONDS, MAX_STEP_SECONDS, MOST_REPEATS, Calibration, KeptCosts
from quire.engine.start import StartedEngine
from quire.formats.kv_groups import KvGroup
from quire.messages import Command
from quire.model_config import load_model_config
from quire.resolve import DeviceFacts
from quire.schedule import ScheduledBatch
from quire.scheduler.from_settings import scheduler_of
from quire.simulate.run import plan_engine
from tests.cost.models import CONSTANTS, cost_model
from tests.examples import examples
from tests.scheduler.driver import Driver, TimedDriver, request
from tests.scheduler.test_stateful import MODELS

GUESS = prior(2e10, 5e11)
POINTS: list[Rows] = [[(4, 1)], [(4, 1)] * 3, [(0, 8)], [(20, 1)], [(12, 8)]]


class CalibratedDriver(TimedDriver):
    def __init__(self, slowness: float = 1.0) -> None:
        super().__init__(cost_model(), slowness=lambda: slowness, num_blocks=64, block_size=4)

    def calibration(self, points: list[Rows] = POINTS) -> tuple[Calibration, list[Fit]]:
        done: list[Fit] = []
        return Calibration(self.core, self.cost, GUESS, points, done.append, lambda: self.now), done

    def delay(self, delays: list[float], slowness: float = 1.0) -> float:
        """Measured steps take these multiples of their time, times `slowness`. Returns the time of the first point."""
        probe, left = self.core.probe, iter(delays)
        quiet = probe(POINTS[0])
        assert quiet is not None

        def delayed(rows: Rows) -> tuple[Load, float] | None:
            found = probe(rows)
            return found and (found[0], slowness * next(left) * found[1])

        self.core.probe = delayed  # type: ignore[method-assign]
        return quiet[1]


@pytest.mark.parametrize("groups", MODELS)
@settings(max_examples=examples(24))
@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(1, 30))
def test_requests_get_the_same_tokens(groups: tuple[KvGroup, ...], prompt: list[int], num_tokens: int) -> None:
    """Steps without requests before, between and after requests: the prefix cache loses nothing."""
    driver = Driver(num_blocks=400, groups=groups, cost=cost_model())
    for index in range(3):
        assert driver.core.probe([(9, 1), (0, 5)]) is not None
        num_cached = driver.pool.num_cached_blocks
        assert driver.core.probe([(30, 3)]) is not None
        assert driver.pool.num_cached_blocks == num_cached, "a cached block was taken"
        driver.add(request(f"r{index}", prompt * 9, num_tokens))
        assert driver.core.probe([(0, 5)]) is None, "somebody waits"
        driver.run()
    driver.check_outputs()
    assert driver.pool.num_used_blocks == 0


def test_measured_steps_have_tokens_of_the_whole_vocabulary() -> None:
    """Equal tokens would go to the same experts. The real ones go to nearly all."""
    model, device = load_model_config(quire.demo.path()), DeviceFacts("cpu", "test", "avx2", 1, 1 << 36, 1 << 36)
    scheduler = scheduler_of(plan_engine(EngineConfig(), model, device), model, cost_model())
    batch = scheduler.probe([(9, 1)] * 32 + [(4, 96)])
    assert batch is not None
    computed = zip(batch.new_rows, batch.num_computed_tokens, strict=True)
    token_ids = [token_id for row, start in computed for token_id in row.token_ids[start:]]
    assert len(token_ids) == 128
    assert len(set(token_ids)) > 100
    assert 0 <= min(token_ids) < model.vocab_size / 10 < 9 * model.vocab_size / 10 < max(token_ids) < model.vocab_size


def test_pages_that_keep_something_are_left_alone() -> None:
    driver = Driver(num_blocks=16, block_size=4, cost=cost_model())
    driver.add(request("a", range(40), 5))
    driver.run()
    assert driver.core.probe([(0, 8)]) is not None
    assert driver.core.probe([(30, 1)]) is None, "10 blocks of 16 are cached"


def test_all_points_are_measured_and_their_constants_are_kept() -> None:
    driver = CalibratedDriver()
    calibration, done = driver.calibration()
    while calibration.step():
        pass
    assert len(calibration.steps) == len(POINTS)
    assert [each.constants for each in done] == [driver.cost.fit.constants]
    for step in calibration.steps:
        assert step_seconds(step.demand, driver.cost.fit.constants) == pytest.approx(step.seconds, rel=0.02)
    assert len(driver.batches) == len(POINTS) * (1 + 2 * MOST_REPEATS), "the first one is not timed"
    assert not driver.core.has_work()


def test_what_an_earlier_start_has_learnt_is_not_lost() -> None:
    """The costs of a pause and of the front end, if the machine is much faster than at the earlier start."""
    driver = CalibratedDriver()
    known = replace(driver.cost.fit, cold=0.25, overhead=Overhead(4e-3, 1e-5))
    driver.cost.calibrate(known)
    calibration, done = driver.calibration()
    while calibration.step():
        pass
    assert [(each.cold, each.overhead) for each in done] == [(known.cold, known.overhead)]


def test_running_steps_with_equal_tiles_count_together() -> None:
    """Two steps of 17 to 32 tokens, after the first one, and no third one."""
    driver = CalibratedDriver()
    calibration, _ = driver.calibration()
    arithmetic = driver.cost.arithmetic
    loads = {count: arithmetic.load([300], [count], 1) for count in (17, 24, 31, 32, 33)}
    for count in (17, 32, 24, 31, 33, 33):
        driver.cost.observe(loads[count], driver.cost.predict(loads[count]).seconds, 1.0)
    assert [step.demand for step in calibration._running] == [arithmetic.demand(loads[n]) for n in (32, 24, 33)]


def test_the_first_running_step_of_a_size_counts_until_there_is_another() -> None:
    """It may have taken memory. But without it, the second one would be predicted from other sizes alone."""
    driver = CalibratedDriver()
    driver.calibration()
    load = driver.cost.arithmetic.load([0], [134], 1)
    expected = driver.cost.predict(load).seconds
    for slowness in (4.0, 2.0, 2.0):
        driver.cost.observe(load, driver.cost.predict(load).seconds, slowness * expected)
        found = step_seconds(driver.cost.arithmetic.demand(load), driver.cost.fit.constants)
        assert found == pytest.approx(slowness * expected, rel=0.15)


@pytest.mark.parametrize("seconds", [0.0, 0.004, 0.02, 1.0])
def test_a_start_waits_no_longer_than_it_may(seconds: float) -> None:
    driver = CalibratedDriver()
    calibration, done = driver.calibration()
    calibration.run(seconds)
    assert driver.now <= seconds
    assert len(calibration.steps) <= 3, "a long context was read before its memory is there"
    assert (len(calibration.steps) == 3) == (seconds >= 0.02)
    assert not done


def test_memory_is_taken_before_long_contexts_are_measured() -> None:
    """A page that was never written is the system's one page of zeros, which caches read much faster than memory."""

    class TakesMemory:
        pieces = 3

        def use_idle_time(self, num_blocks_ever_used: int) -> bool:
            self.pieces -= 1
            return self.pieces >= 0

    driver = CalibratedDriver()
    calibration, done = driver.calibration()
    engine = StartedEngine(driver.core, *([None] * 2), TakesMemory(), calibration, None, None)  # type: ignore[arg-type]
    for _ in range(TakesMemory.pieces):
        assert engine.take_memory()
    assert not engine.take_memory()
    assert not driver.batches
    while engine.calibrate():
        pass
    assert done


def test_a_slow_machine_measures_short_steps_only() -> None:
    """A request that comes meanwhile waits for the end of one step, and all of them have a limit."""
    driver = CalibratedDriver(slowness=100.0)
    driver.cost.calibrate(Fit(driver.cost.fit.constants, 0.5))
    calibration, done = driver.calibration([[(4, 1)]] * 100)
    longest = before = 0.0
    while calibration.step():
        longest, before = max(longest, driver.now - before), driver.now
    assert driver.now <= MAX_SECONDS + MAX_STEP_SECONDS
    assert longest <= 1.2 * MAX_STEP_SECONDS
    assert len(done) == 1


def test_a_long_prompt_is_measured_if_a_shorter_one_was_faster_than_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants are ten times too slow. A prompt of 16 tokens takes at most twice as long as one of 8.

    One of 64 takes at most four times as long as that, which is too long.
    """
    driver = CalibratedDriver()
    calibration, _ = driver.calibration([[(0, 8)], [(0, 16)], [(0, 64)]])
    while not calibration.steps:
        assert calibration.step()
    monkeypatch.setattr("quire.engine.calibration.MAX_STEP_SECONDS", 3 * calibration.steps[0].seconds)
    wrong = driver.cost.fit.slower(10)
    driver.cost.calibrate(wrong)
    while len(calibration.steps) < 2:
        assert calibration.step()
    driver.cost.calibrate(wrong)
    while calibration.step():
        pass
    assert len(calibration.steps) == 2
    assert calibration.is_done


def test_running_steps_count_until_all_points_are_measured() -> None:
    """Requests from the first second on: nothing is measured beside them, and the guess is four times too fast."""
    driver = CalibratedDriver()
    truth = driver.cost.fit.constants
    calibration, done = driver.calibration()
    driver.cost.calibrate(fit([], GUESS))
    for index in range(40):
        driver.add(request(f"r{index}", [index * 50 + token for token in range(1 + index % 30)], 3))
        driver.run()
    arithmetic = driver.cost.arithmetic
    for starts, counts in (([0], [20]), ([20], [1])):
        load = arithmetic.load(starts, counts, 1)
        seconds = step_seconds(arithmetic.demand(load), truth)
        assert driver.cost.predict(load).seconds == pytest.approx(seconds, rel=0.1)
        assert step_seconds(arithmetic.demand(load), driver.cost.fit.constants) == pytest.approx(seconds, rel=0.2)
    assert not calibration.is_done
    assert not done
    driver.core.command(Command("reset_prefix_cache"))  # it leaves pages to measure with
    while calibration.step():
        pass
    assert done
    assert driver.cost.learn is None
    constants = driver.cost.fit.constants
    driver.add(request("late", range(2000, 2060), 3))
    driver.run()
    assert driver.cost.fit.constants == constants, "a running step corrects, and measures nothing any more"


@pytest.mark.parametrize("slowness", [1.0, 60.0])
def test_a_step_that_was_held_up_once_does_not_count(slowness: float) -> None:
    """In a round, short steps are measured three times, long ones twice."""
    driver = CalibratedDriver()
    calibration, done = driver.calibration([[(4, 1)]])
    quiet = driver.delay([1.0, 3.0, *[1.0] * 6], slowness)
    while not done:
        assert calibration.step()
    assert [step.seconds for step in calibration.steps] == [pytest.approx(slowness * quiet)]


def test_a_round_that_was_held_up_does_not_count() -> None:
    """Another program ran while most steps of the first round were measured, and ends before the second round."""
    driver = CalibratedDriver()
    calibration, done = driver.calibration()
    in_a_round = len(POINTS) * MOST_REPEATS
    delays = [1.0] * 4 + [2.0] * (in_a_round + len(POINTS) - 4) + [1.0] * in_a_round
    driver.delay(delays)
    while not done:
        assert calibration.step()
    slow = [step.seconds for step in calibration.steps]
    while calibration.step():
        pass
    ratios = [before / step.seconds for before, step in zip(slow, calibration.steps, strict=True)]
    assert ratios == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0])
    constants = done[-1].constants
    assert [step_seconds(step.demand, constants) for step in calibration.steps] == pytest.approx(
        [step.seconds for step in calibration.steps], rel=0.05
    )


def test_a_second_round_that_is_held_up_changes_the_interval_alone() -> None:
    """Not the constants, and not what requests between the rounds have taught."""
    driver = CalibratedDriver()
    calibration, done = driver.calibration()
    in_a_round = len(POINTS) * MOST_REPEATS
    driver.delay([1.0] * (in_a_round + len(POINTS)) + [3.0] * in_a_round)
    while not calibration.is_done:
        assert calibration.step()
    driver.slowness = lambda: 1.5
    driver.add(request("a", range(8), 20))
    driver.run()
    corrected = driver.cost.corrected_fit()
    assert corrected.spread < 1
    driver.core.command(Command("reset_prefix_cache"))  # it leaves pages to measure with
    while calibration.step():
        pass
    assert driver.cost.corrected_fit() == done[-1]
    assert replace(done[-1], spread=corrected.spread) == corrected
    assert done[-1].spread >= 2, "half of all steps took three times as long"
    assert corrected.factors


MANY_POINTS: list[Rows] = [[(4, 1)] * rows for rows in range(1, 9)] + [[(0, rows)] for rows in (8, 20, 40)]
SECOND_ROUND = len(MANY_POINTS) * (1 + MOST_REPEATS)  # the number of its first step


@pytest.mark.parametrize(("slowness", "is_wider"), [(1.0, False), (2.0, True)])
def test_running_steps_of_the_first_round_count_for_both_intervals(slowness: float, is_wider: bool) -> None:
    """They scatter. A second round that is as quiet as the first one makes the interval no wider, a slower one does."""
    driver, rng = CalibratedDriver(), random.Random(0)
    calibration, done = driver.calibration(MANY_POINTS)
    driver.delay([1.0] * SECOND_ROUND + [slowness] * SECOND_ROUND)
    for rows in (2, 3, 4, 6, 10, 14) * 3:
        load = driver.cost.arithmetic.load([4] * rows, [1] * rows, rows)
        assert driver.cost.learn is not None
        driver.cost.learn(load, rng.choice([0.6, 1.6]) * step_seconds(driver.cost.arithmetic.demand(load), CONSTANTS))
    while calibration.step():
        pass
    assert len(done) == 1 + is_wider
    assert done[-1] == driver.cost.corrected_fit()
    running = [*calibration._running, *calibration._first.values()]
    both = fit([*calibration.steps, *running], GUESS).spread
    assert both != fit(calibration.steps, GUESS).spread
    # The first round knew fewer times of its steps.
    assert done[-1].spread == (both if is_wider else pytest.approx(both, rel=0.02))


@pytest.mark.parametrize(("noise", "is_wider"), [(0.02, False), (0.8, True)])
def test_a_second_round_makes_no_interval_of_running_steps_narrower(noise: float, is_wider: bool) -> None:
    """It is 1.3 times as slow. Running steps between the rounds were quiet, or scattered far more than that."""
    driver, rng = CalibratedDriver(), random.Random(0)
    calibration, done = driver.calibration(MANY_POINTS)
    driver.delay([1.0] * SECOND_ROUND + [1.3] * SECOND_ROUND)
    while not calibration.is_done:
        assert calibration.step()
    load = driver.cost.arithmetic.load([4] * 4, [1] * 4, 4)
    for _ in range(200):
        predicted = driver.cost.predict(load).seconds
        driver.cost.observe(load, predicted, predicted * rng.lognormvariate(0, noise))
    before = driver.cost.spread
    while calibration.step():
        pass
    assert (before > 1) == is_wider
    assert driver.cost.spread == (before if is_wider else pytest.approx(0.3, abs=0.1))
    assert len(done) == 2
    assert done[1] == driver.cost.corrected_fit()
    for _ in range(200):
        predicted = driver.cost.predict(load).seconds
        driver.cost.observe(load, predicted, predicted * rng.lognormvariate(0, 0.02))
    assert driver.cost.spread < 0.1, "running steps say more of the present than both rounds"


def test_other_constants_make_no_interval_of_running_steps_narrower() -> None:
    """A step of the first round was held up. Running steps between the rounds scattered more."""
    driver, rng = CalibratedDriver(), random.Random(0)
    calibration, done = driver.calibration(MANY_POINTS)
    before_it = 2 * (1 + MOST_REPEATS)
    driver.delay([1.0] * before_it + [2.0] * (1 + MOST_REPEATS) + [1.0] * 2 * SECOND_ROUND)
    while not calibration.is_done:
        assert calibration.step()
    constants, load = driver.cost.fit.constants, driver.cost.arithmetic.load([4] * 4, [1] * 4, 4)
    for _ in range(200):
        predicted = driver.cost.predict(load).seconds
        driver.cost.observe(load, predicted, predicted * rng.lognormvariate(0, 0.8))
    before = driver.cost.spread
    while calibration.step():
        pass
    assert driver.cost.fit.constants != constants
    assert driver.cost.fit.spread < before == driver.cost.spread == done[-1].spread


@pytest.mark.parametrize("slowness", [1.7, 0.6])
def test_times_of_two_machines_are_not_mixed(slowness: float) -> None:
    """The machine changes within the first round, and stays as it is then. Before, it runs steps of requests."""
    driver = CalibratedDriver()
    calibration, done = driver.calibration(MANY_POINTS)
    for rows in (2, 3, 4, 6, 10, 14) * 3:
        load = driver.cost.arithmetic.load([4] * rows, [1] * rows, rows)
        assert driver.cost.learn is not None
        driver.cost.learn(load, step_seconds(driver.cost.arithmetic.demand(load), CONSTANTS))
    driver.delay([1.0] * 6 * (1 + MOST_REPEATS) + [slowness] * 200)
    while calibration.step():
        pass
    for rows in (1, 2, 5, 8):
        load = driver.cost.arithmetic.load([4] * rows, [1] * rows, rows)
        seconds = slowness * step_seconds(driver.cost.arithmetic.demand(load), CONSTANTS)
        assert driver.cost.predict(load).seconds == pytest.approx(seconds, rel=0.05)
    assert done[-1].constants == driver.cost.fit.constants


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_holds_moments_in_which_the_machine_was_slower(seed: int) -> None:
    """Constants are those of its fast moments. Every fourth step takes 1.6 times as long, in both rounds and later."""
    driver, rng = CalibratedDriver(), random.Random(seed)
    calibration, _ = driver.calibration(MANY_POINTS)
    driver.delay([rng.choice([1.0, 1.0, 1.0, 1.6]) for _ in range(200)])
    while calibration.step():
        pass
    load = driver.cost.arithmetic.load([4] * 5, [1] * 5, 5)
    found, quiet = driver.cost.predict(load), step_seconds(driver.cost.arithmetic.demand(load), CONSTANTS)
    assert found.seconds == pytest.approx(quiet, rel=0.1)
    assert found.low <= quiet < 1.6 * quiet <= found.high


@pytest.mark.parametrize("seconds", [0.0, -0.001])
def test_a_step_without_time_says_nothing(seconds: float) -> None:
    """Drafting beside the step before may leave none."""
    driver = CalibratedDriver()
    calibration, _ = driver.calibration()
    calibration.run(1.0)
    before, load = driver.cost.fit, driver.cost.arithmetic.load([0], [20], 1)
    for _ in range(5):
        driver.cost.observe(load, driver.cost.predict(load).seconds, seconds)
    assert driver.cost.fit == before


def test_a_request_comes_first() -> None:
    driver = CalibratedDriver()
    calibration, done = driver.calibration()
    assert calibration.step()
    driver.add(request("a", range(5), 3))
    assert not calibration.step()
    driver.run()
    while calibration.step():
        pass
    assert len(done) == 1
    driver.check_outputs()


def test_a_step_that_fails_ends_it() -> None:
    def fail(batch: ScheduledBatch, is_computed: bool) -> Exception | None:
        return MemoryError() if batch.num_tokens == 8 and batch.request_ids[0] == "probe 0" else None

    driver = Driver(failure=fail, cost=cost_model())
    done: list[Fit] = []
    assert isinstance(driver.core.cost, CostModel)
    calibration = Calibration(driver.core, driver.core.cost, GUESS, POINTS, done.append)
    while calibration.step():
        pass
    assert len(calibration.steps) == 2
    assert not done, "half a calibration is not kept"
    driver.add(request("a", range(8), 3))
    driver.run()
    driver.check_outputs()


def test_records_hold_predictions() -> None:
    driver = CalibratedDriver()
    driver.add(request("a", range(8), 1))
    driver.run()
    record = driver.core.last_record
    assert record is not None
    assert 0 < record.predicted_low_seconds < record.predicted_seconds < record.predicted_high_seconds
    assert record.bound in ("memory", "arithmetic", "attention", "host")
    assert record.num_logits == 1
    assert (record.kv_tokens, record.pairs) == ((8, 8), (36, 36))


def test_what_running_steps_correct_is_kept() -> None:
    """Not before all steps are measured, and not for a few steps."""
    driver = CalibratedDriver()
    calibration, _ = driver.calibration()
    kept: list[Fit] = []
    costs = KeptCosts(driver.cost, kept.append, calibration)

    def decode() -> None:
        for name in "ab":
            driver.add(request(name, range(5), KEPT_STEPS // 2))
            driver.run()

    decode()
    costs.keep()
    assert not kept, "not all steps are measured"
    while not calibration.is_done:
        assert calibration.step()
    costs.keep()
    assert not kept, "the measured steps have replaced what was corrected"
    driver.slowness = lambda: 2.0
    for _ in range(2):
        decode()
        costs.keep()
        costs.keep()
    assert len(kept) == 2
    assert kept[-1].constants == driver.cost.fit.constants
    assert kept[-1].factors[0] == pytest.approx(2.0, rel=0.1), "steps of one token"


def test_corrections_are_kept_again_after_a_second_round() -> None:
    """It has changed the constants, so corrections begin anew and are counted from zero."""
    driver = CalibratedDriver()
    calibration, done = driver.calibration()
    in_a_round = len(POINTS) * MOST_REPEATS
    driver.delay([2.0] * (in_a_round + len(POINTS)) + [1.0] * in_a_round)
    kept: list[Fit] = []
    costs = KeptCosts(driver.cost, kept.append, calibration)
    while not calibration.is_done:
        assert calibration.step()
    for num in (1, 2):
        for name in "ab":
            driver.add(request(name, range(5), KEPT_STEPS // 2))
            driver.run()
        costs.keep()
        assert len(kept) == num
        driver.core.command(Command("reset_prefix_cache"))  # it leaves pages to measure with
        while calibration.step():
            pass
        costs.keep()
    assert len(done) == 2
