"""What the first screen expects: the arithmetic, and the steps it is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire import demo
from quire.engine import warm_up
from quire.engine.expectation import expectation
from quire.engine.warm_up import MOST_DISTURBED_SECONDS, MOST_SECONDS, MOST_TOKENS, produce_tokens
from quire.metrics.stopwatch import BUSY_SHARE, Lap, Stopwatch, busy_machine
from quire.model_config import load_model_config
from quire.screen.first_screen import _expectation
from tests.scheduler.driver import Driver

MODEL = replace(load_model_config(demo.path()), vocab_size=1000, tie_word_embeddings=True)


class FakeWatch(Stopwatch):
    """Says of each lap what share of it was waited."""

    def __init__(self, waited: list[float]) -> None:
        self.waited = iter(waited)

    def lap(self) -> Lap:
        return Lap(0.0, next(self.waited))


def test_from_the_fastest_step_and_the_pace_of_a_prompt() -> None:
    settings = expectation(5, MODEL, [Lap(0.5, 0.9), Lap(0.02), Lap(0.04)], 100, Lap(1.0))
    one = settings["expected_tokens_per_second"]
    assert (one.value, one.source) == (50.0, "measured")
    assert one.detail == "1 / 20.00 ms, the fastest of 3 steps with one token each"
    # A prompt's token does not go through the output layer, a request's does.
    more = 0.01 * (1 + 1000 * MODEL.hidden_size / MODEL.num_block_parameters())
    total = settings["expected_total_tokens_per_second"]
    assert total.value == pytest.approx(5 / (0.02 + 4 * more), rel=0.005)
    assert total.source == "formula"
    assert settings["expectation_waited_share"].value == 0.0, "the fastest step was not disturbed"
    assert total.detail.startswith(f"max_num_seqs 5 / (20.00 ms for one token + 4 x {1e3 * more:.3f} ms: ")


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
    """On a busy machine one slow step says nothing: the best of several, for half a second at most."""
    driver = Driver()
    times = iter(range(1000))
    driver.core._clock = lambda: MOST_SECONDS * next(times)
    laps = produce_tokens(driver.core, FakeWatch([0.6, 0.5, 0.1, 0.0, 0.0, 0.0, 0.0]))
    assert [lap.waited for lap in laps] == [0.6, 0.5, 0.1]
    driver.core._clock = lambda: MOST_DISTURBED_SECONDS * next(times)
    assert len(produce_tokens(driver.core, FakeWatch([0.6] * MOST_TOKENS))) == 1


def test_a_watch_tells_time_without_a_core() -> None:
    walls, cpus = iter([10.0, 14.0, 14.0]), iter([1.0, 2.0, 2.0])
    watch = Stopwatch(lambda: next(walls), lambda: next(cpus))
    assert watch.lap() == Lap(4.0, 0.75)
    assert watch.lap() == Lap(0.0, 0.0), "nothing was measured"


@pytest.mark.parametrize(("of_step", "of_prompt"), [(0.64, 0.0), (0.0, 0.64)])
def test_a_busy_machine_is_named_on_the_screen(of_step: float, of_prompt: float) -> None:
    settings = expectation(5, MODEL, [Lap(0.02, of_step)], 100, Lap(1.0, of_prompt))
    setting = settings["expectation_waited_share"]
    assert setting.value == 0.64
    assert "the machine is busy" in setting.detail
    screen = list(_expectation(50.0, 80.0, setting.value, 5))
    assert " ".join(screen[1:]) == (
        "the machine is busy: this was measured with a core for 36% of the time; expect more when idle"
    )
    assert len(list(_expectation(50.0, 80.0, BUSY_SHARE, 5))) == 1
    assert busy_machine(BUSY_SHARE) is None
