"""The speed that the first screen expects: the arithmetic, and the steps behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import quire.demo
from quire.config import EngineConfig
from quire.cost.step_time import StepTime
from quire.engine import warm_up
from quire.engine.deterministic import DeterministicExecutor
from quire.engine.warm_up import MOST_DISTURBED_SECONDS, MOST_SECONDS, MOST_TOKENS, produce_tokens
from quire.metrics.stopwatch import BUSY_SHARE, Lap, Stopwatch, busy_machine
from quire.model_config import load_model_config
from quire.planning.expectation import expectation, full_steps
from quire.resolve import DeviceFacts, resolve
from quire.screen.first_screen import _expectation
from tests.cost.models import cost_model
from tests.scheduler.driver import Driver, request

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
        interval = settings[name].interval
        assert interval is not None
        assert (interval.low, interval.high) == pytest.approx((count / step.high, count / step.low), rel=0.005)
        assert interval.bound == step.bound
        shown = f"between {interval.low:,g} and {interval.high:,g}, bound by {step.bound}; steps were measured"
        assert shown in settings[name].detail
    assert settings["expectation_waited_share"].value == 0.0
    prompt = cost.predict(cost.arithmetic.load([0], [1000], 1))
    assert settings["expected_ttft"].value == pytest.approx(prompt.seconds, rel=0.005)
    shown = settings["expected_ttft"].as_dict()
    assert (shown["low"], shown["high"]) == pytest.approx((prompt.low, prompt.high), rel=0.005)
    assert shown["bound"] == prompt.bound
    assert settings["expected_ttft"].detail == (
        "seconds, for a prompt of 1,000 tokens alone, in steps of at most 2,048; "
        f"between {shown['low']:,g} and {shown['high']:,g}, bound by {prompt.bound}; steps were measured"
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
    assert " ".join(_screen(waited=setting.value)[1:]) == (
        "the machine is busy: this was measured with a core for 36% of the time; expect more when idle"
    )
    assert len(_screen(waited=BUSY_SHARE)) == 1
    assert busy_machine(BUSY_SHARE) is None


def _screen(waited: float = 0.0, num_users: int = 1) -> list[str]:
    """The lines of the first screen about rates."""
    of_one = {"value": 50.2, "low": 45.1, "high": 55.9, "bound": "memory"}
    of_all = {"value": 1230.0, "low": 820.0, "high": 1850.0, "bound": "arithmetic"}
    return list(_expectation(of_one, of_all, {"value": waited}, {"value": num_users}))


def test_the_screen_says_the_interval_and_what_binds() -> None:
    assert _screen() == ["1 user 50 tok/s (45-56, bound by memory)"]
    assert _screen(num_users=128) == [
        "1 user 50 tok/s (45-56, bound by memory)",
        "128 users together 1,230 tok/s (820-1,850, bound by arithmetic)",
    ]


DEVICE = DeviceFacts("cpu", "test", "avx2", 1, 1 << 36, 1 << 36)
LENGTH = 1200  # of contexts


@pytest.mark.parametrize(
    ("num_seqs", "budget", "shared", "more", "rows"),
    [
        (1, 8192, 96, {}, {"max_num_batched_tokens": [1199], "max_shared_prefill_tokens": [96]}),
        (5, 2500, 0, {}, {"max_num_batched_tokens": [1199, 1199, 102]}),
        (2, 8192, 0, {}, {"max_num_batched_tokens": [1199, 1199]}),
        (5, 2500, 96, {}, {"max_num_batched_tokens": [1199], "max_shared_prefill_tokens": [1, 1, 1, 1, 96]}),
        (
            12,
            2500,
            2500,
            {},
            {"max_num_batched_tokens": [1199, 1199, 102], "max_shared_prefill_tokens": [*[1] * 8, 1199, 1199, 94]},
        ),
        (9, 2500, 2500, {}, {"max_shared_prefill_tokens": [*[1] * 8, 1199]}),
        (
            4,
            64,
            40,
            {"long_prefill_token_threshold": 16},
            {"max_num_batched_tokens": [16, 16, 8], "max_shared_prefill_tokens": [1, 1, 1, 16]},
        ),
        (4, 2398, 96, {"enable_chunked_prefill": False}, {"max_num_batched_tokens": [1199, 1199]}),
    ],
)
def test_a_full_step_is_one_that_the_scheduler_makes(
    num_seqs: int, budget: int, shared: int, more: dict[str, Any], rows: dict[str, list[int]]
) -> None:
    """Of the steps with new prompts and as many answers, it is the longest one."""
    limits = {"max_num_seqs": num_seqs, "max_num_batched_tokens": budget, "max_shared_prefill_tokens": shared, **more}
    config = EngineConfig(max_model_len=LENGTH, **limits)
    resolved = resolve(config, load_model_config(quire.demo.path()), DEVICE, is_server=True)
    cost = cost_model()

    def made(num_answers: int, num_prompts: int) -> list[int]:
        """The tokens of the rows of a step."""
        run = Driver(num_blocks=5000, max_model_len=LENGTH, enable_prefix_caching=False, **limits)
        for index in range(num_answers):
            run.add(request(f"answer {index}", [index], max_tokens=9))
        if num_answers:
            run.step()
        for index in range(num_prompts):
            run.add(request(f"prompt {index}", range(LENGTH - 1), max_tokens=1))
        run.step()
        return list(run.batches[-1].num_scheduled_tokens)

    def predicted(counts: list[int], context: int) -> StepTime:
        starts = [context - 1 if count == 1 else 0 for count in counts]
        return cost.predict(cost.arithmetic.load(starts, counts, len(counts)))

    steps = {step.setting: step for step in full_steps(resolved, cost)}
    assert steps["max_num_seqs"].time == predicted(made(num_seqs, 1), 17)
    assert ("max_shared_prefill_tokens" in steps) == bool(shared and config.enable_chunked_prefill)
    for name, counts in rows.items():
        num_answers = counts.count(1)
        steps_made = [made(num_answers, num_seqs + 1)]  # one request waits at least
        if name == "max_num_batched_tokens":
            steps_made.append(made(0, 1))
        assert counts in steps_made
        assert steps[name].time == predicted(counts, 1024) == max(predicted(each, 1024) for each in steps_made)


def test_the_words_of_full_steps() -> None:
    cost = cost_model()
    config = EngineConfig(max_num_seqs=5, max_num_batched_tokens=2148, max_shared_prefill_tokens=96)
    resolved = resolve(config, load_model_config(quire.demo.path()), DEVICE, is_server=True)
    *_, shared = full_steps(resolved, cost)
    assert shared.rows == "96 tokens of a new prompt beside 4 answers of 1,024 tokens"
    assert shared.text().endswith(f", bound by {shared.time.bound}) for {shared.rows}")
    assert shared.as_dict()["low"] == pytest.approx(shared.time.low, rel=0.001)
    in_order = replace(resolved, scheduler=replace(resolved.scheduler, max_shared_prefill_tokens=0))
    assert [step.rows for step in full_steps(in_order, cost)] == [
        "one token of each of 5 requests, in short contexts",
        "2,148 tokens of 2 new prompts",
    ]
    paced = replace(resolved, scheduler=replace(resolved.scheduler, most_answer_times=8.0))
    assert [step.rows for step in full_steps(paced, cost)][1] == "2,148 tokens of 2 new prompts", "without answers"
    alone = replace(resolved, scheduler=replace(resolved.scheduler, max_num_seqs=1))
    assert [step.rows for step in full_steps(alone, cost)][1:] == [
        "2,047 tokens of a new prompt",
        "96 tokens of a new prompt",
    ]
