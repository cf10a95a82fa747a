"""Drafts to verify: a proposer that is right at random gives exactly the tokens of no proposer, in fewer steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from quire.messages import SetLimits, unpack
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.schedule import Pending, ScheduledBatch, StepResult
from quire.scheduler.adaptive_depth import AdaptiveDepth, DrafterTime
from quire.scheduler.speculation import MOST_ERRORS, MOST_UNFORGOTTEN, Speculation
from tests.guesser import Guesser
from tests.scheduler.driver import Driver, request
from tests.scheduler.test_sameness import LENGTHS, SIZE, mixed, prompt

RIGHT = [0.0, 0.6, 1.0]


@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_seqs": 8},
        {"num_blocks": 30},
        {"long_prefill_token_threshold": 1},
        {"max_num_batched_tokens": 30},
        {"enable_prefix_caching": False},
        {"enable_chunked_prefill": False},
        {"block_size": 1},
        {"max_shared_prefill_tokens": 5},
    ],
    ids=str,
)
def test_drafts_do_not_change_tokens(limits: dict[str, Any], right: float) -> None:
    guesser = Guesser(right)
    Driver(proposer=guesser, **{"num_blocks": 256, "max_num_seqs": 40, **limits}).run_all(*mixed())
    assert (guesser.num_right > 0, guesser.num_wrong > 0) == (right > 0, right < 1)


def test_drafts_that_hold_save_steps() -> None:
    messages = [request("a", prompt(9), max_tokens=60)]
    with_drafts, without = Driver(proposer=Guesser(1.0)), Driver()
    with_drafts.run_all(*messages)
    without.run_all(*messages)
    assert len(with_drafts.batches) < 0.4 * len(without.batches)


def test_the_depth_may_be_moved() -> None:
    """0 turns drafts off; tokens are the same, as `Driver` sees to."""
    driver = Driver(proposer=Guesser(1.0, longest=5))
    for most in (5, 2, 0, 3):
        driver.core.set_limits(SetLimits(spec_tokens=most))
        first = len(driver.batches)
        driver.run_all(request(f"most {most}", prompt(9), max_tokens=30))
        drafted = max(len(drafts) for batch in driver.batches[first:] for drafts in batch.draft_token_ids)
        assert drafted <= most
        assert (drafted > 0) == (most > 0)


@pytest.mark.parametrize("right", RIGHT)
def test_depths_that_follow_what_held_do_not_change_tokens(right: float) -> None:
    def seconds(starts: Sequence[int], most: int) -> list[float]:
        return [20e-3 + 1e-3 * count for count in range(most + 1)]

    counts = []
    for adaptive in (None, AdaptiveDepth(seconds)):
        guesser = Guesser(right)
        driver = Driver(proposer=guesser, adaptive=adaptive, num_blocks=256, max_num_seqs=40)
        driver.run_all(*mixed(), *(request(f"r{i}", prompt(5 + i, i), max_tokens=60, seed=i) for i in range(6)))
        counts.append((guesser.num_right, guesser.num_wrong))
    (_, fixed_wrong), (num_right, num_wrong) = counts
    if right == 0:
        assert num_wrong < 0.2 * fixed_wrong
    else:
        assert num_right > 50


def beside_prompts() -> AdaptiveDepth:
    """A token of a prompt takes 1 ms, and so does a draft beside it."""
    return AdaptiveDepth(
        lambda starts, most: [20e-3 + 1e-4 * n for n in range(most + 1)],
        beside_prompts=lambda count: (1e-3 * count, 1e-3),
    )


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 1}, {"watermark": 0.8}], ids=str)
def test_a_request_that_waits_for_its_first_token_waits_for_few_drafts(limits: dict[str, Any]) -> None:
    """The steps with its prompt have no drafts, neither the first of them nor the others. A request that cannot run
    yet changes nothing: there is no place for it, or there are too few free pages.
    """
    driver = Driver(proposer=Guesser(1.0), adaptive=beside_prompts(), max_num_batched_tokens=20, **limits)
    waits = bool(limits)
    driver.add(request("a", prompt(9), max_tokens=90))
    for _ in range(5):
        driver.step()
    driver.add(request("b", prompt(50), max_tokens=20))
    for _ in range(3):
        driver.step()
    with_prompt = [batch for batch in driver.batches if "b" in batch.request_ids]
    assert len(with_prompt) == (0 if waits else 3)
    assert any(map(any, (batch.draft_token_ids for batch in driver.batches[-3:]))) == waits
    driver.run_all()
    assert any(len(batch.request_ids) == 2 and all(batch.draft_token_ids) for batch in driver.batches) != waits


@pytest.mark.parametrize("limit", ["max_shared_prefill_tokens", "long_prefill_token_threshold"])
def test_a_prompt_that_comes_in_small_pieces_leaves_no_room_for_drafts(limit: str) -> None:
    """Nine tokens of a prompt in a step leave no room for a draft. The whole of it would leave room for ten."""
    limits = {"num_blocks": 400, "max_model_len": 1100, "max_num_batched_tokens": 1000, limit: 9}
    driver = Driver(proposer=Guesser(1.0), adaptive=beside_prompts(), **limits)
    driver.add(request("a", prompt(9), max_tokens=90))
    for _ in range(5):
        driver.step()
    driver.add(request("b", prompt(1000), max_tokens=20))
    for _ in range(6):
        driver.step()
    with_prompt = [batch for batch in driver.batches if "b" in batch.request_ids]
    assert len(with_prompt) == 6
    assert not any(any(batch.draft_token_ids) for batch in with_prompt)


def test_fewer_drafts_beside_more_requests() -> None:
    guesser = Guesser(1.0)
    guesser.continuation_of = lambda request_id: [0] * 99
    speculation = Speculation(guesser, 5, [(1, 3, 4), (4, 8, 2), (9, 99, 0)])
    requests = [Request(f"r{i}", [0], SamplingParams(), 99, frozenset()) for i in range(12)]
    for num_running, most in ((1, 4), (3, 4), (4, 2), (8, 2), (9, 0)):
        assert speculation.begin_step(requests[:num_running], 40) == (40 if most else 0)
        assert max(len(speculation.propose(requests[0], 9)) for _ in range(40)) == most


@pytest.mark.parametrize("right", RIGHT)
def test_the_prefix_cache_holds_no_refused_draft(right: float) -> None:
    """A later request takes over the blocks of the real output, up to the last full one."""
    driver = Driver(proposer=Guesser(right))
    for length in LENGTHS:
        name = f"first{length}"
        output = driver.run_all(request(name, prompt(length, length), max_tokens=33))[name]
        again = f"again{length}"
        driver.run_all(request(again, prompt(length, length) + output, seed=1))
        num_computed = length + len(output) - 1  # the last token is not computed
        assert driver.last(again).num_cached_tokens == num_computed // SIZE * SIZE


def test_those_who_wait_in_the_queue_take_no_drafts_from_those_who_run() -> None:
    messages = [request(f"r{i}", prompt(5, i), max_tokens=20, seed=i) for i in range(80)]

    def num_steps(right: float) -> int:
        driver = Driver(proposer=Guesser(right), max_num_seqs=4, num_blocks=256)
        driver.run_all(*messages)
        return len(driver.batches)

    assert num_steps(1.0) < 0.45 * num_steps(0.0)


@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("depth", [2, 3])
def test_with_several_batches_in_flight(depth: int, right: float) -> None:
    """Drafts are given where a newest token is known, and then for as long as the proposer has any."""
    guesser = Guesser(right)
    driver = Driver(proposer=guesser, depth=depth, max_num_seqs=40, num_blocks=256)
    messages = [request(f"r{i}", prompt(5 + i, i), max_tokens=60, seed=i) for i in range(6)]

    def narrow(index: int) -> None:  # whom some steps have no token for knows its newest one behind them
        driver.core.set_limits(SetLimits(max_num_batched_tokens=1 if index % 8 < 4 else 64))

    for message in messages:
        driver.add(message)
    driver.run(narrow)
    driver.check_outputs()
    assert guesser.num_right + guesser.num_wrong > 30


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_requests_whose_drafts_pay_wait_for_their_newest_token(is_adaptive: bool) -> None:
    """So two batches in flight take as many steps as one, and without accepted drafts no request waits."""

    def num_steps(depth: int, right: float, *, waits: bool) -> int:
        adaptive = AdaptiveDepth(lambda starts, most: [20e-3 + 1e-4 * n for n in range(most + 1)], None, depth)
        driver = Driver(proposer=Guesser(right), adaptive=adaptive if is_adaptive else None, depth=depth, waits=waits)
        driver.run_all(*(request(f"r{i}", prompt(5 + i, i), max_tokens=60, seed=i) for i in range(3)))
        return len(driver.batches)

    assert num_steps(2, 1.0, waits=True) < 1.25 * num_steps(1, 1.0, waits=True)
    assert num_steps(2, 1.0, waits=True) < 0.6 * num_steps(2, 1.0, waits=False)


def test_nobody_waits_for_drafts_that_do_not_pay() -> None:
    adaptive = AdaptiveDepth(lambda starts, most: [20e-3 + 1e-3 * n for n in range(most + 1)], None, 2)
    driver = Driver(proposer=Guesser(0.0), adaptive=adaptive, depth=2, waits=True)
    driver.add(request("a", prompt(5), max_tokens=150))
    in_flight = []
    driver.run(lambda index: in_flight.append(len(driver.core._in_flight)))
    driver.check_outputs()
    assert in_flight[20:].count(1) > 0.9 * len(in_flight[20:])


def test_a_drafter_is_told_what_a_request_has_when_it_gets_blocks() -> None:
    class Noting(AdaptiveDepth):
        def admit(self, request: Request, num_cached: int) -> None:
            super().admit(request, num_cached)
            told.append((request.request_id, num_cached, request.num_preemptions))

    told: list[tuple[str, int, int]] = []
    driver = Driver(
        proposer=Guesser(1.0), adaptive=Noting(lambda starts, most: [20e-3 + 1e-4 * n for n in range(most + 1)])
    )
    driver.run_all(request("a", prompt(4 * SIZE + 1), max_tokens=9))
    driver.add(request("b", prompt(4 * SIZE + 1), max_tokens=30, seed=1))
    driver.run(lambda index: driver.scheduler.preempt_last() if index == 3 else None)
    (*first, (_, num_cached, _)) = told
    assert first == [("a", 0, 0), ("b", 4 * SIZE, 0)]
    assert told[-1][::2] == ("b", 1)
    assert num_cached >= 4 * SIZE


@pytest.mark.parametrize("at", range(3))
def test_preemption_while_drafts_are_in_flight(at: int) -> None:
    driver = Driver(proposer=Guesser(0.7), depth=2, max_num_seqs=40, num_blocks=256)
    for i in range(6):
        driver.add(request(f"r{i}", prompt(5 + i, i), max_tokens=60, seed=i))
    verifying = []

    def preempt(index: int) -> None:
        driver.core.set_limits(SetLimits(max_num_batched_tokens=1 if index % 8 < 4 else 64))
        if driver.core._in_flight and any(driver.batches[-1].draft_token_ids):
            verifying.append(index)
            while len(verifying) % 3 == at and driver.scheduler.num_running:
                driver.scheduler.preempt_last()

    driver.run(preempt)
    driver.check_outputs()
    assert len(verifying) > 3


def test_nobody_is_preempted_for_drafts() -> None:
    """The first request needs its third block only when the second one has ended, and drafts must not take it first."""
    for seed in range(10):
        driver = Driver(num_blocks=4, max_num_seqs=30, proposer=Guesser(1.0, longest=9, seed=seed))
        driver.run_all(request("long", prompt(SIZE), max_tokens=6), request("short", prompt(SIZE, 1), max_tokens=2))
        assert all(driver.last(name).num_preemptions == 0 for name in driver.messages)


def test_drafts_leave_a_token_and_a_row_of_logits_for_everybody() -> None:
    """There are 32 rows of logits, however few requests may run, and one for each of these."""
    for num_requests, max_num_seqs, num_rows in ((5, 6, 32), (30, 31, 32), (33, 35, 35)):
        driver = Driver(
            max_num_seqs=max_num_seqs, num_blocks=512, max_num_batched_tokens=200, proposer=Guesser(1.0, longest=9)
        )
        driver.run_all(*(request(f"r{i}", prompt(3, i), max_tokens=30) for i in range(num_requests)))
        drafting = [batch for batch in driver.batches if any(batch.draft_token_ids)]
        crowded = [sum(batch.num_logits) for batch in drafting if len(batch.request_ids) == num_requests]
        assert max_num_seqs <= max(crowded) <= num_rows


def test_a_full_server_drafts_nothing_until_a_request_ends() -> None:
    """With 32 requests or more each row of logits belongs to a request, also to one that waits: docs/speculation.md."""
    driver = Driver(max_num_seqs=36, num_blocks=512, max_num_batched_tokens=200, proposer=Guesser(1.0, longest=9))
    driver.run_all(*(request(f"r{i}", prompt(3, i), max_tokens=8 + i % 3) for i in range(40)))
    full = [batch for batch in driver.batches if len(batch.request_ids) == 36]
    assert len(full) > 5
    assert not any(any(batch.draft_token_ids) for batch in full)
    assert any(any(batch.draft_token_ids) for batch in driver.batches if len(batch.request_ids) < 36)


@pytest.mark.parametrize("right", RIGHT)
def test_drafts_do_not_cross_the_border_of_longrope(right: float) -> None:
    """KV behind the border is of the other rotary table: the request is computed again before it gets there."""
    driver = Driver(rope_switches_after=20, proposer=Guesser(right))
    driver.run_all(*(request(f"r{i}", prompt(15, i), max_tokens=12) for i in range(4)))
    new = {row.request_id: [] for batch in driver.batches for row in batch.new_rows}
    for batch in driver.batches:
        for row in batch.new_rows:
            new[row.request_id].append(row.rope_offset)
        for request_id, start, count in zip(
            batch.request_ids, batch.num_computed_tokens, batch.num_scheduled_tokens, strict=True
        ):
            assert start + count <= 20 or new[request_id][-1] == 20
    assert all(offsets == [0, 20] for offsets in new.values())


@pytest.mark.parametrize("min_tokens", [0, 12])
def test_a_stop_among_drafts_that_hold_ends_the_request(min_tokens: int) -> None:
    driver = Driver(proposer=Guesser(1.0))
    driver.run_all(
        *(
            request(f"r{i}", prompt(5, i), 60, stop_token_ids=[*range(0, 50, 7)], min_tokens=min_tokens)
            for i in range(9)
        )
    )
    assert all(driver.last(name).finish_reason == "stop" for name in driver.messages)


@pytest.mark.parametrize("right", RIGHT)
def test_logprobs_come_with_their_tokens(right: float) -> None:
    results = []
    for proposer in (None, Guesser(right)):
        driver = Driver(proposer=proposer)
        driver.run_all(request("a", prompt(7), 40, logprobs=2, prompt_logprobs=1, stop_token_ids=[11, 12, 13]))
        found = [entry for delta in driver.deltas["a"] for entry in delta.logprobs or []]
        assert [entry.token_ids[0] for entry in found] == driver.tokens("a")
        results.append((found, [unpack(entry).token_ids for entry in driver.deltas["a"][0].prompt_logprobs or []]))
    assert results[0] == results[1]


def test_a_row_that_fails_while_it_verifies_fails_alone() -> None:
    bad: set[str] = set()
    driver = Driver(proposer=Guesser(0.8), row_failure=lambda request_id: "bad row" if request_id in bad else None)
    for i in range(3):
        driver.add(request(f"r{i}", prompt(5, i), max_tokens=30))

    def fail(index: int) -> None:
        if index == 4:
            bad.add("r1")

    driver.run(fail)
    driver.check_outputs(except_for=["r1"])
    assert driver.last("r1").error == "bad row"


def test_the_record_counts_drafts_as_decoding() -> None:
    driver = Driver(proposer=Guesser(1.0))
    driver.add(request("a", prompt(5), max_tokens=30))
    records = []

    def note(index: int) -> None:
        if driver.core.last_record is not None:
            records.append(driver.core.last_record)

    driver.run(note)
    driver.check_outputs()
    assert sum(record.num_prefill_tokens for record in records) <= 5
    assert sum(record.num_sampled_tokens for record in records) <= 30
    assert max(record.num_decode_tokens for record in records) > 1


def test_the_record_says_what_became_of_drafts() -> None:
    driver = Driver(proposer=Guesser(0.7))
    for i in range(3):
        driver.add(request(f"r{i}", prompt(5, i), max_tokens=30))
    records = []

    def note(index: int) -> None:
        if driver.core.last_record is not None:
            records.append(driver.core.last_record)

    driver.run(note)
    drafts = [drafts for batch in driver.batches[:-1] for drafts in batch.draft_token_ids if drafts]
    assert sum(record.num_drafts for record in records) == len(drafts)
    assert sum(record.num_draft_tokens for record in records) == sum(map(len, drafts))
    for record in records:
        assert sum(record.accepted_per_position) == record.num_accepted_tokens <= record.num_draft_tokens
        assert list(record.accepted_per_position) == sorted(record.accepted_per_position, reverse=True)
        assert max(record.accepted_per_position, default=0) <= record.num_drafts
    assert sum(record.num_accepted_tokens for record in records) > 10


def test_the_proposer_is_told_of_every_end() -> None:
    guesser = Guesser(1.0)
    driver = Driver(proposer=guesser, row_failure=lambda request_id: "bad row" if request_id == "bad" else None)
    for name in ("a", "b", "bad", "gone"):
        driver.add(request(name, prompt(5), max_tokens=9))
    driver.step()
    driver.core.abort(["gone"])
    driver.run()
    assert sorted(guesser.forgotten) == ["a", "b", "bad", "gone"]


def test_a_request_whose_drafter_fails_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    class FailingDrafter(Driver):
        def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
            pending = super().submit(batch)
            for row, request_id in enumerate(batch.request_ids):
                if request_id == "r1" and batch.draft_token_ids[row]:
                    pending.result().draft_failures[row] = "its logits were NaN"
            return pending

    driver = FailingDrafter(proposer=Guesser(1.0))
    failures, num_draft_tokens = [], 0

    def count(index: int) -> None:
        nonlocal num_draft_tokens
        if index > 0:
            failures.append(driver.core.last_record.num_draft_failures)
            num_draft_tokens += driver.core.last_record.num_draft_tokens

    for i in range(3):
        driver.add(request(f"r{i}", prompt(5, i), max_tokens=30))
    driver.run(count)
    driver.check_outputs()
    drafting = [
        request_id
        for batch in driver.batches
        for request_id, drafts in zip(batch.request_ids, batch.draft_token_ids, strict=True)
        if drafts
    ]
    assert drafting.count("r1") == 1 < drafting.count("r0")
    assert sum(failures) == 1
    made = [
        len(drafts)
        for batch in driver.batches
        for request_id, drafts in zip(batch.request_ids, batch.draft_token_ids, strict=True)
        if request_id != "r1"
    ]
    assert num_draft_tokens == sum(made), "drafts that could not be made are none"
    assert "Request r1 goes on without drafts: its logits were NaN" in caplog.text


class Forgetful(Guesser):
    """Raises when it is told of the end of `bad` for the first time."""

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        if request_id == "bad" and self.forgotten.count("bad") == 1:
            raise KeyError("no such text")


def test_a_drafter_that_cannot_forget_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Others draft on. The next request with this id has no drafts, and the one after it has some again."""
    driver, num_failures, drafting = Driver(proposer=Forgetful(1.0)), 0, list[int]()

    def count(index: int) -> None:
        nonlocal num_failures
        num_failures += driver.core.last_record.num_draft_failures if driver.core.last_record is not None else 0

    for turn in range(3):
        first = len(driver.batches)
        driver.add(request("bad", prompt(5, turn), max_tokens=12))
        driver.add(request(f"good{turn}", prompt(5, 7 + turn), max_tokens=30))
        driver.run(count)
        driver.check_outputs()
        rows = [zip(batch.request_ids, batch.draft_token_ids, strict=True) for batch in driver.batches[first:]]
        names = [name for row in rows for name, drafts in row if drafts]
        assert f"good{turn}" in names
        drafting.append(names.count("bad"))
    assert drafting[0] > 0 == drafting[1] < drafting[2]
    assert num_failures == 1
    assert "The drafter could not forget request bad" in caplog.text
    assert "KeyError: 'no such text'" in caplog.text, "the traceback says where"


class NeverForgetting(Guesser):
    """Raises whenever it is told of an end."""

    def forget(self, request_id: str) -> None:
        raise KeyError(request_id)


def test_a_drafter_that_never_forgets_costs_bounded_memory() -> None:
    speculation = Speculation(NeverForgetting(1.0), 4)
    for index in range(3 * MOST_UNFORGOTTEN):
        speculation.forget(f"r{index}")
    assert len(speculation._stopped) == len(speculation._unforgotten) == MOST_UNFORGOTTEN
    assert f"r{3 * MOST_UNFORGOTTEN - 1}" in speculation._stopped
    oldest, second = list(speculation._unforgotten)[:2]
    speculation.forget(oldest)
    speculation.forget("another")
    assert oldest in speculation._stopped, "it has failed again, so it is not the oldest any more"
    assert second not in speculation._stopped


class Eager(Guesser):
    """Drafts whenever it is asked."""

    def propose(self, request: Request, most: int) -> list[int]:
        while not (drafts := super().propose(request, most)):
            pass
        return drafts


class RaisingDrafter(Driver):
    """Its drafter raises in the steps in which `raises` says so of the requests that draft."""

    def __init__(self, raises: Callable[[list[str]], bool]) -> None:
        super().__init__(proposer=Eager(1.0, longest=2), max_model_len=400, num_blocks=400)
        self.raises, self.drafting, self.num_failures = raises, list[list[str]](), 0
        for i in range(3):
            self.add(request(f"r{i}", prompt(5, i), max_tokens=300))
        self.run(self.count)
        self.count(-1)
        self.check_outputs()

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        pending, columns = super().submit(batch), zip(batch.request_ids, batch.draft_token_ids, strict=True)
        self.drafting.append([request_id for request_id, drafts in columns if drafts])
        if self.raises(self.drafting[-1]):
            pending.result().draft_error = "no drafts today"
        return pending

    def count(self, index: int) -> None:
        if self.core.last_record is not None:
            self.num_failures += self.core.last_record.num_draft_failures


def test_a_drafter_that_raises_once_drafts_again() -> None:
    """For each request alone, and then for all as before."""
    steps = itertools.count()
    driver = RaisingDrafter(lambda drafting: len(drafting) == 3 and next(steps) == 4)
    assert driver.num_failures == 3
    failed = [index for index, names in enumerate(driver.drafting) if len(names) == 3][4]
    next_turns = [
        min(index for index, names in enumerate(driver.drafting) if index > failed and f"r{i}" in names)
        for i in range(3)
    ]
    assert failed + 1 < min(next_turns)
    assert len(set(next_turns)) == 3
    assert max(next_turns) < failed + 10
    assert sum(len(names) == 3 for names in driver.drafting[failed:]) > 40


def test_a_request_that_always_makes_the_drafter_raise_drafts_no_more() -> None:
    driver = RaisingDrafter(lambda drafting: "r1" in drafting)
    turns = [sum(name in names for names in driver.drafting) for name in ("r0", "r1", "r2")]
    assert turns[1] == MOST_ERRORS + 1
    assert min(turns[0], turns[2]) > 60


def test_a_drafter_in_the_worker_waits_for_what_is_in_flight() -> None:
    """It would do so anyway: the step before would seem to take its time."""

    class Alone(Driver):
        def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
            if any(batch.draft_token_ids):
                beside.append(len(self.core._in_flight))
            return super().submit(batch)

    for drafter_time in (None, DrafterTime(1e-3)):
        beside: list[int] = []
        driver = Alone(proposer=Guesser(1.0), depth=2, drafter_time=drafter_time, max_num_seqs=4)
        for i in range(4):
            driver.add(request(f"r{i}", prompt(5, i), max_tokens=60))
        for index in itertools.count():
            if not driver.core.has_work():
                break
            driver.core.set_limits(SetLimits(max_num_batched_tokens=1 if index % 8 < 4 else 64))
            driver.step()
        driver.check_outputs()
        assert any(beside) == (drafter_time is None)
