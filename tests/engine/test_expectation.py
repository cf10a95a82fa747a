"""The speed that the first screen expects: the arithmetic, and the steps behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import quire.demo
from quire.config import EngineConfig
from quire.engine import warm_up
from quire.engine.deterministic import DeterministicExecutor
from quire.engine.warm_up import MOST_DISTURBED_SECONDS, MOST_SECONDS, MOST_TOKENS, produce_tokens
from quire.metrics.stopwatch import BUSY_SHARE, Lap, Stopwatch, busy_machine
from quire.model_config import load_model_config
from quire.planning.expectation import expectation
from quire.resolve import DeviceFacts, resolve
from quire.screen.first_screen import _expectation
from tests.cost.models import cost_model
from tests.scheduler.driver import Driver

RESOLVED = resolve(
    EngineConfig(max_num_seqs=5, max_num_batched_tokens=2048),
    load_model_config(quire.demo.path()),
    DeviceFacts("cpu", "test", "avx2", 1, 1 << 36, 1 << 36),
    is_server=True,
)


class FakeWatch(Stopwatch):
    """Says of each lap what share of it was waited."""

    def __init__(self, waited: list[float]) -> None:
        self.waited = iter(waited)

    def lap(self) -> Lap:
        return Lap(0.0, next(self.waited))


def test_rates_from_predicted_steps() -> None:
    """Of one request, and of all together: a step gives each of them a token. A prompt alone has a whole step."""
    cost = cost_model()
    settings = expectation(RESOLVED, cost, "steps were measured", 0.0)
    for name, count in (("expected_tokens_per_second", 1), ("expected_total_tokens_per_second", 5)):
        step = cost.predict(cost.arithmetic.load([16] * count, [1] * count, count))
        assert settings[name].value == pytest.approx(count / step.seconds, rel=0.005)
        assert f"bound by {step.bound}; steps were measured" in settings[name].detail
        assert f"between {count / step.high:.3g} and {count / step.low:.3g}" in settings[name].detail
    assert settings["expectation_waited_share"].value == 0.0
    prompt = cost.predict(cost.arithmetic.load([0], [1000], 1))
    assert settings["expected_ttft"].value == pytest.approx(prompt.seconds, rel=0.005)
    assert settings["expected_ttft"].detail == (
        "seconds, for a prompt of 1,000 tokens alone, in steps of at most 2,048; "
        f"between {prompt.low:.3g} and {prompt.high:.3g}, bound by {prompt.bound}; steps were measured"
    )
    assert prompt.bound != cost.predict(cost.arithmetic.load([16], [1], 1)).bound


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_model_len", [2, 200])
def test_every_step_computes_one_token(depth: int, max_model_len: int) -> None:
    driver = Driver(depth=depth, max_model_len=max_model_len, num_blocks=2)
    seconds = produce_tokens(driver.core)
    assert len(seconds) == min(MOST_TOKENS, max_model_len - 1)
    assert {batch.num_tokens for batch in driver.batches} == {1}
    assert not driver.core.has_work()
    assert (driver.pool.num_used_blocks, driver.pool.num_cached_blocks) == (0, 0), "something stays"


@pytest.mark.parametrize("depth", [1, 2])
def test_slow_steps_are_not_repeated(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start of a large model does not take longer for it."""
    driver = Driver(depth=depth)
    times = iter(range(1000))
    driver.core._clock = lambda: MOST_SECONDS * next(times)
    monkeypatch.setattr(warm_up, "Stopwatch", lambda: FakeWatch([0.0] * 9))
    assert len(produce_tokens(driver.core)) <= depth
    assert not driver.core.has_work()
    assert driver.pool.num_used_blocks == 0


def test_steps_are_repeated_until_one_ran_undisturbed() -> None:
    """On a busy machine a slow step does not count: the best of several does, for half a second at most."""
    driver = Driver()
    times = iter(range(1000))
    driver.core._clock = lambda: MOST_SECONDS * next(times)
    laps = produce_tokens(driver.core, FakeWatch([0.6, 0.5, 0.1, 0.0, 0.0, 0.0, 0.0]))
    assert [lap.waited for lap in laps] == [0.6, 0.5, 0.1]
    driver.core._clock = lambda: MOST_DISTURBED_SECONDS * next(times)
    assert len(produce_tokens(driver.core, FakeWatch([0.6] * MOST_TOKENS))) == 1


def test_the_thread_that_waits_for_ranks_says_nothing_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes none of the step itself, so it has a core for none of the time."""
    driver = Driver()
    times = iter(range(1000))
    driver.core._clock = lambda: MOST_SECONDS * next(times)
    execute = DeterministicExecutor._execute
    monkeypatch.setattr(
        DeterministicExecutor,
        "_execute",
        lambda self, batch: replace(execute(self, batch), ranks=((0.1, 0.0), (0.1, 0.0))),
    )
    (lap,) = produce_tokens(driver.core, FakeWatch([1.0] * MOST_TOKENS))
    assert lap.waited == 0.0


def test_a_watch_tells_time_without_a_core() -> None:
    walls, cpus = iter([10.0, 14.0, 14.0]), iter([1.0, 2.0, 2.0])
    watch = Stopwatch(lambda: next(walls), lambda: next(cpus))
    assert watch.lap() == Lap(4.0, 0.75)
    assert watch.lap() == Lap(0.0, 0.0), "nothing was measured"


def test_a_busy_machine_is_named_on_the_screen() -> None:
    setting = expectation(RESOLVED, cost_model(), "", 0.64)["expectation_waited_share"]
    assert setting.value == 0.64
    assert "the machine is busy" in setting.detail
    screen = list(_expectation(50.0, 80.0, setting.value, 5))
    assert " ".join(screen[1:]) == (
        "the machine is busy: this was measured with a core for 36% of the time; expect more when idle"
    )
    assert len(list(_expectation(50.0, 80.0, BUSY_SHARE, 5))) == 1
    assert busy_machine(BUSY_SHARE) is None
