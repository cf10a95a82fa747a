"""Drives an EngineCore over a DeterministicExecutor and checks every batch and every invariant on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import sub
from typing import Any

from quire.cost.model import CostModel
from quire.cost.step_time import step_seconds
from quire.engine.core import EngineCore, OnBegun
from quire.engine.deterministic import DeterministicExecutor, expected_tokens
from quire.formats.kv_groups import ONE_LAYER, KvGroup, num_tables
from quire.lora.registry import AdapterRegistry
from quire.messages import AddRequest, RequestDelta
from quire.request import Request, RequestStatus
from quire.sampling_params import SamplingParams
from quire.schedule import Pending, ScheduledBatch, StepResult
from quire.scheduler.adapter_turns import AdapterTurns
from quire.scheduler.adaptive_depth import AdaptiveDepth, DrafterTime
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.kv_cache_manager import NO_PAGE, BlockTable, KVCacheManager
from quire.scheduler.queue import ORDER_KEYS
from quire.scheduler.residency import BlockResidency
from quire.scheduler.scheduler import Scheduler, SchedulerLimits
from quire.scheduler.speculation import Speculation
from quire.settings import SchedulingPolicy
from quire.speculative_config import LEAST_LOGITS_ROWS
from tests.guesser import Guesser
from tests.lora.shelf import Shelf

VOCAB_SIZE = 50
MAX_STEPS = 5000


def request(
    request_id: str, prompt: Sequence[int], max_tokens: int = 5, *, eos_token_ids: Sequence[int] = (), **fields: Any
) -> AddRequest:
    """An AddRequest; fields of SamplingParams, which take precedence, and of AddRequest may be mixed."""
    of_params = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__}
    params = SamplingParams(max_tokens=max_tokens, **of_params)
    stop_token_ids = [*eos_token_ids, *(params.stop_token_ids or ())]
    return AddRequest(request_id, list(prompt), params, max_tokens, stop_token_ids, **fields)


class Compilation:
    """A resource that a request waits for: it is there after this number of looks. A step takes one look."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps_left = num_steps

    def is_ready(self) -> bool:
        self.num_steps_left -= 1
        return self.num_steps_left < 0


def continuation(message: AddRequest) -> list[int]:
    """All tokens that a request may have, by the definition of DeterministicExecutor, without any other end."""
    return expected_tokens(
        message.prompt_token_ids,
        message.sampling_params,
        message.max_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        adapter=message.adapter,
        vocab_size=VOCAB_SIZE,
    )


def expected(message: AddRequest) -> tuple[list[int], str]:
    """Tokens and finish reason of a request, by the definition of DeterministicExecutor and of stopping."""
    stop_ids = frozenset(message.stop_token_ids)
    tokens = continuation(message)
    for count, token in enumerate(tokens, start=1):
        if token in stop_ids and count >= message.sampling_params.min_tokens:
            return tokens[:count], "stop"
    return tokens, "length"


class Driver:
    """An engine of plain integers. `outputs` and `deltas` collect the results of each request."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 200,
        long_prefill_token_threshold: int = 0,
        max_num_queued_reqs: int | None = None,
        max_shared_prefill_tokens: int = 0,
        most_answer_times: float = 0.0,
        slo_itl: float = 0.0,
        slo_attainment: float = 0.99,
        policy: SchedulingPolicy = "fcfs",
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = True,
        watermark: float = 0.0,
        depth: int = 1,
        num_stages: int = 1,
        failure: Callable[[ScheduledBatch, bool], Exception | None] = lambda batch, is_computed: None,
        row_failure: Callable[[str], str | None] = lambda request_id: None,
        forces: Callable[[int], bool] = lambda token_id: False,
        clock: Callable[[], float] = lambda: 0.0,
        residency: BlockResidency | None = None,
        rope_switches_after: int | None = None,
        groups: Sequence[KvGroup] = (ONE_LAYER,),
        proposer: Guesser | None = None,
        adaptive: AdaptiveDepth | None = None,
        waits: bool = False,
        drafter_time: DrafterTime | None = None,
        cost: CostModel | None = None,
        max_loras: int = 0,
        shelf: Shelf | None = None,
        on_begun: OnBegun = lambda request_ids: None,
    ) -> None:
        self.shelf, self.max_loras = shelf, max_loras
        registry = None if shelf is None else AdapterRegistry(shelf, shelf.most, clock)
        self.pool = BlockPool(num_blocks, block_size, residency)
        self.groups, self.unsettled_tokens = groups, depth * max_num_batched_tokens
        self.kv = KVCacheManager(
            self.pool,
            groups,
            step_tokens=max_num_batched_tokens,
            depth=depth,
            enable_prefix_caching=enable_prefix_caching,
            watermark=watermark,
        )
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            long_prefill_token_threshold=long_prefill_token_threshold,
            max_num_queued_reqs=max_num_queued_reqs,
            max_shared_prefill_tokens=max_shared_prefill_tokens,
            most_answer_times=most_answer_times,
            slo_itl=slo_itl,
            slo_attainment=slo_attainment,
        )
        self.scheduler = Scheduler(
            limits,
            self.kv,
            policy=policy,
            enable_chunked_prefill=enable_chunked_prefill,
            rope_switches_after=rope_switches_after,
            speculation=None
            if proposer is None
            else Speculation(proposer, proposer.longest, (), adaptive, waits=waits, drafter_time=drafter_time),
            adapters=None if registry is None else AdapterTurns(max_loras, ORDER_KEYS[policy], registry.is_in_memory),
            predicts=cost,
            clock=clock,
            num_stages=num_stages,
        )
        self.executor = DeterministicExecutor(
            num_blocks,
            block_size,
            groups,
            vocab_size=VOCAB_SIZE,
            is_delayed=depth > 1,
            failure=failure,
            row_failure=row_failure,
            forces=forces,
        )
        self.core = EngineCore(
            self.scheduler, self, depth, cost, sleep=lambda seconds: None, adapters=registry, on_begun=on_begun
        )
        self.most_drafts = 0  # whose blocks stay, though they were refused
        if proposer is not None:
            self.most_drafts = proposer.longest
            proposer.continuation_of = lambda request_id: continuation(self.messages[request_id])
        self.batches: list[ScheduledBatch] = []
        self.messages: dict[str, AddRequest] = {}
        self.deltas: dict[str, list[RequestDelta]] = {}

    # The executor that the core sees: it checks each batch before it runs.

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        self._check_batch(batch)
        self.batches.append(batch)
        return self.executor.submit(batch)

    def shutdown(self) -> None:
        self.executor.shutdown()

    # What tests call

    def add(self, message: AddRequest, is_ready: Callable[[], bool] | None = None) -> None:
        self.messages[message.request_id] = message
        self.deltas[message.request_id] = []
        self.core.add(message, is_ready)

    def step(self) -> list[RequestDelta]:
        deltas = self.core.step()
        for delta in deltas:
            self.deltas[delta.request_id].append(delta)
        self.check()
        return deltas

    def run(self, before_step: Callable[[int], None] = lambda index: None) -> None:
        """Step until nothing is left; then every block must be free."""
        for index in range(MAX_STEPS):
            if not self.core.has_work():
                break
            before_step(index)
            self.step()
        assert not self.core.has_work(), f"requests do not finish: {self.live()}"
        assert self.pool.num_free_blocks == self.pool.num_blocks, "blocks leaked"

    def run_all(self, *messages: AddRequest) -> dict[str, list[int]]:
        """Add all, run, and compare every output with its definition."""
        for message in messages:
            self.add(message)
        self.run()
        self.check_outputs()
        return {message.request_id: self.tokens(message.request_id) for message in messages}

    def tokens(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas[request_id] for token in delta.token_ids]

    def last(self, request_id: str) -> RequestDelta:
        return self.deltas[request_id][-1]

    def live(self) -> list[Request]:
        """Requests that are not finished, in order of arrival."""
        return list(self.scheduler._requests.values())

    def running_ids(self) -> list[str]:
        return [r.request_id for r in self.scheduler._running]

    # Checks

    def check_outputs(self, *, except_for: Sequence[str] = ()) -> None:
        """Every request ended as defined, whatever else was in the batches."""
        for request_id, message in self.messages.items():
            if request_id not in except_for:
                tokens, reason = expected(message)
                assert self.tokens(request_id) == tokens, f"{request_id} got wrong tokens"
                assert self.last(request_id).finish_reason == reason

    def check(self) -> None:
        """Invariants that hold between any two steps."""
        self.kv.check()
        scheduler = self.scheduler
        running = [r for r in self.live() if r.status is RequestStatus.RUNNING]
        assert set(running) == set(scheduler._running)
        assert scheduler._running == sorted(running, key=scheduler._key), "running requests are out of order"
        assert scheduler.num_waiting == len(self.live()) - len(running)
        assert len(scheduler._queue) + len(scheduler._deferred) == scheduler.num_waiting
        queue = scheduler._queue
        assert queue.num_lacking == sum(num_lacking for _, num_lacking in queue._stays.values())
        forks = [r for forks in scheduler._forks.values() for r in forks]
        assert sorted(forks, key=id) == sorted((r for r in self.live() if r.fork_of is not None), key=id)
        if self.shelf is not None:
            counts = Counter(r.adapter for r in running if r.adapter is not None)
            assert scheduler.adapters._running == counts, "running requests of adapters are miscounted"
            waiting = [r for r in self.live() if r.adapter is not None and r.status is not RequestStatus.RUNNING]
            assert sorted(waiting, key=id) == sorted(
                (r for rs in scheduler.adapters._waiting.values() for r in rs), key=id
            )
        assert set(self.kv._tables) == {r.request_id for r in running}, "exactly the running requests own blocks"
        for r in running:
            num_known = r.num_tokens + r.num_in_flight_tokens  # to the worker, once the submitted batches have run
            table = self.kv.table(r)
            unused = table.num_tokens - num_known
            assert unused < self.kv.block_size + self.most_drafts, f"{r.request_id} wastes {unused} slots"
            self._check_table(r, table)
            assert r.num_settled_tokens <= r.num_computed_tokens <= num_known
            assert r.num_in_flight_steps or r.num_settled_tokens == r.num_computed_tokens
            assert len(r.output_token_ids) + r.num_in_flight_tokens <= r.max_tokens
            assert r.num_in_flight_steps <= self.core.depth
            if self.scheduler.num_stages > 1:
                most = r.num_tokens + self.most_drafts
                assert r.num_computed_tokens <= most, f"{r.request_id} did not wait for its own token"

    def _check_batch(self, batch: ScheduledBatch) -> None:
        if batch.request_ids[0].startswith("probe"):
            return
        limits, size = self.scheduler.limits, self.kv.block_size
        counts = batch.num_scheduled_tokens
        assert 0 < sum(counts) <= limits.max_num_batched_tokens, "the token budget is exceeded"
        assert min(counts) > 0
        columns = (counts, batch.num_logits, batch.draft_token_ids, batch.new_block_ids)
        assert {len(set(batch.request_ids)), *map(len, columns)} == {len(batch.request_ids)}
        if any(batch.draft_token_ids):
            assert sum(batch.num_logits) <= max(limits.max_num_seqs, LEAST_LOGITS_ROWS), (
                "more logits than memory was planned for"
            )
        if limits.long_prefill_token_threshold and self.scheduler._enable_chunked_prefill:
            forced = {request_id: len(token_ids) for request_id, _, token_ids in batch.forced_tokens}
            others = (
                forced.get(name, 0) + len(drafts)
                for name, drafts in zip(batch.request_ids, batch.draft_token_ids, strict=True)
            )
            assert max(map(sub, counts, others)) <= limits.long_prefill_token_threshold
        if self.shelf is not None:
            adapters = {self.messages[name].adapter for name in batch.request_ids} - {None}
            assert len(adapters) <= self.max_loras, "more adapters than a step may hold"
            assert adapters <= self.shelf.in_memory, "an adapter of the step is not in memory"
        new_ids = {new.request_id for new in batch.new_rows}
        assert len(self.scheduler._running) <= limits.max_num_seqs or not new_ids, "admitted above max_num_seqs"
        assert new_ids <= set(batch.request_ids), "admitted without a token to compute"
        for request_id, start, count in zip(batch.request_ids, batch.num_computed_tokens, counts, strict=True):
            pages = self.kv._tables[request_id].pages
            columns = [group for group in self.groups for _ in group.tables()]
            for index in range(start // size, -(-(start + count) // size)):
                for column, group in enumerate(columns):
                    block = 0 if group.spec.kind == "state" else index
                    page = pages[block * len(columns) + column]
                    assert self.pool.ref_count(page) == 1, f"{request_id} writes into a shared block"

    def _check_table(self, request: Request, table: BlockTable) -> None:
        """No group holds more than it may: all blocks, or the blocks that the steps in flight and the next one need."""
        first, width = 0, num_tables(self.groups)
        for group in self.groups:
            for column in range(first, first + group.num_tables):
                num_held = sum(page != NO_PAGE for page in table.pages[column::width])
                assert num_held <= group.most_blocks(table.num_tokens, self.kv.block_size, self.unsettled_tokens), group
            first += group.num_tables


class TimedDriver(Driver):
    """Its clock moves by the time of each step: the first prediction of `cost`, times `slowness`."""

    def __init__(self, cost: CostModel, *, slowness: Callable[[], float] = lambda: 1.0, **arguments: Any) -> None:
        self.now, self.slowness, self.cost, self.constants = 0.0, slowness, cost, cost.fit.constants
        super().__init__(cost=cost, clock=lambda: self.now, **arguments)
        self.core._clock = lambda: self.now

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        load = self.cost.arithmetic.load(batch.num_computed_tokens, batch.num_scheduled_tokens, sum(batch.num_logits))
        self.now += self.slowness() * step_seconds(self.cost.arithmetic.demand(load), self.constants)
        return super().submit(batch)
