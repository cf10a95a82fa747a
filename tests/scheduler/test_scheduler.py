"""Scheduling rules one by one: order, budget, admission, preemption, stopping, abort, limits."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from quire.errors import ContextLengthError, InvalidRequestError, QueueFullError
from quire.messages import SetLimits
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.schedule import ScheduledBatch
from quire.scheduler.kv_cache_manager import KVCacheManager
from quire.scheduler.results import append_tokens
from quire.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.scheduler.driver import Driver, expected, request


def rows(batch: ScheduledBatch) -> dict[str, int]:
    return dict(zip(batch.request_ids, batch.num_scheduled_tokens, strict=True))


def bare(request_id: str, num_prompt: int = 4, max_tokens: int = 4) -> Request:
    return Request(request_id, list(range(num_prompt)), SamplingParams(), max_tokens, frozenset())


# Order and budget


def test_running_requests_come_before_waiting_ones_within_one_budget() -> None:
    driver = Driver(max_num_batched_tokens=10, enable_prefix_caching=False)
    driver.add(request("a", range(4)))
    driver.step()
    for name in "bc":
        driver.add(request(name, range(8)))
    driver.step()
    assert rows(driver.batches[-1]) == {"a": 1, "b": 8, "c": 1}
    driver.step()
    assert rows(driver.batches[-1]) == {"a": 1, "b": 1, "c": 7}


def test_long_prompts_are_cut_at_the_threshold_and_leave_room_for_others() -> None:
    driver = Driver(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    driver.add(request("long", range(19)))
    driver.add(request("short", range(3)))
    driver.step()
    assert rows(driver.batches[-1]) == {"long": 6, "short": 3}


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    driver = Driver(max_num_batched_tokens=10, enable_chunked_prefill=False, enable_prefix_caching=False)
    for name, length in (("a", 7), ("b", 6), ("c", 1)):
        driver.add(request(name, range(length), max_tokens=3))
    driver.step()
    assert rows(driver.batches[-1]) == {"a": 7}, "b does not fit, and c does not overtake it"
    driver.step()
    assert rows(driver.batches[-1]) == {"a": 1, "b": 6, "c": 1}


def test_without_chunked_prefill_a_prompt_above_the_whole_budget_is_cut_rather_than_stuck() -> None:
    driver = Driver(max_num_batched_tokens=10, enable_chunked_prefill=False)
    driver.run_all(request("a", range(25)))


def test_fcfs_is_fair() -> None:
    """Equal requests finish in the order in which they came, also with preemptions in between."""
    driver = Driver(num_blocks=13, max_num_seqs=5, enable_prefix_caching=False)
    names = [f"r{i:02}" for i in range(20)]
    for i, name in enumerate(names):
        driver.add(request(name, [i] * 9, max_tokens=11))
    ended: list[str] = []
    while driver.core.has_work():
        ended += [delta.request_id for delta in driver.step() if delta.finish_reason]
    assert ended == names
    assert driver.scheduler.num_running == 0
    assert sum(driver.last(name).num_preemptions for name in names) > 0, "nothing was preempted: the pool is too large"


def test_priority_decides_admission_and_who_is_preempted() -> None:
    driver = Driver(num_blocks=6, max_num_seqs=2, policy="priority", enable_prefix_caching=False)
    driver.add(request("low", range(8), max_tokens=16, priority=5))
    driver.step()
    driver.add(request("later", range(4), max_tokens=2, priority=9))
    driver.add(request("high", range(8), max_tokens=16, priority=1))
    driver.step()
    assert driver.running_ids() == ["high", "low"], "the more urgent one is served first, though it came last"
    driver.run()
    driver.check_outputs()
    assert driver.last("high").num_preemptions == 0
    assert driver.last("low").num_preemptions > 0


def test_admission_never_preempts() -> None:
    driver = Driver(num_blocks=4, policy="priority", enable_prefix_caching=False)
    driver.add(request("low", range(12), max_tokens=3, priority=5))
    driver.step()
    driver.add(request("high", range(8), max_tokens=2, priority=0))
    driver.step()
    assert driver.running_ids() == ["low"]
    driver.run()
    driver.check_outputs()
    assert driver.last("low").num_preemptions == 0


def test_a_request_is_admitted_only_if_its_whole_prompt_fits() -> None:
    """Prompts do not compete for blocks half-way, even if each first chunk would fit."""
    driver = Driver(num_blocks=10, long_prefill_token_threshold=4, enable_prefix_caching=False)
    for name in "abc":
        driver.add(request(name, range(17), max_tokens=3))
    driver.step()
    assert driver.running_ids() == ["a", "b"]
    assert driver.pool.num_used_blocks == 10
    driver.run()
    assert all(driver.last(name).num_preemptions == 0 for name in "abc")


def test_watermark_is_kept_free_at_admission_unless_nothing_runs() -> None:
    driver = Driver(num_blocks=10, watermark=0.5, enable_prefix_caching=False)
    driver.add(request("a", range(30)))
    driver.step()
    assert driver.running_ids() == ["a"]
    driver.run()
    driver.add(request("b", range(12), max_tokens=9))
    driver.add(request("c", range(12), max_tokens=9))
    driver.step()
    assert driver.running_ids() == ["b"], "3 + 3 blocks would leave 4 of 10"
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize("watermark", [-0.1, 1.0])
def test_watermark_is_a_share(watermark: float) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        KVCacheManager(Driver().pool, watermark=watermark)


def test_a_finished_requests_place_is_taken_in_the_next_step() -> None:
    """On a virtual clock of one second per step: no place stays empty while a request waits."""
    now = 0.0
    driver = Driver(max_num_seqs=2, clock=lambda: now)
    lengths = {"a": 2, "b": 5, "c": 3, "d": 1, "e": 4}
    for name, max_tokens in lengths.items():
        driver.add(request(name, [1], max_tokens))
    ends: dict[str, float] = {}
    while driver.core.has_work():
        ends |= {delta.request_id: now for delta in driver.step() if delta.finish_reason}
        now += 1
    queued = {name: driver.deltas[name][0].queued_seconds for name in lengths}
    assert queued == {"a": 0, "b": 0, "c": 2, "d": 5, "e": 5}
    assert ends == {"a": 1, "b": 4, "c": 4, "d": 5, "e": 8}


# Preemption


def test_preemption_takes_the_newest_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(num_blocks=9, enable_prefix_caching=False)
    for name in "abc":
        driver.add(request(name, range(8), max_tokens=20))
    with caplog.at_level(logging.WARNING):
        driver.run()
    driver.check_outputs()
    assert driver.last("a").num_preemptions == 0
    assert driver.last("c").num_preemptions >= driver.last("b").num_preemptions > 0
    (record,) = caplog.records
    assert "c is preempted by PreemptionMode.RECOMPUTE" in record.message
    assert "3 running requests use all 9 KV cache blocks" in record.message
    assert "--max-num-seqs" in record.message


def test_nobody_overtakes_a_preempted_request() -> None:
    driver = Driver(num_blocks=5, enable_prefix_caching=False)
    driver.add(request("a", range(8), max_tokens=8))
    driver.add(request("b", range(8), max_tokens=8))
    driver.step()
    driver.add(request("tiny", [1], max_tokens=1))
    driver.step()
    assert rows(driver.batches[-1]) == {"a": 1}
    assert driver.batches[-1].removed_request_ids == ["b"]
    driver.step()
    assert rows(driver.batches[-1]) == {"a": 1}, "b does not fit yet, and tiny does not overtake it"
    driver.run()
    driver.check_outputs()


def test_a_preempted_request_waits_for_its_results_and_keeps_the_token() -> None:
    driver = Driver(depth=2)
    driver.add(request("a", range(6)))
    driver.step()  # submits one batch and, at depth 2, does not wait for its result
    driver.scheduler.preempt_last()
    assert driver.scheduler.schedule() is None, "re-admitted with a result on its way"
    driver.step()
    assert driver.tokens("a") == expected(driver.messages["a"])[0][:1]
    driver.run()
    driver.check_outputs()
    assert driver.batches[1].removed_request_ids == ["a"]
    assert len(driver.batches[1].new_rows[0].token_ids) == 7, "the token that was in flight is not computed again"


# Stopping


def test_stop_id_of_the_user_is_the_stop_reason_and_eos_is_none() -> None:
    plain = request("plain", [1, 2, 3], 12)
    tokens, _ = expected(plain)
    stop = tokens[4]
    assert stop not in tokens[:4]
    driver = Driver()
    driver.run_all(
        plain,
        request("user", [1, 2, 3], 12, stop_token_ids=[stop]),
        request("eos", [1, 2, 3], 12, eos_token_ids=[stop]),
    )
    assert (driver.last("plain").finish_reason, driver.last("plain").stop_reason) == ("length", None)
    assert driver.tokens("user") == driver.tokens("eos") == tokens[:5]
    assert (driver.last("user").finish_reason, driver.last("user").stop_reason) == ("stop", stop)
    assert (driver.last("eos").finish_reason, driver.last("eos").stop_reason) == ("stop", None)


def test_a_stop_id_at_the_last_token_is_a_stop() -> None:
    tokens, _ = expected(request("a", [1, 2, 3], 5))
    driver = Driver()
    driver.run_all(request("a", [1, 2, 3], 5, stop_token_ids=[tokens[4]]))
    assert driver.last("a").finish_reason == "stop"


def test_a_stop_id_before_min_tokens_does_not_stop() -> None:
    """Also if a worker did not mask it."""
    early = Request("r", [1], SamplingParams(min_tokens=3, stop_token_ids=[7]), 9, frozenset({7}))
    assert append_tokens(early, [7, 7]) == (2, None)
    assert append_tokens(early, [7, 5]) == (1, "stop")
    assert (early.output_token_ids, early.stop_reason) == ([7, 7, 7], 7)


def test_min_tokens_come_before_any_stop() -> None:
    every_second = list(range(0, 50, 2))
    for min_tokens in range(6):
        driver = Driver()
        driver.run_all(request("a", [4, 5], 30, stop_token_ids=every_second, min_tokens=min_tokens))
        assert len(driver.tokens("a")) > min_tokens - 1
        assert not set(driver.tokens("a")[: min_tokens - 1]) & set(every_second)


def test_max_tokens_one_never_decodes() -> None:
    driver = Driver(depth=2)
    driver.run_all(request("a", range(5), 1))
    assert [rows(batch) for batch in driver.batches] == [{"a": 5}]


# Abort


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("when", range(6))
def test_abort_frees_at_once_and_answers_nothing(when: int, depth: int) -> None:
    driver = Driver(depth=depth, long_prefill_token_threshold=4)
    driver.add(request("a", range(9), 8))
    driver.add(request("other", range(3), 8))
    for _ in range(when):
        driver.step()
    got = len(driver.deltas["a"])
    driver.core.abort(["a"])
    driver.check()
    assert driver.pool.num_used_blocks <= 3, "only the other request owns blocks"
    driver.run()
    assert len(driver.deltas["a"]) == got
    driver.check_outputs(except_for=["a"])


def test_abort_of_preempted_parked_and_unknown_requests() -> None:
    driver = Driver(long_prefill_token_threshold=2)
    driver.add(request("parent", range(9)))
    driver.add(request("child", range(9), fork_of="parent"))
    driver.add(request("b", range(9)))
    driver.step()
    driver.step()
    driver.scheduler.preempt_last()
    driver.core.abort(["child", "b", "nobody", "b"])
    driver.check()
    driver.run()
    assert driver.deltas["child"] == driver.deltas["b"] == []
    driver.check_outputs(except_for=["child", "b"])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_id_can_be_used_again_while_old_results_are_on_their_way(depth: int) -> None:
    driver = Driver(depth=depth)
    driver.add(request("a", range(9), 8))
    driver.step()
    driver.step()
    driver.core.abort(["a"])
    driver.run_all(request("a", [3, 2, 1], 8))


# Limits


def test_queue_limit() -> None:
    scheduler = Driver(max_num_queued_reqs=2, max_num_seqs=1).scheduler
    scheduler.add(bare("a"))
    scheduler.schedule()
    scheduler.add(bare("b"))
    scheduler.add(bare("c"))
    with pytest.raises(QueueFullError, match=r"Got 2\. Expected fewer than 2 waiting requests"):
        scheduler.add(bare("d"))
    scheduler.abort(["b"])
    scheduler.add(bare("e"))
    scheduler.set_limits(SetLimits(max_num_queued_reqs=3))
    scheduler.add(bare("f"))
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 3)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        (bare("empty", 0), InvalidRequestError, "no tokens"),
        (bare("zero", 4, 0), InvalidRequestError, "max_tokens"),
        (bare("long", 190, 20), ContextLengthError, "at most 200 tokens"),
        (bare("taken"), InvalidRequestError, "in use"),
        (Request("token", [2**70] * 4, SamplingParams(), 1, frozenset()), InvalidRequestError, "token id"),
    ],
)
def test_what_can_never_run_is_refused(changed: Request, error: type[Exception], text: str) -> None:
    scheduler = Driver().scheduler
    scheduler.add(bare("taken"))
    with pytest.raises(error, match=text):
        scheduler.add(changed)
    assert scheduler.num_waiting == 1


def test_a_request_larger_than_the_whole_cache_is_refused_and_an_equal_one_runs() -> None:
    driver = Driver(num_blocks=4, block_size=4)
    with pytest.raises(ContextLengthError, match="at most 16, the whole cache"):
        driver.scheduler.add(bare("a", 10, 8))
    driver.run_all(request("b", range(10), 7))


def test_limits_move_while_running() -> None:
    driver = Driver(max_num_seqs=2, max_num_batched_tokens=64, enable_prefix_caching=False)
    for i in range(6):
        driver.add(request(f"r{i}", range(10 + i), 12))
    driver.step()
    assert driver.scheduler.num_running == 2
    driver.core.set_limits(SetLimits(max_num_seqs=4))
    driver.step()
    assert driver.scheduler.num_running == 4
    driver.core.set_limits(SetLimits(max_num_seqs=1))
    driver.step()
    assert driver.scheduler.num_running == 4, "a lowered limit preempts nobody"
    driver.core.set_limits(SetLimits(max_num_batched_tokens=3))
    driver.step()
    assert sum(rows(driver.batches[-1]).values()) == 3
    driver.core.set_limits(SetLimits(max_num_seqs=8, max_num_batched_tokens=40, long_prefill_token_threshold=5))
    driver.step()
    assert max(rows(driver.batches[-1]).values()) == 5
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs"])
def test_illegal_limits_change_nothing(name: str) -> None:
    scheduler = Driver().scheduler
    before = scheduler.limits
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        scheduler.set_limits(SetLimits(**{name: 0}))
    assert scheduler.limits is before


def test_illegal_construction() -> None:
    driver = Driver()
    with pytest.raises(ValueError, match="long_prefill_token_threshold"):
        SchedulerLimits(1, 1, 1, -1)
    with pytest.raises(ValueError, match="fcfs, priority"):
        Scheduler(driver.scheduler.limits, driver.kv, policy="lifo")  # type: ignore[arg-type]


# Records


def test_step_records_add_up() -> None:
    total: Counter[str] = Counter()
    driver = Driver(num_blocks=7)
    for name in "ab":
        driver.add(request(name, range(10), 10, cache_salt=name))
    while driver.core.has_work():
        driver.step()
        record = driver.core.last_record
        assert record is not None
        total.update(
            prefill=record.num_prefill_tokens,
            decode=record.num_decode_tokens,
            sampled=record.num_sampled_tokens,
            preemptions=record.num_preemptions,
            queries=record.prefix_cache_queries,
        )
    assert total["sampled"] == 20
    assert total["preemptions"] == driver.last("b").num_preemptions > 0
    assert total["queries"] == 20, "only first admissions count"
    assert total["decode"] == 18
    assert total["prefill"] == sum(batch.num_tokens for batch in driver.batches) - 18
