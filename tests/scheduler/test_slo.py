"""Steps that keep a target for the time between two tokens: their times, their costs, and the progress of requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.cost.arithmetic import StepArithmetic
from quire.cost.calibrate import Fit
from quire.cost.model import CostModel, StepRoom
from quire.cost.step_time import Constants
from quire.engine.core import EngineCore
from quire.messages import SetLimits
from quire.schedule import Pending, ScheduledBatch, StepResult
from quire.scheduler.adaptive_depth import AdaptiveDepth, DrafterTime
from quire.scheduler.lanes import Lanes
from quire.scheduler.limits import LEAST_PROMPT_TOKENS
from quire.scheduler.scheduler import Scheduler
from tests.cost.models import cost_model, model_with
from tests.examples import examples
from tests.guesser import Guesser
from tests.models.test_layer_spec import experts
from tests.scheduler.driver import Driver, TimedDriver, request
from tests.scheduler.test_sameness import mixed

STEP_SECONDS, TOKEN_SECONDS = 8e-3, 1e-4  # of a step without prompts, and of a prompt's token
TARGET = 0.05
NOISE = 0.05


@cache
def constants() -> Constants:
    """Of a machine on which prompts and decodes cost the same as for a small model on a few cores."""
    arithmetic = cost_model().arithmetic
    demand = arithmetic.demand(arithmetic.load([0], [1], 0))
    return Constants(
        STEP_SECONDS,
        1e-4,
        1e-3 / demand.weight_bytes,
        TOKEN_SECONDS / demand.flops,
        1e-9,
        1e-3 / demand.flops / 1e4,
        1e-9,
        2.0,
    )


def cost(spread: float = 0.05) -> CostModel:
    return cost_model(constants(), spread)


class Timed(TimedDriver):
    """Blocks without end, and no look at every one of them after each step."""

    def __init__(self, slowness: Callable[[], float] = lambda: 1.0, **arguments: Any) -> None:
        plain: dict[str, Any] = {
            "num_blocks": 4000,
            "block_size": 32,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 2048,
            "max_model_len": 20_000,
            "enable_prefix_caching": False,
        }
        super().__init__(cost(), slowness=slowness, **(plain | arguments))

    def check(self) -> None:
        pass


def rows(run: Driver) -> dict[str, int]:
    """Tokens of each request in the last step."""
    batch = run.batches[-1]
    return dict(zip(batch.request_ids, batch.num_scheduled_tokens, strict=True))


def long_prompts_beside_answers(**arguments: Any) -> tuple[float, float]:
    """P99 of the time between two tokens, and tokens per second, of long prompts that come into a stream of answers."""
    rng = random.Random(0)
    run = Timed(lambda: rng.lognormvariate(0, NOISE), **arguments)
    for index in range(8):
        run.add(request(f"answer{index}", [index] * 20, max_tokens=500))
    last: dict[str, float] = {}
    gaps: list[float] = []
    num_prompts = 0
    while run.core.has_work():
        if num_prompts < 8 and run.now > 0.8 * num_prompts:
            run.add(request(f"prompt{num_prompts}", [num_prompts] * 4000, max_tokens=20))
            num_prompts += 1
        for delta in run.step():
            if delta.request_id in last:
                gaps.append(run.now - last[delta.request_id])
            last[delta.request_id] = run.now
    run.check_outputs()
    gaps.sort()
    num_tokens = sum(batch.num_tokens for batch in run.batches)
    return gaps[int(0.99 * len(gaps))], num_tokens / run.now


class Answering:
    """Answers one token for each row with logits of each lane, and notes the batches."""

    def __init__(self) -> None:
        self.batches: list[ScheduledBatch] = []

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        self.batches.append(batch)
        lanes = [StepResult(lane.step_id, [[7] * (count > 0) for count in lane.num_logits]) for lane in batch.lanes]
        future: Future[StepResult] = Future()
        future.set_result(StepResult.of_lanes(batch.step_id, lanes))
        return future

    def shutdown(self) -> None: ...


def steps_of_lanes(slo_itl: float) -> list[tuple[float, bool, list[int]]]:
    """Three lanes that share experts. One has answers only, one prompts only, and one has both.

    For each step: its predicted time, whether it has answers, and the tokens of each lane.
    """
    dense = model_with("full", "full")
    part = experts(dense.hidden_size, 768, count=8, num_active=2)
    model = replace(dense, layers=tuple(replace(layer, feed_forward=part) for layer in dense.layers))
    of_lanes = CostModel(StepArithmetic(model, "bfloat16", None, "auto"), Fit(constants(), 0.05))
    sizes = {"num_blocks": 4000, "block_size": 32, "max_num_seqs": 32, "max_model_len": 20_000}
    drivers = [Driver(cost=of_lanes, slo_itl=slo_itl, max_num_batched_tokens=2048, **sizes) for _ in range(3)]
    executor = Answering()
    core = EngineCore(Lanes([driver.scheduler for driver in drivers]), executor)
    for index in range(6):
        core.add(request(f"answer{index}", [index] * 20, max_tokens=100, lane=index % 2))
    for _ in range(4):
        core.step()
    for index in range(4):
        core.add(request(f"prompt{index}", [index] * 4000, max_tokens=2, lane=1 + index % 2))
    found = []
    executor.batches.clear()
    while core.has_work():
        core.step()
    for batch in executor.batches:
        loads = [
            of_lanes.arithmetic.load(lane.num_computed_tokens, lane.num_scheduled_tokens, sum(lane.num_logits))
            for lane in batch.lanes
        ]
        seconds = [
            of_lanes.predict(load._replace(other_tokens=batch.num_tokens - load.num_tokens)).seconds
            for load in loads
            if load.num_tokens
        ]
        has_answers = any(start >= 20 and count == 1 for start, count in _rows(batch))
        found.append((max(seconds), has_answers, [load.num_tokens for load in loads]))
    return found


def _rows(batch: ScheduledBatch) -> Iterator[tuple[int, int]]:
    return zip(batch.num_computed_tokens, batch.num_scheduled_tokens, strict=True)


def test_prompts_of_all_lanes_leave_time_to_the_answers_of_any() -> None:
    """A step takes as long as its busiest lane, whose experts get the tokens of all."""
    free, held = steps_of_lanes(0.0), steps_of_lanes(TARGET)
    assert max(seconds for seconds, has_answers, _ in free if has_answers) > 2 * TARGET
    beside = [(seconds, tokens) for seconds, has_answers, tokens in held if has_answers]
    assert max(seconds for seconds, _ in beside) <= TARGET
    busy = [(seconds, tokens) for seconds, tokens in beside if min(tokens[1:]) > LEAST_PROMPT_TOKENS]
    assert len(busy) > 3
    assert max(seconds for seconds, _ in busy) > 0.7 * TARGET, "the time is not used"
    (_, tokens), *_ = busy
    assert max(tokens[1:]) < 2 * min(tokens[1:]), "one lane takes the time of the others"
    assert sum(sum(tokens) for _, _, tokens in held) == sum(sum(tokens) for _, _, tokens in free)


def test_only_lanes_with_prompts_ask_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lane has answers only."""
    made, fitted = list[tuple[Scheduler, StepRoom]](), list[StepRoom]()
    make_room, fitting = Scheduler.make_room, StepRoom.fitting

    def making(lane: Scheduler, step: Any, drafter_seconds: float) -> None:
        make_room(lane, step, drafter_seconds)
        made.append((lane, step.room))

    def asked(room: StepRoom, start: int, most: int) -> int:
        fitted.append(room)
        return fitting(room, start, most)

    monkeypatch.setattr(Scheduler, "make_room", making)
    monkeypatch.setattr(StepRoom, "fitting", asked)
    steps_of_lanes(TARGET)
    first = made[0][0]
    assert fitted
    assert not any(room in fitted for lane, room in made if lane is first)


def test_long_prompts_hold_up_no_answer_and_cost_no_throughput() -> None:
    fixed = [long_prompts_beside_answers(max_num_batched_tokens=budget) for budget in (2048, 8192)]
    itl, throughput = long_prompts_beside_answers(max_num_batched_tokens=8192, slo_itl=TARGET)
    assert all(fixed_itl > 2 * TARGET for fixed_itl, _ in fixed), "the workload shows nothing"
    assert TARGET / 2 < itl <= TARGET
    assert throughput >= 0.95 * max(rate for _, rate in fixed)


def test_what_a_drafter_in_the_worker_takes_is_left_to_it() -> None:
    """Verifying rows have more logits, and drafting takes time beside the step."""
    seconds: list[float] = []
    for drafter_time in (None, DrafterTime(TARGET / 8)):
        proposer = Guesser(1.0, longest=3)
        run = Timed(slo_itl=TARGET, proposer=proposer, drafter_time=drafter_time)
        for index in range(4):
            run.add(request(f"answer{index}", [index] * 20, max_tokens=200))
        for _ in range(20):
            run.step()
        run.add(request("long", range(8000), max_tokens=1))
        for _ in range(10):
            run.step()
            batch = run.batches[-1]
            assert "long" in batch.request_ids
            rows = batch.num_computed_tokens, batch.num_scheduled_tokens, sum(batch.num_logits)
            drafting = drafter_time.of_step(list(map(len, batch.draft_token_ids))) if drafter_time else 0.0
            seconds.append(run.cost.predict(run.cost.arithmetic.load(*rows)).seconds * run.cost.margin(0.99) + drafting)
    assert 0.9 * TARGET < max(seconds) < 1.03 * TARGET


@pytest.mark.parametrize("slo_itl", [0.0, TARGET, 1.3 * STEP_SECONDS])
def test_drafts_are_counted_against_the_prompt_that_the_target_leaves(slo_itl: float) -> None:
    """They may lengthen a step by a hundredth of its prompt, and not of what the prompt would be without a target. The
    last target leaves no time for a prompt, so nobody waits for the drafts.
    """
    asked: list[int] = []

    def beside_prompts(count: int) -> tuple[float, float]:
        asked.append(count)
        return count * TOKEN_SECONDS, TOKEN_SECONDS

    adaptive = AdaptiveDepth(
        lambda starts, most: [STEP_SECONDS + 1e-5 * count for count in range(most + 1)], beside_prompts=beside_prompts
    )
    run = Timed(slo_itl=slo_itl, proposer=Guesser(1.0, longest=7), adaptive=adaptive)
    for index in range(4):
        run.add(request(f"answer{index}", [index] * 20, max_tokens=400))
    for _ in range(20):
        run.step()
    for name in ("long", "later"):
        run.add(request(name, range(8000), max_tokens=1))
    asked.clear()
    for _ in range(6):
        run.step()
        of_prompts = sum(count for name, count in rows(run).items() if not name.startswith("answer"))
        num_drafts = sum(map(len, run.batches[-1].draft_token_ids))
        assert of_prompts == 0 or num_drafts <= of_prompts / 100
        assert (asked.pop() if asked else 0) == pytest.approx(of_prompts, rel=0.03)
        assert (of_prompts > 1000) == (slo_itl == 0), "the target cuts nothing"
        assert num_drafts > 0


def test_without_answers_nothing_is_cut() -> None:
    run = Timed(slo_itl=TARGET)
    run.add(request("long", range(5000), max_tokens=1))
    run.step()
    assert rows(run) == {"long": 2048}
    run.add(request("other", range(1000), max_tokens=1))
    run.step()
    assert sum(rows(run).values()) == 2048


@pytest.mark.parametrize("slo_attainment", [0.5, 0.9, 0.99])
def test_the_more_have_to_reach_the_target_the_less_a_step_takes(slo_attainment: float) -> None:
    run = Timed(slo_itl=TARGET, slo_attainment=slo_attainment)
    run.add(request("answer", range(4), max_tokens=9))
    run.step()
    run.add(request("long", range(5000), max_tokens=1))
    before = run.now
    run.step()
    expected = TARGET / cost().margin(slo_attainment)
    assert run.now - before == pytest.approx(expected, rel=0.03)
    assert run.now - before <= expected


@pytest.mark.parametrize("arguments", [{}, {"max_shared_prefill_tokens": 64}, {"depth": 2}])
def test_answers_that_take_all_the_time_hold_up_who_waits_and_no_prompt_that_runs(arguments: dict[str, Any]) -> None:
    run = Timed(slo_itl=TARGET, **arguments)
    for index in range(4):
        run.add(request(f"answer{index}", [index] * 20, max_tokens=40))
    for _ in range(2):
        run.step()
    run.add(request("long", range(3000), max_tokens=2))
    run.step()
    run.step()
    assert "long" in rows(run)
    run.core.set_limits(SetLimits(slo_itl=1e-3))
    run.add(request("late", range(10), max_tokens=2))
    for _ in range(3):
        run.step()
    assert rows(run) == {"answer0": 1, "answer1": 1, "answer2": 1, "answer3": 1, "long": LEAST_PROMPT_TOKENS}
    run.run()
    run.check_outputs()


def test_beside_one_answer_there_is_room_for_another() -> None:
    """However long it takes: no request waits for the end of one endless answer."""
    run = Timed(slo_itl=1e-3)
    run.add(request("answer", range(4), max_tokens=4000))
    run.step()
    run.add(request("other", range(100), max_tokens=2))
    for _ in range(1 + -(-100 // LEAST_PROMPT_TOKENS)):
        run.step()
    assert run.tokens("other")


def test_a_target_moves_while_serving() -> None:
    run = Timed()
    run.add(request("answer", range(4), max_tokens=90))
    run.step()
    run.add(request("long", range(20_000 - 1), max_tokens=1))
    run.step()
    assert rows(run)["long"] == 2047
    run.core.set_limits(SetLimits(slo_itl=TARGET))
    run.step()
    assert LEAST_PROMPT_TOKENS < rows(run)["long"] < 500
    run.core.set_limits(SetLimits(slo_itl=0.0))
    run.step()
    assert rows(run)["long"] == 2047


@pytest.mark.parametrize("arguments", [{}, {"max_shared_prefill_tokens": 5}, {"depth": 2}])
def test_without_a_target_the_batches_are_those_without_a_cost_model(arguments: dict[str, Any]) -> None:
    driven = [Driver(cost=known, **arguments) for known in (None, cost())]
    for driver in driven:
        driver.run_all(*mixed())
    assert driven[0].batches == driven[1].batches


@settings(max_examples=examples(60))
@example(  # an older request that was preempted runs again, and takes the tokens of the prompt that ran
    prompts=[(2, 1, 11), (6, 1, 9), (52, 1, 0), (52, 1, 0)],
    target=0.0625,
    shared=5,
    depth=1,
    threshold=0,
    num_blocks=60,
)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=12),
    target=st.floats(1e-4, 0.1),
    shared=st.sampled_from([0, 5, 16]),
    depth=st.integers(1, 2),
    threshold=st.sampled_from([0, 3]),
    num_blocks=st.sampled_from([60, 400]),
)
def test_everybody_progresses(
    prompts: list[tuple[int, int, int]], target: float, shared: int, depth: int, threshold: int, num_blocks: int
) -> None:
    """The oldest prompt that runs or is admitted has tokens in every step. A target changes no token."""
    run = Driver(
        num_blocks=num_blocks,
        slo_itl=target,
        max_shared_prefill_tokens=shared,
        depth=depth,
        long_prefill_token_threshold=threshold,
        cost=cost_model(constants(), 0.3),
    )
    arrivals = sorted((at, index) for index, (_, _, at) in enumerate(prompts))

    def before_step(step: int) -> None:
        while arrivals and arrivals[0][0] <= step:
            index = arrivals.pop(0)[1]
            length, max_tokens, _ = prompts[index]
            run.add(request(f"r{index}", [index % 50] * length, max_tokens))

    for step in range(100_000):
        before_step(step)
        if not run.core.has_work():
            if not arrivals:
                break
            continue
        prompts_in_order = [r.request_id for r in run.live() if r.num_tokens - r.num_computed_tokens > 1]
        before = run.running_ids()
        num_batches = len(run.batches)
        run.step()
        if len(run.batches) > num_batches:
            computed = run.batches[-1].request_ids
            oldest = next((name for name in prompts_in_order if name in before or name in computed), None)
            is_preempted = oldest in before and oldest not in run.running_ids()
            assert oldest is None or is_preempted or oldest in computed
    run.check_outputs()


def test_a_fit_that_is_wrong_is_corrected_by_the_steps() -> None:
    """The machine is half as fast as the calibration says: most steps still keep the target."""
    run = Timed(lambda: 2.0, slo_itl=TARGET)
    run.cost.calibrate(Fit(constants(), 0.05))
    run.add(request("answer", range(4), max_tokens=300))
    run.step()
    run.add(request("long", range(19_000), max_tokens=1))
    lasted = []
    for _ in range(60):
        before = run.now
        run.step()
        lasted.append(run.now - before)
    assert max(lasted[30:]) <= TARGET
