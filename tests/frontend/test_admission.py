"""Requests that are refused because the first token would come too late: the door alone, and with the scheduler."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.cost.model import CostModel
from quire.engine.ready import pace_of
from quire.errors import QueueFullError, TargetMissedError
from quire.frontend.admission import MAX_RETRY_SECONDS, Admission
from quire.frontend.stats import Targets
from quire.messages import EngineReady, Pace, SetLimits
from quire.option import shown_duration
from quire.schedule import LaneUse, StepRecord
from tests.examples import IS_FULL
from tests.scheduler.driver import request
from tests.scheduler.test_slo import NOISE, Timed

DURATION = 15.0 if IS_FULL else 8.0  # seconds in which requests come
PACE = Pace(1e-9, 1e-9, 1e-3, 0.0)
PROMPT, ANSWER, PLACES = 500, 40, 16
TTFT, ITL, ATTAINMENT = 1.0, 0.05, 0.99


def record(num_running: int, num_waiting: int, **fields: Any) -> StepRecord:
    zeros = {name: 0 for name in StepRecord.__struct_fields__ if not name.endswith("_seconds")}
    pairs = {"kv_tokens": (), "pairs": (), "evicted_blocks": None, "lanes": ()}
    return StepRecord(**{**zeros, **pairs, "num_running": num_running, "num_waiting": num_waiting, **fields})


def admission(pace: Pace | None = PACE, **limits: float | None) -> Admission:
    result = Admission()
    result._factor = 1.0
    resolved = {name: {"value": value} for name, value in {"max_num_queued_reqs": None, **limits}.items()}
    result.on_ready(EngineReady(2048, 64, 16, 4, 64, resolved, pace))
    return result


def test_prompts_before_a_request_and_its_own_take_time() -> None:
    door = admission()
    door.on_step(record(1, 0, num_prefill_tokens=64, predicted_seconds=0.064))
    step = 0.064
    assert door.predicted_ttft(100) == pytest.approx(step + 0.1)
    door.on_sent("a", 300, 1)
    assert door.predicted_ttft(100) == pytest.approx(step + 0.4)
    door.on_step(record(1, 0, num_prefill_tokens=200, predicted_seconds=0.064))
    assert door.predicted_ttft(100) == pytest.approx(step + 0.2), "200 of the 300 tokens are computed"
    door.on_first_token("a", 1.0)
    assert door.predicted_ttft(100) == pytest.approx(step + 0.1)
    door.on_sent("b", 300, 1)
    door.on_left("b")
    door.on_left("b")
    assert door.predicted_ttft(100) == pytest.approx(step + 0.1)


def test_prompts_of_the_busiest_lane_have_a_share_of_its_step() -> None:
    """The same step in the busier lane as below, and one with 20 prompt tokens in the other lane."""
    door, uses = admission(), (LaneUse(60, 4, 0, 0), LaneUse(20, 0, 0, 0))
    door.on_step(record(4, 0, num_prefill_tokens=80, num_decode_tokens=4, predicted_seconds=0.12, lanes=uses))
    assert door._answer_seconds == pytest.approx(0.06)


def test_prompts_have_a_share_of_each_step_beside_answers() -> None:
    """A step of 64 tokens: 0.06 s for the prompts' 60, and 0.06 s for four answers."""
    door = admission()
    door.on_step(record(4, 0, num_prefill_tokens=60, num_decode_tokens=4, predicted_seconds=0.12))
    assert door.predicted_ttft(100) == pytest.approx(0.12 + 2 * 0.1 + door._place_seconds())
    door.on_limits(SetLimits(slo_itl=0.18))
    assert door.predicted_ttft(100) == pytest.approx(0.12 + 1.5 * 0.1 + door._place_seconds())


@pytest.mark.parametrize(("num_prompts", "times"), [(1, 8.0), (4, 8.0), (20, 8.0), (20, 0.0)])
def test_where_prompts_and_answers_are_slowed_down_alike(num_prompts: int, times: float) -> None:
    """The prediction for the last one of some prompts beside an answer, and what the scheduler makes of it."""
    limits = {"max_shared_prefill_tokens": 16, "most_answer_times": times}
    run, door = Timed(**limits), Admission()
    resolved = {name: {"value": value} for name, value in limits.items()}
    assert run.core.cost is not None
    door.on_ready(EngineReady(20_000, 4000, 32, 32, 2048, resolved, pace_of(run.core.cost, run.scheduler.limits)))
    door._factor = 1.0
    run.add(request("answer", range(20), max_tokens=5000))
    for _ in range(5):
        run.step()
    assert run.core.last_record is not None
    door.on_step(run.core.last_record)
    for index in range(num_prompts):
        predicted = run.now + door.predicted_ttft(PROMPT)
        door.on_sent(f"prompt{index}", PROMPT, 1)
        run.add(request(f"prompt{index}", [index] * PROMPT, max_tokens=1))
    begun = run.now
    while not run.tokens(f"prompt{num_prompts - 1}"):
        run.step()
    assert 0.8 < (predicted - begun) / (run.now - begun) < 1.25


def test_a_number_that_is_given_while_serving_slows_prompts_down() -> None:
    """Beside an answer of 0.01 s, some prompts have 0.07 of 0.08 s, and 10 tokens have half of a step."""
    door = admission(Pace(1e-9, 1e-9, 1e-3, 0.0, first_row=0.01), max_shared_prefill_tokens=10, most_answer_times=8.0)
    door.on_step(record(1, 0, num_prefill_tokens=10, num_decode_tokens=1, predicted_seconds=0.02))
    door.limits["max_num_batched_tokens"] = 500
    for index in range(20):
        door.on_sent(str(index), 100, 1)
    assert door._prompt_share() == pytest.approx(7 / 8)
    door.on_limits(SetLimits(max_shared_prefill_tokens=10))
    assert door._prompt_share() == pytest.approx(1 / 2)


def test_a_place_in_the_batch_is_free_when_an_answer_ends() -> None:
    door = admission()
    for index in range(5000):
        door.on_step(record(4, 3, num_decode_tokens=4, num_sampled_tokens=4, predicted_seconds=0.01))
        door.on_answers(index % 5 == 0)
    assert door._place_seconds() == pytest.approx((3 + 1) * 20 * 0.01 / 4, rel=0.05)
    door.on_step(record(2, 3, num_decode_tokens=2, predicted_seconds=0.01))
    assert door._place_seconds() == pytest.approx((3 + 1) * 20 * 0.01 / 2, rel=0.05), "they wait for blocks, not places"
    door.on_step(record(3, 0, num_decode_tokens=3, predicted_seconds=0.01))
    assert door._place_seconds() == 0


def test_drafts_take_time_and_shorten_answers() -> None:
    """Where two drafts of each row hold, answers take a third of the steps. A drafter makes the steps longer."""
    door, record_of = admission(), {"num_decode_tokens": 12, "num_sampled_tokens": 12, "num_accepted_tokens": 8}
    for index in range(5000):
        door.on_step(record(4, 3, **record_of, predicted_seconds=0.01, draft_seconds=0.02))
        door.on_answers(index % 5 == 0)
    assert door._place_seconds() == pytest.approx((3 + 1) * 20 * 0.03 / 4, rel=0.05)
    assert door.predicted_ttft(0) == pytest.approx(0.03 + door._place_seconds())


def test_what_is_cached_takes_no_time() -> None:
    door = admission()
    for _ in range(3):
        door.on_step(record(1, 0, prefix_cache_queries=100, prefix_cache_hits=90, predicted_seconds=0.01))
    assert door.predicted_ttft(1000) == pytest.approx(0.01 + 0.1)


def test_a_request_that_would_miss_the_target_is_refused_with_the_prediction() -> None:
    door = admission(slo_ttft=0.5)
    door.on_step(record(1, 0, num_prefill_tokens=64, predicted_seconds=0.064))
    door.check(400)
    with pytest.raises(TargetMissedError, match=r"would come after 1\.57s. Expected at most 500ms") as error:
        door.check(1500)
    assert error.value.retry_after_seconds == 2
    with pytest.raises(TargetMissedError, match="after 514ms"):
        door.check(400, waited=0.05)
    door.on_limits(SetLimits(slo_ttft=0.0))
    door.check(1500)
    door.on_limits(SetLimits(slo_ttft=0.1))
    with pytest.raises(TargetMissedError):
        door.check(400)
    door.on_idle()
    door.check(10**6)


def test_a_refusal_says_the_interval_of_its_prediction_and_what_binds() -> None:
    """It is that of the newest step with a prediction. The time that has passed is certain."""
    door, step = admission(slo_ttft=0.5), {"predicted_seconds": 0.1, "predicted_high_seconds": 0.2}
    door.on_step(record(1, 0, num_prefill_tokens=64, **step, bound="memory"))
    with pytest.raises(
        TargetMissedError, match=r"would come after 1s \(500ms to 2s; the newest step is bound by memory\)\. Expected"
    ) as error:
        door.check(900)
    assert error.value.retry_after_seconds == 2, "the high end: 2 s less 0.5 s, in whole seconds"
    assert "Retry in 2 s (0ms to 1.5s), shorten" in str(error.value)
    door.on_step(record(1, 0, step_seconds=0.1, predicted_seconds=0.0, predicted_high_seconds=0.0))
    with pytest.raises(
        TargetMissedError,
        match=r"would come after 1\.5s \(1s to 2\.5s; the newest step is bound by memory\)\. Expected",
    ):
        door.check(900, waited=0.5)


def test_a_client_is_told_to_wait_until_the_high_end_of_the_prediction() -> None:
    """A step of 1 s that may take 3 s. Both ends are in the message, and the header has the high one."""
    door = admission(max_num_queued_reqs=1)
    door.on_step(record(1, 1, num_prefill_tokens=64, predicted_seconds=1.0, predicted_high_seconds=3.0))
    predicted = door.predicted_ttft(1)
    assert predicted / 3 < predicted < door.retry_after_seconds == math.ceil(3 * predicted)
    with pytest.raises(QueueFullError) as error:
        door.check()
    low, high = (shown_duration(end) for end in (predicted / 3, 3 * predicted))
    assert f"Retry in {door.retry_after_seconds} s ({low} to {high}), or raise" in str(error.value)
    assert error.value.retry_after_seconds == door.retry_after_seconds


def test_without_a_target_only_the_queue_refuses() -> None:
    door = admission(max_num_queued_reqs=3)
    door.on_step(record(4, 2, num_decode_tokens=4, predicted_seconds=0.1))
    door.check(10**6)
    door.on_sent("a", 10, 1)
    with pytest.raises(QueueFullError, match="Got 3") as error:
        door.check()
    assert not isinstance(error.value, TargetMissedError)
    assert error.value.retry_after_seconds == door.retry_after_seconds > 1
    door.on_step(record(1, 10**9, predicted_seconds=10.0))
    assert door.retry_after_seconds == MAX_RETRY_SECONDS


def test_predictions_follow_what_requests_had_to_wait() -> None:
    door = admission(slo_ttft=1.0, slo_attainment=0.9)
    rng = random.Random(0)
    met = []
    for index in range(3000):
        door.on_sent(str(index), 500, 1)
        seconds = 2 * 0.5 * rng.lognormvariate(0, 0.2)
        met.append(seconds <= door._factor * 0.5)
        door.on_first_token(str(index), seconds)
    assert 0.87 < sum(met[1000:]) / 2000 < 0.93


def test_one_bad_minute_does_not_refuse_for_ever() -> None:
    """Requests that are still taken, whose prediction has become high, bring it down again."""
    door = admission(slo_ttft=1.0, slo_attainment=0.9)
    for index in range(40):
        door.on_sent(str(index), 500, 1)
        door.on_first_token(str(index), 100.0)
    highest = door._factor
    for index in range(2000):
        door.on_sent(str(index), 125, 1)
        door.on_first_token(str(index), 0.05)
    assert door._factor < highest / 2


@pytest.mark.parametrize(
    ("targets", "ttft", "num_late", "has_met"),
    [
        (Targets(), 9.0, 9, None),
        (Targets(ttft=1.0), 1.0, 0, True),
        (Targets(ttft=1.0), 1.1, 0, False),
        (Targets(itl=0.1), 9.0, 1, True),
        (Targets(itl=0.1), 9.0, 2, True),
        (Targets(itl=0.1), 9.0, 3, False),
        (Targets(itl=0.1, attainment=0.9), 9.0, 10, True),
    ],
)
def test_which_answers_have_met_targets(targets: Targets, ttft: float, num_late: int, has_met: bool | None) -> None:
    assert targets.are_met(ttft, num_late, 100) is has_met


@dataclass
class Outcome:
    """A request that was taken."""

    arrival: float
    ttft: float = 0.0
    last: float = 0.0
    num_late: int = 0
    num_gaps: int = 0
    has_ended: bool = False

    @property
    def is_good(self) -> bool:
        return self.has_ended and self.ttft <= TTFT and self.num_late <= 1 + (1 - ATTAINMENT) * self.num_gaps


@dataclass
class Served:
    seconds: float
    num_refused: int = 0
    taken: dict[str, Outcome] = field(default_factory=dict)

    @property
    def goodput(self) -> float:
        return sum(outcome.is_good for outcome in self.taken.values()) / self.seconds


def serve(rate: float, seconds: float, slo_ttft: float) -> Served:
    """Requests come at random for this long; the accepted ones are computed."""
    rng = random.Random(1)
    run = Timed(lambda: rng.lognormvariate(0, NOISE), max_num_seqs=PLACES, slo_itl=ITL, slo_attainment=ATTAINMENT)
    assert isinstance(run.core.cost, CostModel)
    limits = {"slo_ttft": slo_ttft, "slo_itl": ITL, "slo_attainment": ATTAINMENT, "max_num_queued_reqs": 1024}
    door, served = Admission(), Served(seconds)
    resolved = {name: {"value": value} for name, value in limits.items()}
    door.on_ready(EngineReady(20_000, 4000, 32, PLACES, 2048, resolved, pace_of(run.core.cost, run.scheduler.limits)))
    arrival = rng.expovariate(rate)
    while arrival < seconds or run.core.has_work():
        if not run.core.has_work():
            run.now = max(run.now, arrival)
            door.on_idle()
        while arrival <= run.now and arrival < seconds:
            name, length = f"r{arrival}", round(PROMPT * rng.uniform(0.2, 1.8))
            try:
                door.check(length, run.now - arrival)
                door.on_sent(name, length, 1)
                served.taken[name] = Outcome(arrival)
                run.add(request(name, [7] * length, max_tokens=round(ANSWER * rng.uniform(0.2, 1.8))))
            except QueueFullError:
                served.num_refused += 1
            arrival += rng.expovariate(rate)
        if not run.core.has_work():
            continue
        deltas = run.step()
        if run.core.last_record is not None:
            door.on_step(run.core.last_record)
        for delta in deltas:
            outcome = served.taken[delta.request_id]
            if outcome.last:
                outcome.num_gaps += 1
                outcome.num_late += run.now - outcome.last > ITL
            else:
                outcome.ttft = run.now - outcome.arrival
                door.on_first_token(delta.request_id, outcome.ttft)
            outcome.last = run.now
            if delta.finish_reason is not None:
                outcome.has_ended = True
                door.on_answers(1)
    return served


def test_five_times_overload_costs_no_goodput() -> None:
    flood = serve(100.0, 1.0, slo_ttft=0.0)
    saturation = len(flood.taken) / max(outcome.last for outcome in flood.taken.values())
    once, five = (serve(factor * saturation, DURATION, TTFT) for factor in (1, 5))
    assert once.goodput > 0.7 * saturation
    assert five.goodput >= 0.95 * once.goodput
    met = [outcome.ttft <= TTFT for outcome in five.taken.values()]
    assert sum(met) >= 0.95 * len(met), "who is taken is served in time"
    assert serve(5 * saturation, 3.0, slo_ttft=0.0).goodput < 0.5 * once.goodput, "the workload shows nothing"
