"""Which replica gets a request: laws of the score, and how long requests wait beside other choices."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.ready import pace_of
from quire.frontend.router import Backlog, work_seconds
from quire.messages import Pace
from quire.scheduler.limits import SchedulerLimits
from tests.scheduler.test_slo import cost as timed_cost

PACE = Pace(0.01, 0.01, per_prompt_token=1e-3, per_prompt_pair=0.0, first_row=0.01, per_row=1e-3, per_kv_token=1e-6)
STEPS = 50.0
backlogs = st.builds(Backlog, st.floats(0, 100), st.integers(0, 300), st.integers(1, 256), st.floats(0, 1e6))


def work(backlog: Backlog) -> float:
    return work_seconds(backlog, PACE, STEPS)


@given(backlogs, st.floats(0.01, 10), st.integers(1, 50), st.floats(100, 1e5))
def test_more_of_anything_is_more_work(backlog: Backlog, seconds: float, rows: int, tokens: float) -> None:
    least = work(backlog)
    assert work(replace(backlog, prompt_seconds=backlog.prompt_seconds + seconds)) > least
    assert work(replace(backlog, num_rows=backlog.num_rows + rows)) > least
    assert work(replace(backlog, num_kv_tokens=backlog.num_kv_tokens + tokens)) > least
    assert work(replace(backlog, num_places=backlog.num_places + rows)) <= least * (1 + 1e-9), "more run at once"


@given(backlogs)
def test_an_idle_replica_has_least(backlog: Backlog) -> None:
    assert work(Backlog(0.0, 0, backlog.num_places, 0.0)) <= work(backlog)


def test_the_formula() -> None:
    """Numbers by hand."""
    assert work(Backlog(0.0, 0, 4, 0.0)) == pytest.approx(50 * 0.01)
    assert work(Backlog(2.0, 3, 4, 1000.0)) == pytest.approx(2 + 50 * (0.01 + 3e-3 + 1e-3))
    assert work(Backlog(2.0, 7, 4, 1000.0)) == pytest.approx(2 + 2 * 50 * (0.01 + 3e-3 + 1e-3)), "two rounds"


def test_without_predictions_all_are_alike() -> None:
    nothing = Pace(0.0, 0.0, 0.0, 0.0)
    assert work_seconds(Backlog(0.0, 9, 4, 1e6), nothing, STEPS) == 0


@dataclass
class Engine:
    """A replica on a virtual clock: prompts one after another, then answers in steps together, as PACE says."""

    prompts: list[tuple[int, int]] = field(default_factory=list)  # id, tokens
    answers: dict[int, int] = field(default_factory=dict)  # steps left
    busy_until: float = 0.0

    def backlog(self) -> Backlog:
        seconds = sum(PACE.prompt_seconds(tokens) for _, tokens in self.prompts)
        return Backlog(seconds, len(self.prompts) + len(self.answers), 256, 0.0)

    def advance(self, now: float, lengths: dict[int, int], first_tokens: dict[int, float]) -> None:
        while self.busy_until <= now and (self.prompts or self.answers):
            if self.prompts:
                name, tokens = self.prompts.pop(0)
                self.busy_until += PACE.prompt_seconds(tokens)
                first_tokens[name], self.answers[name] = self.busy_until, lengths[name]
            else:
                self.busy_until += PACE.answer_step(len(self.answers), 0.0)
                self.answers = {name: left - 1 for name, left in self.answers.items() if left > 1}
        self.busy_until = max(self.busy_until, now) if not (self.prompts or self.answers) else self.busy_until


def mean_wait(choose: Callable[[list[Engine], random.Random], Engine], seed: int) -> float:
    """Mean seconds to the first token of a load of short and few very long prompts on two replicas."""
    chance, engines = random.Random(seed), [Engine(), Engine()]
    lengths: dict[int, int] = {}
    arrivals: dict[int, float] = {}
    first_tokens: dict[int, float] = {}
    now = 0.0
    for name in range(600):
        now += chance.expovariate(3.0)
        for engine in engines:
            engine.advance(now, lengths, first_tokens)
        lengths[name], arrivals[name] = chance.randint(1, 60), now
        tokens = 4000 if chance.random() < 0.05 else chance.randint(10, 200)
        choose(engines, chance).prompts.append((name, tokens))
    for engine in engines:
        engine.advance(now + 1e6, lengths, first_tokens)
    assert len(first_tokens) == len(arrivals), "every request is answered"
    return sum(first_tokens[name] - arrivals[name] for name in arrivals) / len(arrivals)


def test_least_work_waits_less_than_fewest_requests_and_chance() -> None:
    def by_work(engines: list[Engine], chance: random.Random) -> Engine:
        return min(engines, key=lambda engine: work(engine.backlog()))

    def by_count(engines: list[Engine], chance: random.Random) -> Engine:
        return min(engines, key=lambda engine: engine.backlog().num_rows)

    def at_random(engines: list[Engine], chance: random.Random) -> Engine:
        return chance.choice(engines)

    means = [sum(mean_wait(choose, seed) for seed in range(5)) for choose in (by_work, by_count, at_random)]
    assert means[0] < means[1] < means[2], means


def test_the_pace_of_a_cost_model() -> None:
    """The line goes through the predictions that it is made of."""
    limits = SchedulerLimits(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=4096)
    cost = timed_cost()
    pace = pace_of(cost, limits)
    for context in (64, 2048):
        step = cost.predict(cost.arithmetic.load([context] * 16, [1] * 16, 16)).seconds
        assert pace.answer_step(16, 16 * context) == pytest.approx(step, rel=0.05)
    one = cost.predict(cost.arithmetic.load([64], [1], 1)).seconds
    assert pace.answer_step(1, 64) == pytest.approx(one, rel=0.05)
