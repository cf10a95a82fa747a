"""Lanes: the lane of a request, common steps, and the request to blame. No model, no torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from quire.engine.core import EngineCore, OnBegun
from quire.engine.deterministic import DeterministicExecutor
from quire.formats.kv_groups import ONE_LAYER
from quire.messages import AddRequest, RequestDelta, SetLimits
from quire.schedule import LaneUse, Pending, RowsFailedError, ScheduledBatch, StepResult
from quire.scheduler.adapter_turns import PATIENCE, AdapterTurns
from quire.scheduler.adaptive_depth import DrafterTime
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.kv_cache_manager import KVCacheManager
from quire.scheduler.lanes import LaneDrafts, Lanes
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.proposer import Proposer
from quire.scheduler.queue import ORDER_KEYS
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import Speculation
from tests.guesser import Guesser
from tests.scheduler.driver import VOCAB_SIZE, expected, request

NUM_BLOCKS, BLOCK_SIZE = 16, 4


class Engine:
    """Some lanes, each with an executor of its own. A step is computed when its result is asked for, or fails."""

    def __init__(
        self,
        num_lanes: int = 2,
        depth: int = 1,
        failure: Callable[[ScheduledBatch], Exception | None] = lambda batch: None,
        on_begun: OnBegun = lambda request_ids: None,
        adapters: Callable[[], AdapterTurns | None] = lambda: None,
        proposer: Proposer | None = None,
        **limits: Any,
    ) -> None:
        bounds = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 60} | limits
        self.lanes = Lanes(
            [
                Scheduler(
                    SchedulerLimits(**bounds),
                    KVCacheManager(
                        BlockPool(NUM_BLOCKS, BLOCK_SIZE),
                        (ONE_LAYER,),
                        step_tokens=bounds["max_num_batched_tokens"],
                        depth=depth,
                        enable_prefix_caching=True,
                    ),
                    adapters=adapters(),
                    speculation=None if proposer is None else Speculation(proposer, 3, waits=True),
                    clock=lambda: 0.0,
                )
                for _ in range(num_lanes)
            ]
        )
        self._executors = [
            DeterministicExecutor(NUM_BLOCKS, BLOCK_SIZE, vocab_size=VOCAB_SIZE) for _ in range(num_lanes)
        ]
        self._failure = failure
        self.core = EngineCore(self.lanes, self, depth, on_begun=on_begun)
        self.batches: list[ScheduledBatch] = []
        self.deltas: dict[str, list[RequestDelta]] = {}

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        self.batches.append(batch)
        future: Future[StepResult] = Future()
        if (error := self._failure(batch)) is not None:
            future.set_exception(error)
            return future
        found = [
            executor.submit(own).result() if own.request_ids else StepResult(own.step_id, [])
            for executor, own in zip(self._executors, batch.lanes, strict=True)
        ]
        future.set_result(StepResult.of_lanes(batch.step_id, found))
        return future

    def shutdown(self) -> None: ...

    def add(self, *messages: AddRequest) -> None:
        for message in messages:
            self.deltas[message.request_id] = []
            self.core.add(message)

    def step(self) -> None:
        for delta in self.core.step():
            self.deltas[delta.request_id].append(delta)

    def run(self) -> None:
        while self.core.has_work():
            self.step()
        for lane in self.lanes.lanes:
            lane.kv.check()
            assert lane.num_blocks_in_use == 0

    def tokens(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas[request_id] for token in delta.token_ids]

    def where(self, request_id: str) -> int:
        (lane,) = [index for index, lane in enumerate(self.lanes.lanes) if request_id in lane]
        return lane


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_get_their_tokens_in_any_lane(depth: int) -> None:
    """Also those that share a prompt, are short of blocks, or come while others run."""
    engine = Engine(3, depth)
    messages = [request(f"r{index}", [index % 3] * (5 + 2 * index), 12) for index in range(12)]
    messages += [request("fork", messages[-1].prompt_token_ids, 12, fork_of="r11", seed=4)]
    engine.add(*messages[:5])
    for _ in range(4):
        engine.step()
    engine.add(*messages[5:])
    assert engine.where("fork") == engine.where("r11")
    engine.run()
    for message in messages:
        assert engine.tokens(message.request_id) == expected(message)[0], message.request_id
    for batch in engine.batches:
        assert batch.request_ids == [name for own in batch.lanes for name in own.request_ids]
        counts = [sum(own.num_scheduled_tokens) for own in batch.lanes]
        assert all(own.lane_tokens == counts for own in batch.lanes)
        assert batch.num_tokens == sum(counts) > 0
    assert any(not own.request_ids for batch in engine.batches for own in batch.lanes), "no lane was idle"


@pytest.mark.parametrize("depth", [1, 2])
def test_each_lane_drafts_for_its_requests(depth: int) -> None:
    """The tokens of a lane count with its drafts. An engine counts the drafts of all lanes."""
    guesser = Guesser(0.6, vocab_size=VOCAB_SIZE)
    engine = Engine(3, depth, proposer=guesser)
    messages = {f"r{index}": request(f"r{index}", [index % 3] * (5 + 2 * index), 12) for index in range(7)}
    guesser.continuation_of = lambda name: expected(messages[name])[0]
    engine.add(*messages.values())
    num_drafts = num_held = 0
    while engine.core.has_work():
        engine.step()
        if (record := engine.core.last_record) is not None:
            num_drafts += record.num_draft_tokens
            num_held += sum(record.accepted_per_position)
            assert sum(record.accepted_per_position) == record.num_accepted_tokens
    assert {name: engine.tokens(name) for name in messages} == {name: expected(messages[name])[0] for name in messages}
    drafted = [[sum(map(len, own.draft_token_ids)) for own in batch.lanes] for batch in engine.batches]
    assert num_drafts == sum(map(sum, drafted)) > num_held > 5
    assert any(sum(map(bool, of_lanes)) > 1 for of_lanes in drafted), "lanes have drafted in turns"
    for batch in engine.batches:
        assert all(own.lane_tokens == [sum(each.num_scheduled_tokens) for each in batch.lanes] for own in batch.lanes)


def test_lanes_that_wait_for_their_tokens_step_together() -> None:
    """Also if one lane has begun earlier. In turns, each step would take as long for half of the rows."""
    guesser = Guesser(0.6, vocab_size=VOCAB_SIZE)
    engine = Engine(2, 2, proposer=guesser)
    messages = {name: request(name, [index] * 5, 20) for index, name in enumerate(("early", "late"))}
    guesser.continuation_of = lambda name: expected(messages[name])[0]
    engine.add(messages["early"])
    engine.step()
    assert engine.core._in_flight, "its tokens are known already"
    engine.add(messages["late"])
    num_before = len(engine.batches)
    while all(name in lane for name, lane in zip(messages, engine.lanes.lanes, strict=True)):
        engine.step()
    together = [all(own.request_ids for own in batch.lanes) for batch in engine.batches[num_before:]]
    engine.run()
    assert len(together) > 5
    assert sum(together) >= len(together) - 2, together
    assert all(engine.tokens(name) == expected(messages[name])[0] for name in messages)


def test_the_slowest_drafter_of_a_step_counts() -> None:
    """Lanes draft side by side."""
    lanes = [Speculation(Guesser(1.0), 3, drafter_time=DrafterTime(seconds)) for seconds in (1e-3, 5e-3, 2e-3)]
    batches = [ScheduledBatch(0, draft_token_ids=[[1, 2]]) for _ in lanes]
    drafts = LaneDrafts(lanes)
    assert drafts.slowest_seconds(batches) == DrafterTime(5e-3).of_step([2])
    assert drafts.drafter_seconds(ScheduledBatch(0, lanes=batches)) == drafts.slowest_seconds(batches)


def test_adapters_take_turns_in_all_lanes_together() -> None:
    """There is one place, although each lane would begin with another adapter. If an adapter is lost, the requests that
    wait for it end in each lane, and no others.
    """
    engine = Engine(adapters=lambda: AdapterTurns(1, ORDER_KEYS["fcfs"], {"first", "second"}.__contains__))
    names = ["first", "second", "lost", None]
    places = [(index, index % 2) for index in range(16)]
    messages = [
        request(f"r{index}", [index] * 5, 6, adapter=names[(index // 2 + lane) % 4], lane=lane)
        for index, lane in places
    ]
    engine.add(*messages)
    assert len({each.sequence for each in engine.lanes.requests}) == len(messages), "their order needs one number each"
    waiting = {message.request_id for message in messages if message.adapter == "lost"}
    assert {engine.where(request_id) for request_id in waiting} == {0, 1}
    while engine.core.has_work():
        engine.step()
        deltas = engine.lanes.fail_waiting("lost", "it is gone") if len(engine.batches) == 2 else []
        assert {delta.request_id for delta in deltas if delta.error == "it is gone"} == (waiting if deltas else set())
    assert len(engine.batches) > 2
    adapter_of = {message.request_id: message.adapter for message in messages}
    used = [{adapter_of[request_id] for request_id in batch.request_ids} - {None} for batch in engine.batches]
    assert {len(each) for each in used} == {1}
    for message in messages:
        wanted = [] if message.request_id in waiting else expected(message)[0]
        assert engine.tokens(message.request_id) == wanted


def test_who_is_overtaken_in_several_lanes_waits_as_many_steps() -> None:
    """A step in which each lane lets a later request run counts once."""
    engine = Engine(adapters=lambda: AdapterTurns(1, ORDER_KEYS["fcfs"], {"first", "second"}.__contains__))
    begin, end = 5, None
    for step in range(2 * PATIENCE):
        engine.add(*(request(f"{step} {lane}", [1, 2], 3, adapter="first", lane=lane) for lane in range(2)))
        if step == begin:
            engine.add(request("overtaken", [1], 3, adapter="second"))
        engine.step()
        if end is None and "overtaken" in engine.batches[-1].request_ids:
            end = step
    assert end is not None
    assert PATIENCE <= end - begin < PATIENCE + 10
    engine.run()


def test_a_lost_request_of_any_lane_is_begun() -> None:
    told: list[list[str]] = []
    engine = Engine(on_begun=told.append)
    for name in ("a", "b"):
        engine.core.add(request(name, [1, 2, 3], 4, is_retry=True))
    while engine.core.has_work():
        engine.core.step()
    assert told == [["a", "b"]], "each lane has one"


def test_only_lanes_say_how_they_are_used() -> None:
    """The engine core asks a Scheduler too."""
    lanes = Engine(3).lanes
    batch = ScheduledBatch(0, lanes=[ScheduledBatch(0) for _ in lanes.lanes])
    assert [len(each.uses(batch)) for each in (lanes, lanes.lanes[0])] == [3, 0]


def test_a_request_goes_where_fewest_are_and_its_prefix_is() -> None:
    engine = Engine(2)
    engine.add(request("a", [1] * 20, 2), request("b", [2] * 20, 2), request("c", [3] * 20, 2))
    assert [engine.where(name) for name in "abc"] == [0, 1, 0]
    engine.run()
    engine.add(request("b2", [2] * 24, 2), request("a2", [1] * 24, 2))
    assert [engine.where(name) for name in ("a2", "b2")] == [0, 1]
    engine.add(request("b3", [2] * 24, 2), request("asked", [9] * 5, 2, lane=1))
    assert engine.where("asked") == 1
    engine.run()


def test_what_is_of_all_lanes_together() -> None:
    engine = Engine(2, max_num_seqs=1, max_num_queued_reqs=2)
    engine.add(request("a", [1] * 5, 3), request("b", [2] * 5, 3))
    engine.step()
    assert engine.core.last_record is not None
    assert engine.core.last_record.lanes == (LaneUse(5, 1, 0, 2), LaneUse(5, 1, 0, 2))
    assert (engine.core.last_record.num_running, engine.core.last_record.num_blocks_in_use) == (2, 4)
    engine.add(request("a", [4], 3), *(request(name, [3], 3) for name in "cde"))
    engine.step()
    assert "waiting queue is full" in (engine.deltas["e"][-1].error or "")
    assert any("id is in use" in (delta.error or "") for delta in engine.deltas["a"])
    engine.core.set_limits(SetLimits(max_num_seqs=2))
    assert {lane.limits.max_num_seqs for lane in engine.lanes.lanes} == {2}
    engine.core.abort(["a", "c"])
    engine.run()
    assert [len(engine.tokens(name)) for name in "bd"] == [3, 3]


def test_a_constraint_is_of_the_first_lane() -> None:
    engine = Engine(2)
    engine.add(request("busy", [1] * 5, 3))
    scheduler = engine.lanes
    params = request("x", [1], 3, grammar="root ::= [a]").sampling_params
    assert params.grammar is not None

    class Preparer:
        def use_tokenizer(self, *arguments: Any) -> None: ...

        def prepare_grammar(self, text: str) -> Any:
            future: Future[object] = Future()
            future.set_result(text)
            return future

    engine.core._preparer = Preparer()
    engine.add(request("x", [2] * 5, 3, grammar="g"), request("y", [2] * 5, 3, grammar="g", lane=1))
    assert engine.where("x") == engine.where("busy") == 0
    engine.step()
    assert "computed by the first lane" in (engine.deltas["y"][-1].error or "")
    engine.run()
    assert not scheduler.has_requests()


def test_the_guilty_one_is_found_among_all_lanes() -> None:
    """Every step with it fails. No other request ends, whichever lane it is in."""

    def failure(batch: ScheduledBatch) -> Exception | None:
        return RuntimeError("no") if "guilty" in batch.request_ids else None

    engine = Engine(2, failure=failure)
    names = ["a", "b", "guilty", "c", "d"]
    messages = [request(name, [index] * 5, 6) for index, name in enumerate(names)]
    engine.add(*messages)
    engine.run()
    for message in messages:
        if message.request_id == "guilty":
            assert engine.deltas["guilty"][-1].finish_reason == "error"
        else:
            assert engine.tokens(message.request_id) == expected(message)[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_known_culprits_end_and_all_lanes_are_computed_again(depth: int) -> None:
    failed: list[int] = []

    def failure(batch: ScheduledBatch) -> Exception | None:
        if batch.step_id == 2 and not failed:
            failed.append(1)
            return RowsFailedError(["b"], "its own fault")
        return None

    engine = Engine(2, depth, failure)
    messages = [request(name, [index] * 5, 6) for index, name in enumerate("abcd")]
    engine.add(*messages)
    engine.run()
    assert engine.deltas["b"][-1].error == "its own fault"
    for message in (messages[0], *messages[2:]):
        assert engine.tokens(message.request_id) == expected(message)[0]


def test_a_probe_is_of_the_first_lane() -> None:
    engine = Engine(2)
    batch = engine.lanes.probe([(4, 1), (0, 3)])
    assert batch is not None
    assert [own.num_tokens for own in batch.lanes] == [4, 0]
    assert batch.lanes[1].lane_tokens == [4, 0]
    engine.submit(batch).result()
    message = request("a", [1] * 5, 3)
    engine.add(message)
    assert engine.lanes.probe([(4, 1)]) is None
    engine.run()
    assert engine.tokens("a") == expected(message)[0]
