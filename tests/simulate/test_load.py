"""Loads on a virtual clock: the scheduler's own batches, times that a hand can compute, refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest

import quire.demo
from quire.config import EngineConfig
from quire.cost.arithmetic import Load
from quire.cost.calibrate import Fit
from quire.cost.model import CostModel
from quire.cost.overhead import Overhead
from quire.cost.step_time import StepTime
from quire.engine.core import EngineCore
from quire.engine.deterministic import DeterministicExecutor
from quire.measure.options import Report, Target, Traffic, Workload
from quire.measure.report import serving_result
from quire.messages import AddRequest
from quire.model_config import load_model_config
from quire.resolve import DeviceFacts
from quire.schedule import Executor, Pending, ScheduledBatch, StepResult
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.kv_cache_manager import KVCacheManager
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler
from quire.simulate.executor import PredictedExecutor, VirtualClock
from quire.simulate.load import PARAMS, Client, Prompt
from quire.simulate.run import client_of, plan_engine
from tests.cost.models import CONSTANTS, cost_model

NUM_BLOCKS, BLOCK_SIZE = 40, 4


class ByTokens(CostModel):
    """A step takes a second, and more for each token beyond one per row, and after a pause.

    Args:
        cold: seconds for each one of the pause.
    """

    def __init__(self, per_token: float = 0.0, cold: float = 0.0) -> None:
        super().__init__(cost_model().arithmetic, Fit(CONSTANTS, 0.1))
        self._per_token, self._cold = per_token, cold

    def predict(self, load: Load, pause: float = 0.0) -> StepTime:
        seconds = 1 + self._per_token * (load.num_tokens - load.num_rows) + self._cold * pause
        return StepTime(seconds, seconds, seconds, "host")


def scheduler(clock: VirtualClock, depth: int = 1, num_stages: int = 1, **limits: Any) -> Scheduler:
    kv = KVCacheManager(BlockPool(num_stages**2 * NUM_BLOCKS, BLOCK_SIZE), step_tokens=16, depth=depth)
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 80} | limits
    return Scheduler(SchedulerLimits(**given), kv, clock=clock.read, num_stages=num_stages)


def client(per_token: float = 0.0, depth: int = 1, num_stages: int = 1, cold: float = 0.0, **limits: Any) -> Client:
    clock = VirtualClock()
    executor = PredictedExecutor(ByTokens(per_token, cold), clock, num_stages)
    core = EngineCore(scheduler(clock, depth, num_stages, **limits), executor, depth, clock=clock.read)
    return Client(core, clock)


Batches = list[tuple[Any, ...]]


def content(batch: ScheduledBatch) -> tuple[Any, ...]:
    """All that a worker is told but the tokens of answers."""
    new = [(row.request_id, len(row.token_ids), list(row.block_ids)) for row in batch.new_rows]
    columns = (batch.num_computed_tokens, batch.num_scheduled_tokens, batch.num_logits, batch.removed_request_ids)
    return batch.step_id, list(batch.request_ids), *map(list, columns), list(map(list, batch.new_block_ids)), new


class Recorder:
    """Keeps what an executor is asked for."""

    def __init__(self, executor: Executor, batches: Batches) -> None:
        self._executor, self._batches = executor, batches

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        self._batches.append(content(batch))
        return self._executor.submit(batch)

    def shutdown(self) -> None:
        self._executor.shutdown()


def real_run(prompts: list[Prompt], times: list[float], per_token: float, depth: int, **limits: Any) -> Batches:
    """A core that computes, with a loop of its own; a batch takes the time of ByTokens."""
    clock, batches, ends = VirtualClock(), [], []
    model = DeterministicExecutor(NUM_BLOCKS, BLOCK_SIZE, is_delayed=True)
    core = EngineCore(scheduler(clock, depth, **limits), Recorder(model, batches), depth, clock=clock.read)
    num_added = num_taken = 0
    while num_added < len(prompts) or core.has_work():
        if not core.has_work():
            clock.now = max(clock.now, times[num_added])
        while num_added < len(prompts) and times[num_added] <= clock.now:
            prompt = prompts[num_added]
            core.add(AddRequest(str(num_added), prompt.token_ids, PARAMS, prompt.output_len))
            num_added += 1
        core.step()
        for _, _, _, counts, *_ in batches[len(ends) :]:
            ends.append(max(clock.now, ends[-1] if ends else 0.0) + 1 + per_token * (sum(counts) - len(counts)))
        if core.last_record is not None:
            clock.now = ends[num_taken]
            num_taken += 1
    return batches


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("shared", [0, 6], ids=["in-order", "shared"])
@pytest.mark.parametrize("seed", range(3))
def test_batches_are_those_of_a_core_that_computes(seed: int, shared: int, depth: int) -> None:
    """With chunks, hits of the prefix cache, preemptions and refusals, at the same times."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(1000) for _ in range(12)] for _ in range(3)]
    prompts = [
        Prompt(rng.choice(beginnings) + [rng.randrange(1000) for _ in range(rng.randint(1, 24))], rng.randint(1, 30))
        for _ in range(40)
    ]
    times = sorted(rng.uniform(0, 150) for _ in prompts)
    limits = {"max_num_queued_reqs": 6, "max_shared_prefill_tokens": shared}
    expected = real_run(prompts, times, 0.1, depth, **limits)
    own, found = client(0.1, depth, **limits), []
    own.core.executor = Recorder(own.core.executor, found)
    run = own.run(prompts, times)
    assert found == expected
    assert own.totals.num_steps == len(expected)
    assert own.totals.num_preemptions > 0, "nothing was preempted: the check proves little"
    assert own.totals.prefix_cache_hits > 0, "nothing was found in the cache: the check proves little"
    assert any(outcome.error for outcome in run.outcomes), "nothing was refused: the check proves little"
    assert sum(outcome.cached_tokens for outcome in run.outcomes) == own.totals.prefix_cache_hits


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_comes_to_an_idle_engine_pays_for_the_pause(depth: int) -> None:
    """An eighth of the pause: from 3 to 11 s nothing runs. The others find a busy engine."""
    prompts = [Prompt([1, 2, 3, 4], 3), Prompt([5], 1), Prompt([6], 1)]
    run = client(depth=depth, cold=1 / 8).run(prompts, [0.0, 11.0, 12.0])
    assert [outcome.ttft for outcome in run.outcomes] == [1.0, 2.0, 2.0]
    assert run.outcomes[0].itl == [1.0, 1.0]


def test_a_queue_computed_by_hand() -> None:
    """One request runs at a time, steps of 1 s: A from 0 to 3 s, B from 3 to 5 s, and C comes to an idle engine."""
    prompts = [Prompt([1, 2, 3, 4], 3), Prompt([5, 6], 2), Prompt([7], 1)]
    run = client(max_num_seqs=1).run(prompts, [0.0, 0.5, 9.25])
    assert [outcome.start_time for outcome in run.outcomes] == [0.0, 0.5, 9.25]
    assert [outcome.ttft for outcome in run.outcomes] == [1.0, 3.5, 1.0]
    assert [outcome.itl for outcome in run.outcomes] == [[1.0, 1.0], [1.0], []]
    assert [outcome.latency for outcome in run.outcomes] == [3.0, 4.5, 1.0]
    assert [outcome.output_tokens for outcome in run.outcomes] == [3, 2, 1]
    assert all(outcome.success and not outcome.queue_time for outcome in run.outcomes)
    assert run.duration == 10.25


def test_a_prompt_in_chunks_beside_a_decode() -> None:
    """16 tokens a step, 0.5 s for each beyond one per row. A decodes alone, then beside two chunks of B's 20 tokens."""
    prompts = [Prompt([1], 4), Prompt(list(range(20)), 1)]
    run = client(per_token=0.5).run(prompts, [0.0, 0.5])
    first, second = run.outcomes
    # Steps end at 1; + 1 + 0.5 * 14 = 9, with 15 tokens of B; + 1 + 0.5 * 4 = 12, with 5 tokens; 13.
    assert (first.ttft, first.itl) == (1.0, [8.0, 3.0, 1.0])
    assert (second.ttft, second.latency) == (11.5, 11.5)


def test_with_two_batches_in_flight_a_step_begins_where_the_one_before_ends() -> None:
    """A newcomer waits for both: the one that runs, and the one behind it."""
    run = client(depth=2).run([Prompt([1], 5), Prompt([2], 2)], [0.0, 1.5])
    assert [outcome.ttft for outcome in run.outcomes] == [1.0, 2.5]
    assert run.outcomes[0].itl == [1.0] * 4
    assert run.duration == 5.0


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stages_hardly_wait_while_there_are_as_many_batches(num_stages: int) -> None:
    """All requests come at once, in one batch; equal batches come of it. An endless pipeline takes 60 steps' time."""
    prompts = [Prompt([index], 60) for index in range(3 * num_stages)]
    run = client(depth=num_stages, num_stages=num_stages, max_num_seqs=3 * num_stages).run(
        prompts, [0.0] * len(prompts)
    )
    assert 60 <= run.duration < 60 / 0.95
    alone = client(depth=num_stages, num_stages=num_stages).run(prompts[:1], [0.0])
    assert alone.duration == pytest.approx(60), "each of its steps passes all stages"


def test_rows_that_want_no_logits_get_no_token() -> None:
    batch = ScheduledBatch(3, ["a", "b"], [0, 4], [4, 1], [0, 1], [(), ()], [[], []])
    assert PredictedExecutor(ByTokens(), VirtualClock()).submit(batch).result().token_ids == [[], [3]]


def test_time_passes_for_the_scheduler_of_the_settings() -> None:
    """A prompt that was alone for ten seconds has the whole budget; before, it leaves room for others."""
    model, device = load_model_config(quire.demo.path()), DeviceFacts("cpu", "test", "avx2", 1, 1 << 36, 1 << 36)
    own = client_of(plan_engine(EngineConfig(max_shared_prefill_tokens=16), model, device), model, ByTokens())
    own.run([Prompt([1], 1), Prompt([2], 1)], [0.0, 0.0])
    assert own.run([Prompt([3] * 64, 1)], [5.0]).duration == 5 + 4
    assert own.run([Prompt([4] * 64, 1)], [20.0]).duration == 20 + 1


def test_the_door_refuses_who_would_come_too_late() -> None:
    """Three times the capacity of four places, in steps of a second: with a target, served requests are in time."""
    model, device = load_model_config(quire.demo.path()), DeviceFacts("cpu", "test", "avx2", 1, 1 << 36, 1 << 36)
    prompts, times = [Prompt([i] * 8, 10) for i in range(120)], [0.83 * i for i in range(120)]
    late = {}
    for target in (None, 12.0):
        config = EngineConfig(max_num_seqs=4, slo_ttft=target)
        run = client_of(plan_engine(config, model, device), model, ByTokens()).run(prompts, times)
        kinds = {outcome.error.partition(":")[0] for outcome in run.outcomes}
        assert kinds == ({"", "ttft_target"} if target else {""})
        served = [outcome for outcome in run.outcomes if outcome.success]
        late[target] = sum(outcome.ttft > 12 for outcome in served) / len(served)
        assert len(served) > 30
    assert late[12.0] < 0.2 < 0.8 < late[None]


def test_who_waits_in_the_client() -> None:
    """--max-concurrency 1: a place is free from the end of the step on that ends a request."""
    run = client().run([Prompt([i], 2) for i in range(3)], [0.0, 1.5, 5.0], max_concurrency=1)
    assert [outcome.start_time for outcome in run.outcomes] == [0.0, 2.0, 5.0]
    assert [outcome.queue_time for outcome in run.outcomes] == [0.0, 0.5, 0.0]
    assert [outcome.latency for outcome in run.outcomes] == [2.0, 2.0, 2.0]


def test_what_the_front_end_takes_comes_before_the_engine() -> None:
    """A quarter of a second, and an eighth for each token: a short prompt gets past a long one that came before."""
    own = client(max_num_seqs=1)
    own.overhead = Overhead(0.25, 0.125)
    prompts = [Prompt([1, 2], 2), Prompt(list(range(8)), 1), Prompt([3], 1)]
    run = own.run(prompts, [0.0, 1.0, 1.5])
    # They reach the engine at 0.5, 2.25 and 1.875 s. Its steps end at 1.5, 2.5, 3.5 and 4.5 s.
    assert [outcome.start_time for outcome in run.outcomes] == [0.0, 1.0, 1.5]
    assert [outcome.ttft for outcome in run.outcomes] == [1.5, 3.5, 2.0]
    assert run.outcomes[0].itl == [1.0]
    assert [outcome.latency for outcome in run.outcomes] == [2.5, 3.5, 2.0]
    assert run.duration == 4.5


def test_a_place_in_the_client_is_taken_on_the_way_to_the_engine() -> None:
    """And it is free at once if the request is refused there."""
    own = client(max_model_len=16)
    own.overhead = Overhead(0.5, 0.0)
    run = own.run([Prompt([1], 1), Prompt([2], 99), Prompt([3], 1)], [0.0, 0.0, 0.0], max_concurrency=1)
    assert [outcome.start_time for outcome in run.outcomes] == [0.0, 1.5, 2.0]
    assert [bool(outcome.error) for outcome in run.outcomes] == [False, True, False]
    assert run.outcomes[2].latency == 1.5


def test_longer_steps_bring_first_tokens_sooner_and_hold_up_answers() -> None:
    """A prompt of 64 tokens beside an answer: both follow the token budget, in opposite directions."""
    firsts, gaps = [], []
    for budget in (9, 17, 33, 65):
        own = client(per_token=0.125, max_num_batched_tokens=budget)
        answer, prompt = own.run([Prompt([1], 40), Prompt(list(range(64)), 1)], [0.0, 0.5]).outcomes
        firsts.append(prompt.ttft)
        gaps.append(max(answer.itl))
    assert firsts == sorted(firsts, reverse=True)
    assert firsts[0] > 1.5 * firsts[-1]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 4 * gaps[0]


def test_a_load_after_another_one() -> None:
    """The engine keeps its cache, and the clock goes on."""
    own, prompt = client(), Prompt(list(range(13)), 1)
    own.run([prompt], [0.0])
    again = own.run([prompt], [2.0])
    assert own.clock.now == 4.0
    assert (again.outcomes[0].start_time, again.outcomes[0].ttft, again.duration) == (3.0, 1.0, 3.0)
    assert again.outcomes[0].cached_tokens == 12


def test_refused_requests_count_as_in_bench_serve() -> None:
    """One runs and two may wait: four come at once before the first step, and later one that is too long."""
    prompts = [Prompt([i], 2) for i in range(4)] + [Prompt([1] * 70, 11)]
    run = client(max_num_seqs=1, max_num_queued_reqs=2).run(prompts, [0.0] * 4 + [1.5])
    traffic, report = Traffic(), Report(goodput=("ttft:1000",))
    result = serving_result(Workload(), traffic, Target(), report, [run], {})
    assert (result["completed"], result["failed"]) == (2, 3)
    kinds = [error.partition(":")[0] for error in result["errors"]]
    assert kinds == ["", "", "queue_full", "queue_full", "context_length_exceeded"]
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (2, 4)
    assert result["duration"] == 4.0
    assert result["request_goodput"] == 1 / 4.0, "the second waits for 2 s"
