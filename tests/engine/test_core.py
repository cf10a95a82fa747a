"""EngineCore: the step loop at depth 1 and 2, refused requests, failing executors, step records. No model, no torch."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import replace

import pytest

from quire.cost.correct import HALF_COLD_SECONDS
from quire.engine.core import EngineCore
from quire.engine.warm_up import produce_tokens
from quire.errors import EngineDeadError, MemoryPlanError, WeightsError
from quire.messages import AddRequest, Command, ObservedOverhead, SetLimits
from quire.sampling_params import SamplingParams
from quire.schedule import Pending, RowsFailedError, ScheduledBatch, StepResult
from quire.scheduler.adaptive_depth import DrafterTime
from quire.scheduler.lanes import Lanes
from quire.scheduler.scheduler import Scheduler
from tests.cost.models import cost_model
from tests.guesser import Guesser
from tests.scheduler.driver import Driver, TimedDriver, expected, request


class FailOnce:
    """Raises `error` for the batch with this step id, before anything of it is applied or when it is computed."""

    def __init__(self, step_id: int, error: Exception, *, is_late: bool = True) -> None:
        self.step_id, self.error, self.is_late = step_id, error, is_late

    def __call__(self, batch: ScheduledBatch, is_computed: bool) -> Exception | None:
        return self.error if (batch.step_id, is_computed) == (self.step_id, self.is_late) else None


def finish(core: EngineCore) -> None:
    while core.has_work():
        core.step()


def test_depth_one_answers_in_the_same_step() -> None:
    driver = Driver()
    driver.add(request("a", [1, 2], 2))
    assert [d.token_ids for d in driver.step()] == [expected(driver.messages["a"])[0][:1]]
    (last,) = driver.step()
    assert last.finish_reason == "length"
    assert not driver.core.has_work()
    assert driver.step() == []


def test_depth_two_keeps_two_batches_in_flight() -> None:
    driver = Driver(depth=2)
    driver.add(request("a", [1, 2], 4))
    assert driver.step() == []
    assert driver.core.last_record is None, "no result was taken in"
    for number in range(2, 5):
        assert len(driver.step()) == 1
        assert len(driver.batches) == number, "the next batch is submitted before the oldest result is taken"
    assert driver.step()[0].finish_reason == "length"
    assert len(driver.batches) == 4
    driver.check_outputs()


def test_depth_two_computes_one_token_for_nothing_after_a_stop() -> None:
    tokens, _ = expected(request("a", [1, 2], 9))
    driver = Driver(depth=2)
    driver.run_all(request("a", [1, 2], 9, stop_token_ids=[tokens[2]]))
    assert len(driver.batches) == 4
    assert sum(len(d.token_ids) for d in driver.deltas["a"]) == 3


def test_depth_must_be_positive() -> None:
    driver = Driver()
    with pytest.raises(ValueError, match="at least 1, got 0"):
        EngineCore(driver.scheduler, driver, 0)


def test_refused_requests_are_answered_by_the_next_step() -> None:
    driver = Driver(max_num_queued_reqs=1)
    driver.add(request("a", [1], 1))
    driver.add(request("full", [1]))
    driver.core.abort(["a"])
    driver.add(request("empty", []))
    driver.add(request("long", [1] * 300))
    assert driver.core.has_work()
    deltas = {d.request_id: d for d in driver.step()}
    assert {name: d.error_code for name, d in deltas.items()} == {
        "full": "queue_full",
        "empty": "invalid_value",
        "long": "context_length_exceeded",
    }
    assert all(d.finish_reason == "error" and d.error for d in deltas.values())
    assert not driver.core.has_work()


def test_limits_and_commands() -> None:
    driver = Driver()
    driver.run_all(request("a", range(9)))
    driver.core.set_limits(SetLimits(max_num_seqs=3))
    assert driver.scheduler.limits.max_num_seqs == 3
    assert driver.pool.num_cached_blocks > 0
    driver.core.command(Command("reset_prefix_cache"))
    assert driver.pool.num_cached_blocks == 0
    with pytest.raises(ValueError, match="'dance', expected one of reset_prefix_cache, shutdown"):
        driver.core.command(Command("dance"))
    driver.core.command(Command("shutdown"))
    assert driver.executor.is_shut_down


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("step_id", range(6))
@pytest.mark.parametrize("is_late", [True, False])
def test_a_row_that_is_known_to_fail_fails_alone(is_late: bool, step_id: int, depth: int) -> None:
    """The rest of the batch is computed again and gets its own tokens."""
    failure = FailOnce(step_id, RowsFailedError(["b"], "b is broken"), is_late=is_late)
    driver = Driver(depth=depth, failure=failure)
    for name in "abc":
        driver.add(request(name, [*range(9), ord(name)], 8))
    driver.add(request("fork", [*range(9), ord("a")], 8, seed=3, fork_of="a"))
    driver.run()
    driver.check_outputs(except_for=["b"])
    assert driver.last("b").finish_reason == "error"
    assert driver.last("b").error == "b is broken"


def test_what_a_failed_batch_removed_is_removed_again() -> None:
    """The worker never saw that the first request was gone, and would hold it for ever."""
    driver = Driver(failure=FailOnce(1, RuntimeError("?"), is_late=False))
    driver.run_all(request("gone", [1], 1))
    driver.add(request("fails", [2], 1))
    driver.step()
    driver.add(request("last", [3], 1))
    driver.run()
    assert list(driver.executor.rows) == ["last"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("step_id", range(5))
@pytest.mark.parametrize("named", [[], ["somebody else"]])
def test_a_failure_for_an_unknown_reason_that_does_not_come_back_ends_nobody(
    named: list[str], step_id: int, depth: int
) -> None:
    error = RowsFailedError(named, "?") if named else RuntimeError("out of luck")
    driver = Driver(depth=depth, max_num_seqs=2, failure=FailOnce(step_id, error))
    for name in "abcd":
        driver.add(request(name, [*range(9), ord(name)], 8))
    driver.run()
    driver.check_outputs()
    assert any(len(batch.request_ids) == 2 for batch in driver.batches[step_id + 4 :]), "suspects are never cleared"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize(("bad", "after"), [("a", 0), ("a", 3), ("c", 0), ("c", 4), ("f", 0), ("f", 9), ("bd", 0)])
def test_a_row_that_makes_every_step_fail_is_found_and_ends_alone(bad: str, after: int, chunk: int, depth: int) -> None:
    """Nobody says which one it is."""
    failed: set[int] = set()

    def failure(batch: ScheduledBatch, is_computed: bool) -> Exception | None:
        if not is_computed or batch.step_id < after or not set(bad) & set(batch.request_ids):
            return None
        failed.add(batch.step_id)
        return RuntimeError("secret")

    driver = Driver(depth=depth, max_num_seqs=4, max_num_batched_tokens=chunk, failure=failure)
    for name in "abcdef":
        driver.add(request(name, [*range(9), ord(name)], 12))
    driver.add(request("fork", [*range(9), ord("a")], 12, seed=3, fork_of="a"))
    driver.run()
    driver.check_outputs(except_for=bad)
    for name in bad:
        assert driver.last(name).error == "The model step failed (RuntimeError).", "a client does not see internals"
    # The first failure makes suspects, the second finds one of them; at depth 2 each has a batch behind it.
    assert len(failed) <= 2 * len(bad) * depth


def test_steps_that_always_fail_end_everybody() -> None:
    driver = Driver(failure=lambda batch, is_computed: RuntimeError("broken for good"))
    for name in "abcd":
        driver.add(request(name, [1, 2], 3))
    driver.run()
    assert [driver.last(name).finish_reason for name in "abcd"] == ["error"] * 4


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("step_id", range(5))
@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 9 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_without_memory_the_newest_row_ends(error: Exception, step_id: int, depth: int) -> None:
    driver = Driver(depth=depth, max_num_seqs=3, failure=FailOnce(step_id, error))
    for name in "abcd":
        driver.add(request(name, [*range(9), ord(name)], 8))
    driver.run()
    driver.check_outputs(except_for="c")
    (*_, last) = driver.deltas["c"]
    assert (last.finish_reason, last.error_code) == ("error", "out_of_memory")
    assert last.error is not None
    assert "alloc" not in last.error


def test_memory_that_was_missing_for_one_request() -> None:
    """The worker knows whose arrays it could not make."""
    error = RowsFailedError(["b"], "The request could not be prepared (MemoryError).")
    error.__cause__ = MemoryError()
    driver = Driver(failure=FailOnce(0, error, is_late=False))
    for name in "abc":
        driver.add(request(name, [*range(9), ord(name)], 8))
    driver.run()
    driver.check_outputs(except_for="b")
    assert driver.last("b").error_code == "out_of_memory"


def test_a_request_that_was_accepted_before_is_accepted_again() -> None:
    driver = Driver(max_num_queued_reqs=1)
    driver.add(request("first", [1], 1))
    for name in "abc":
        driver.add(request(name, [2], 2, is_retry=name != "b"))
    driver.run()
    driver.check_outputs(except_for="b")
    assert driver.last("b").error_code == "queue_full"


@pytest.mark.parametrize("depth", [1, 2])
def test_the_predicted_time_of_what_is_in_flight(depth: int) -> None:
    """The predicted time in the process' beats while a step is computed: 0 when idle."""
    seen: list[float] = []
    cost = cost_model()
    load = cost.arithmetic.load([0], [8], 1)
    before = cost.predict(load).high
    driver = Driver(depth=depth, failure=lambda batch, is_computed: seen.append(core.predicted_seconds), cost=cost)
    core, ticks = driver.core, itertools.count()
    core._clock = lambda: float(next(ticks))
    driver.add(request("a", range(8), 1))
    driver.run()
    assert seen[0] == before
    assert core.predicted_seconds == 0.0
    assert cost.predict(load).seconds > before, "nothing was learnt from a step that took a second and more"


def test_nothing_is_learnt_from_a_step_that_is_captured() -> None:
    class Capturing(TimedDriver):
        def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
            pending = super().submit(batch)
            pending.result().has_captured = self.slowness() > 1
            return pending

    seconds = {"captured": 5.0, "repeated": 0.5}  # of what was predicted
    driver = Capturing(cost_model(), slowness=lambda: seconds[next(reversed(driver.messages))])
    load = driver.cost.arithmetic.load([0], [8], 1)
    before = driver.cost.predict(load)
    for name in seconds:
        driver.add(request(name, range(8), 1))
        driver.run()
        assert (driver.cost.predict(load) == before) == (name == "captured")


@pytest.mark.parametrize("is_probed", [False, True])
def test_the_first_step_after_a_pause_is_predicted_to_take_longer(is_probed: bool) -> None:
    """The engine did nothing for 2 s, which costs half of what an endless pause does; a measured step ends a pause."""
    driver = TimedDriver(cost_model())
    driver.cost.calibrate(replace(driver.cost.fit, cold=1.0))
    usual, extra = [], []
    for name in "ab":
        driver.add(request(name, range(8), 3))
        while driver.core.has_work():
            driver.step()
            if (record := driver.core.last_record) is not None:
                (usual if name == "a" else extra).append(record.predicted_seconds)
        driver.now += HALF_COLD_SECONDS
        if is_probed:
            driver.core.probe([(0, 1)])
    # What the first request teaches moves the predictions a little.
    assert [b - a for a, b in zip(usual, extra, strict=True)] == pytest.approx(
        [0.0 if is_probed else 0.5, 0, 0], abs=0.02
    )


def test_what_the_front_end_has_measured_reaches_the_cost_model() -> None:
    driver = TimedDriver(cost_model())
    for _ in range(100):
        driver.core.note_overhead(ObservedOverhead(100, 0.02))
    assert driver.cost.overhead is not None
    assert driver.cost.overhead.seconds(100) == pytest.approx(0.02, rel=0.1)


def test_the_predicted_time_has_that_of_a_drafter() -> None:
    seen: list[float] = []
    drafter_time = DrafterTime(1.0)
    driver = Driver(
        failure=lambda batch, is_computed: seen.append(driver.core.predicted_seconds),
        cost=cost_model(),
        proposer=Guesser(1.0),
        drafter_time=drafter_time,
    )
    driver.add(request("a", range(8), 30))
    driver.run()
    drafting = [drafter_time.of_step(list(map(len, batch.draft_token_ids))) for batch in driver.batches]
    assert max(drafting) > 1.0
    assert [int(seconds) for seconds in seen[::2]] == [int(seconds) for seconds in drafting]


@pytest.mark.parametrize("depth", [1, 2])
def test_warming_up_with_a_model_that_gives_no_numbers(depth: int) -> None:
    """A broken checkpoint, or float16 out of its range, at a start."""
    driver = Driver(depth=depth, row_failure=lambda name: "The logits are not numbers (NaN)")
    with pytest.raises(WeightsError, match=r"The model produced no token: The logits are not numbers.*--dtype"):
        produce_tokens(driver.core)


def test_an_error_fit_for_the_user_is_shown() -> None:
    driver = Driver(failure=FailOnce(0, MemoryPlanError("No memory left", fix="Buy some")))
    driver.add(request("a", [1]))
    driver.run()
    assert driver.last("a").error == "No memory left. Buy some."


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_error_ends_that_row_alone(depth: int) -> None:
    driver = Driver(depth=depth, row_failure=lambda name: "not a number" if name == "bad" else None)
    for name in ("a", "bad", "c"):
        driver.add(request(name, [1, 2, 3], 6))
    driver.run()
    driver.check_outputs(except_for=["bad"])
    (delta,) = driver.deltas["bad"]
    assert (delta.finish_reason, delta.error, delta.token_ids) == ("error", "not a number", [])


class OddExecutor:
    """Answers as told: raises in submit(), or gives a result of the wrong shape."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        if isinstance(self.answer, Exception):
            raise self.answer
        future: Future[StepResult] = Future()
        future.set_result(StepResult(batch.step_id, self.answer))  # type: ignore[arg-type]
        return future

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize("answer", [OSError("pipe"), [], [[1], [2]], [[]]])
def test_an_executor_that_breaks_the_contract_ends_requests_not_the_loop(answer: object) -> None:
    driver = Driver()
    core = EngineCore(driver.scheduler, OddExecutor(answer))
    core.add(request("a", [1]))
    (delta,) = core.step()
    assert delta.finish_reason == "error"
    assert not core.has_work()
    assert driver.pool.num_used_blocks == 0


@pytest.mark.parametrize("where", ["submit", "result", "behind a failure"])
def test_a_dead_engine_is_not_hidden(where: str) -> None:
    dead = EngineDeadError("The worker is gone")
    if where == "submit":
        core = EngineCore(Driver().scheduler, OddExecutor(dead))
    elif where == "result":
        core = Driver(failure=FailOnce(0, dead)).core
    else:
        core = Driver(depth=2, failure=lambda batch, is_computed: [RuntimeError("?"), dead][batch.step_id]).core
    core.add(request("a", range(9), 4))
    with pytest.raises(EngineDeadError):
        finish(core)


def test_shutdown_drops_what_is_in_flight() -> None:
    driver = Driver(depth=2)
    driver.add(request("a", range(9), 4))
    driver.step()
    driver.core.shutdown()
    assert driver.executor.is_shut_down


def test_a_record_says_what_the_step_did() -> None:
    driver = Driver(max_num_batched_tokens=16, block_size=4, num_blocks=10)
    driver.add(request("a", range(8), 3))
    driver.step()
    driver.add(request("b", range(10), 3))
    driver.add(request("c", range(20, 30), 3))
    driver.step()
    record = driver.core.last_record
    assert record is not None
    # a: one token of its output. b: 8 tokens are cached, in the 2 full blocks of a, so 2 are computed. c: 10.
    assert driver.deltas["b"][0].num_cached_tokens == 8
    assert (record.num_rows, record.num_prefill_tokens, record.num_decode_tokens) == (3, 2 + 10, 1)
    assert (record.num_sampled_tokens, record.num_kv_tokens_read) == (3, 9 + 10 + 10)
    assert (record.prefix_cache_queries, record.prefix_cache_hits) == (20, 8)
    assert (record.num_running, record.num_waiting, record.num_preemptions) == (3, 0, 0)
    assert (record.num_blocks_in_use, record.num_blocks_total) == (3 + 1 + 3, 10)


@pytest.mark.parametrize("depth", [1, 2])
def test_step_times_add_up_to_the_time_that_passed(depth: int) -> None:
    """On a clock that ticks at each look: records of overlapping steps do not count the same time twice."""
    ticks = iter(range(10_000))
    driver = Driver()
    core = EngineCore(driver.scheduler, driver.executor, depth, clock=lambda: float(next(ticks)))
    core.add(request("a", range(9), 20))
    total = 0.0
    while core.has_work():
        core.step()
        if core.last_record is not None:
            assert core.last_record.step_seconds >= core.last_record.output_seconds > 0
            assert core.last_record.schedule_seconds > 0
            total += core.last_record.step_seconds
    assert total <= next(ticks)
    assert total >= 20


def test_it_says_which_lost_requests_it_begins() -> None:
    """Before their step is computed, once, and not while they wait for a place."""
    told: list[tuple[int, list[str]]] = []
    driver = Driver(max_num_seqs=2, on_begun=lambda request_ids: told.append((len(driver.batches), request_ids)))
    driver.add(request("new", [1, 2], 9))
    for name in ("a", "b"):
        driver.add(request(name, [1, 2, 3], 4, is_retry=True))
    driver.step()
    assert told == [(0, ["a"])]
    driver.scheduler.preempt_last()
    driver.run()
    assert [request_ids for _, request_ids in told] == [["a"], ["b"]]


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_lost_requests_are_to_blame_if_scheduling_fails(num_lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that wait: one of them may be the reason. Otherwise it would end every further engine."""
    told: list[list[str]] = []
    first, *others = [Driver(max_num_seqs=1).scheduler for _ in range(num_lanes)]
    core = EngineCore(Lanes([first, *others]) if others else first, OddExecutor(None), on_begun=told.append)
    for name, is_retry in (("new", False), ("a", True), ("b", True)):
        core.add(request(name, [1, 2, 3], 4, is_retry=is_retry))

    def fail(scheduler: Scheduler) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(Scheduler, "begin_lane", fail)
    with pytest.raises(KeyError):
        core.step()
    assert sorted(told[0]) == ["a", "b"]


def test_a_lost_request_is_begun_before_its_adapter_is_read() -> None:
    """Reading it may be what ends engines. Nobody says it of a request that has lost none."""
    told: list[list[str]] = []
    driver = Driver(on_begun=told.append)
    for name, is_retry in (("new", False), ("again", True)):
        driver.core.add(AddRequest(name, [1], SamplingParams(), 4, adapter="any", is_retry=is_retry))
    assert told == [["again"]]


def test_a_step_of_lanes_is_predicted_by_the_busiest_one() -> None:
    """Its experts get the tokens of all. The record counts the work of all lanes."""
    cost, lanes = cost_model(), Lanes([Driver().scheduler for _ in range(2)])
    core = EngineCore(lanes, LanesExecutor(), cost=cost)
    for name, lane, prompt in (("a", 0, [1, 2, 3]), ("b", 1, [4, 5, 6, 7, 8]), ("c", 1, [9])):
        message = AddRequest(name, prompt, SamplingParams(), 4)
        message.lane = lane
        core.add(message)
    core.step()
    record, busiest = core.last_record, cost.arithmetic.load([0, 0], [5, 1], 2)
    assert record is not None
    assert record.predicted_seconds == cost_model().predict(busiest._replace(other_tokens=3)).seconds
    of_all = cost.arithmetic.load([0, 0, 0], [3, 5, 1], 3)
    assert (record.num_logits, record.kv_tokens, record.pairs) == (of_all.num_logits, of_all.kv_tokens, of_all.pairs)


class LanesExecutor:
    """Answers one token for each row of each lane."""

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        future: Future[StepResult] = Future()
        lanes = [StepResult(batch.step_id, [[7] for _ in lane.request_ids]) for lane in batch.lanes]
        future.set_result(StepResult.of_lanes(batch.step_id, lanes))
        return future

    def shutdown(self) -> None:
        """There is nothing to stop."""
