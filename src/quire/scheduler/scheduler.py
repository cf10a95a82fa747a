"""The scheduler. It decides how many tokens of each request the next step computes, and takes in the step's result."""

from __future__ import annotations

import heapq
import math
import random
import sys
import time
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from quire.errors import InvalidRequestError
from quire.logs import RateLimited, get_logger
from quire.messages import RequestDelta, SetLimits
from quire.outputs import FinishReason
from quire.request import Request, RequestStatus
from quire.sampling_params import SamplingParams
from quire.schedule import EvictedBlock, LaneUse, NewRow, ScheduledBatch, StepResult
from quire.scheduler.adapter_turns import AdapterTurns
from quire.scheduler.blame import culprits, may_join
from quire.scheduler.kv_cache_manager import NO_PREFIX, KVCacheManager, Prefix, share_prompt
from quire.scheduler.limits import (
    LEAST_PROMPT_TOKENS,
    Predicts,
    SchedulerLimits,
    StepRoom,
    check_queue,
    check_request,
)
from quire.scheduler.pace import least_tokens, seconds_to_spare
from quire.scheduler.progress import (
    advance,
    force,
    lose_results,
    num_lacking,
    num_schedulable,
    num_schedulable_alone,
    settle,
    start_at,
)
from quire.scheduler.proposer import NoDrafts
from quire.scheduler.queue import ORDER_KEYS, TURN_KEYS, Key, WaitingQueue
from quire.scheduler.results import PromptLogprobs, append_tokens, delta_of
from quire.scheduler.speculation import Speculation
from quire.settings import SchedulingPolicy
from quire.speculative_config import LEAST_LOGITS_ROWS

logger = get_logger(__name__)

WAITING, PREEMPTED = RequestStatus.WAITING, RequestStatus.PREEMPTED
RUNNING, FINISHED = RequestStatus.RUNNING, RequestStatus.FINISHED
MEDIAN = 0.5  # the share of steps that take no longer than is predicted
SHARING_SECONDS = 10.0  # the time after a step with several requests in which another request is expected

Rows = tuple[Sequence[int], Sequence[int], int]  # computed and new tokens of rows, and their rows of logits


@dataclass(slots=True)
class ScheduleStats:
    """Counts of scheduling since the last `take_stats`."""

    num_decode_tokens: int = 0  # scheduled tokens that are the newest sampled token of a row, or drafts after it
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens of requests that were admitted for the first time
    prefix_cache_hits: int = 0  # the number of these tokens that were cached


@dataclass(slots=True)
class _Step:
    """A batch without a result yet, and its requests. Later requests may have the same ids by now."""

    batch: ScheduledBatch
    rows: list[Request]
    room: StepRoom | None = None  # set if the step has decodes and a time target: prompts take the rest of the time
    prompts: list[Request] = field(default_factory=list)  # running requests with prompts, which have no rows yet
    budget: int = 0  # the tokens that the decodes leave
    drafter_seconds: float = 0.0  # the time of the worker's drafter in this step

    def counted_rows(self) -> Rows:
        """The rows of the batch so far."""
        return self.batch.num_computed_tokens, self.batch.num_scheduled_tokens, sum(self.batch.num_logits)


class Scheduler:
    """Schedules requests without phases: each has tokens that are known and not computed, and a step computes some.

    `schedule` counts the tokens that it hands out as computed at once. So it may be called again before the result is
    here. A token that a submitted batch will sample is in flight. It can be scheduled, because the worker will know it,
    but it cannot be hashed or streamed yet.

    Args:
        kv: the manager of the KV cache.
        policy: the order of service.
        enable_chunked_prefill: whether a prompt may be computed in several steps.
        rope_switches_after: requests with more tokens than this use the other rotary table (longrope); None: there is
            one table.
        speculation: asks for drafts; None: there are no drafts.
        adapters: decides which adapters run; None: all of them may.
        predicts: predicts steps, for `slo_itl` and `most_answer_times`; None: there is neither.
        clock: gives monotonic seconds.
        num_stages: the number of pipeline stages. If there are several, a request waits until its last token is known,
            and decodes are spread over as many batches as there are stages, so that all stages compute.
        vocab_size: the vocabulary size of the model.

    Raises ValueError for an unknown policy.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        *,
        policy: SchedulingPolicy = "fcfs",
        enable_chunked_prefill: bool = True,
        rope_switches_after: int | None = None,
        speculation: Speculation | None = None,
        adapters: AdapterTurns | None = None,
        predicts: Predicts | None = None,
        clock: Callable[[], float] = time.monotonic,
        num_stages: int = 1,
        vocab_size: int = 1,
    ) -> None:
        if policy not in ORDER_KEYS:
            raise ValueError(f"Unknown scheduling policy {policy!r}, expected one of {', '.join(ORDER_KEYS)}.")
        self.limits = limits
        self.kv = kv
        self._enable_chunked_prefill = enable_chunked_prefill
        self._rope_switches_after = rope_switches_after
        self._predicts = predicts
        self.num_stages = num_stages
        self._vocab_size = vocab_size
        self._num_schedulable = num_schedulable if num_stages == 1 else num_schedulable_alone
        self._clock = clock
        self._key, self._turn_key = ORDER_KEYS[policy], TURN_KEYS[policy]
        self.speculation = speculation or Speculation(NoDrafts(), 0)
        self.adapters = adapters or AdapterTurns(sys.maxsize, self._key, lambda digest: True)
        self._queue = WaitingQueue(policy)
        self._running: list[Request] = []  # in the order of service: the last request is the first to be preempted
        self._requests: dict[str, Request] = {}  # all requests that are not finished
        self._forks: dict[str, set[Request]] = {}  # those that share a prompt, by the id of its first continuation
        # Requests outside of the queue, each with a function that says whether it may join. They hold up nobody.
        self._deferred: dict[Request, Callable[[], bool]] = {}
        self._in_flight: dict[int, _Step] = {}  # by step_id, oldest first
        self._removed: list[str] = []  # requests that the worker still has and must remove
        self._prompt_logprobs = PromptLogprobs()
        self._stats = ScheduleStats()
        self.arrivals = iter(range(sys.maxsize))  # the number of each request in the order of arrival, in all lanes
        self._shared_until = -math.inf
        self._next_step_id = 0
        self._preemption_log = RateLimited(logger)
        self.others: tuple[Scheduler, ...] = ()  # the schedulers of the other lanes, which step together with this one

    # The visible state

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self._running)

    @property
    def num_deferred(self) -> int:
        """The number of requests that wait for a shared prompt or a resource, and not for room."""
        return len(self._deferred)

    @property
    def num_blocks(self) -> int:
        return self.kv.pool.num_blocks

    @property
    def num_blocks_in_use(self) -> int:
        return self.kv.pool.num_used_blocks

    @property
    def num_blocks_ever_used(self) -> int:
        return self.kv.pool.num_ever_used

    def __contains__(self, request_id: str) -> bool:
        """Whether the scheduler has a request with this id that is not finished."""
        return request_id in self._requests

    def num_missing(self, request: Request) -> int:
        """The number of a request's tokens that the prefix cache does not have. The request need not be added."""
        self._choose_rope(request)
        self.kv.hash_prompt(request)
        return request.num_tokens - self._cached_prefix(request).num_tokens

    @property
    def requests(self) -> Collection[Request]:
        """The requests that are not finished."""
        return self._requests.values()

    def has_requests(self) -> bool:
        """Whether there is a request that is not finished."""
        return bool(self._requests)

    def has_ready_requests(self) -> bool:
        """Whether `schedule` may find work before a result arrives. If blocks are missing, it still returns None."""
        return len(self._queue) > 0 or any(self._num_schedulable(request) > 0 for request in self._running)

    def take_stats(self) -> ScheduleStats:
        """The counts since the last call."""
        stats, self._stats = self._stats, ScheduleStats()
        return stats

    def take_evicted_blocks(self) -> list[EvictedBlock] | None:
        """The evicted blocks of the sample since the last call; None: blocks are not followed."""
        return None if self.kv.pool.residency is None else self.kv.pool.residency.take_evicted()

    def uses(self, batch: ScheduledBatch) -> tuple[LaneUse, ...]:
        """The state of each lane after a step: there are no lanes."""
        return ()

    # The caller's methods

    def add(self, request: Request, *, is_retry: bool = False, is_ready: Callable[[], bool] | None = None) -> None:
        """Queue a request.

        Args:
            is_retry: whether the request is queued even if the queue is full.
            is_ready: while it returns False, the request waits for something other than room: a grammar that is being
                compiled, an adapter that is being read, or KV that is being transferred. After that, the request takes
                its place in the order of arrival. The function is called before each step. So it must be quick, and it
                must not raise. A request that will never be ready must be aborted.

        Raises:
            QueueFullError: too many requests wait.
            ContextLengthError: the request can never fit.
            InvalidRequestError: the prompt is empty, a token id is illegal, or the request id is in use.
        """
        if not is_retry:
            check_queue(self.num_waiting, self.limits)
        if request.request_id in self._requests:
            raise InvalidRequestError("The request id is in use", value=request.request_id, param="request_id")
        check_request(request, self.limits, self.kv.longest_request)
        self._choose_rope(request)
        self.kv.hash_prompt(request)
        request.received_time = self._clock()
        request.sequence = next(self.arrivals)
        self._requests[request.request_id] = request
        if request.fork_of is not None:
            self._forks.setdefault(request.fork_of, set()).add(request)
        self.adapters.wait(request)
        if request.adapter is not None:
            is_ready = is_ready or partial(self.adapters.may_run, request)
        if is_ready is None:
            self._wait(request)
        else:
            self._deferred[request] = is_ready

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests, and free their blocks now. Results in flight and unknown ids are ignored."""
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                self._finish(request, "abort")
        self._drop_stopped()

    def preempt_last(self) -> None:
        """Preempt the last running request: it loses its blocks and is computed again later. One must be running."""
        self._preempt(self._running.pop())

    def set_limits(self, change: SetLimits) -> None:
        """Change limits from the next step on. Requests that run above a lowered limit go on.

        Raises ValueError for an illegal limit; then nothing changes.
        """
        names = self.limits.__dataclass_fields__.keys() & set(change.__struct_fields__)
        given = {name: value for name in names if (value := getattr(change, name)) is not None}
        if change.max_shared_prefill_tokens is not None:
            given["most_answer_times"] = 0.0  # who gives a number gets it
        self.limits = replace(self.limits, **given)
        if change.spec_tokens is not None:
            self.speculation.most = change.spec_tokens

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache: later requests compute everything anew."""
        self.kv.forget_cached_prefixes()

    def schedule(self) -> ScheduledBatch | None:
        """The next batch; None: there is nothing to do before a result arrives.

        All requests of a step share one token budget. Running requests with one token to compute come first, in order;
        a grammar may have forced a few tokens more. Then come prompts: running requests with more tokens to compute,
        and waiting requests. If a running request lacks a block, the last running request is preempted. A waiting
        request preempts nobody. If drafts pay (Speculation.waits), the next batch waits for the tokens of the batch in
        flight.
        """
        self.adapters.begin_step()
        if self.waits:
            return None
        step = self.begin_lane()
        if step.rows and self.may_add_prompts(step):
            self.make_room(step, self.speculation.drafter_seconds(step.batch))
        return self.end_lane(step)

    def begin_lane(self) -> _Step:
        """The decodes of the next step, with their drafts. `end_lane` adds prompts.

        A step that several lanes have together is made in these two parts. Before them, `adapters.begin_step` was
        called for all lanes.
        """
        step = _Step(ScheduledBatch(self._next_step_id), [])
        budget = self.limits.max_num_batched_tokens
        self.adapters.give_out()
        self._queue_ready()
        if self._rope_switches_after is not None:
            self._take_back_lengthened(self._rope_switches_after)
        num_drafts_left = self.speculation.begin_step(self._running, self._num_drafts(), self._num_prompt_tokens)
        if self._in_flight and self.speculation.drafter_time is not None:
            num_drafts_left = 0  # the worker would draft during the step in flight, and change that step's time

        num_answers_left = self._num_answers_of_batch(num_drafts_left)
        for request in self._running:  # preemption removes requests from the end of this list, so the loop ends early
            count = self._num_schedulable(request)
            if count > request.num_forced_tokens + 1:
                if not self._extend_or_preempt(request, count):
                    break
                step.prompts.append(request)
            elif count > 0 and budget > 0 and num_answers_left > 0:
                num_answers_left -= 1
                if not self._extend_or_preempt(request, count):
                    break
                most = min(num_drafts_left, budget - 1)  # forced tokens of other requests have used the budget too
                drafts = self._draft(request, most) if most > 0 and count == 1 else ()
                num_drafts_left -= len(drafts)
                budget -= self._add_row(step, request, min(count, budget) + len(drafts), drafts)

        step.budget = budget
        return step

    def may_add_prompts(self, step: _Step) -> bool:
        """Whether `end_lane` may add prompts to the decodes of a step."""
        return step.budget > 0 and bool(step.prompts or len(self._queue))

    def make_room(self, step: _Step, drafter_seconds: float) -> None:
        """Note what the drafter and a target for the time between tokens, if there is one, leave for prompts.

        Args:
            drafter_seconds: the time of the worker's drafter in this step.
        """
        step.drafter_seconds = drafter_seconds
        step.room = self._room_beside(*step.counted_rows(), drafter_seconds)

    def end_lane(self, step: _Step) -> ScheduledBatch | None:
        """Add prompts to the decodes of a step. None: it has no rows."""
        prompts, beside = step.prompts, step.counted_rows()
        budget, has_time = self._left_for_prompts(
            prompts, step.rows, beside, step.budget, step.room, step.drafter_seconds
        )
        if not has_time:
            self._serve_oldest(step, prompts, budget)
        elif self._is_shared():
            self._share(step, prompts, budget)
        else:
            self._serve_in_order(step, prompts, budget)
        return self._close(step)

    def probe(self, rows: Sequence[tuple[int, int]]) -> ScheduledBatch | None:
        """A step that belongs to no request, to measure its time. The caller computes it before it schedules anything.

        None: there are requests, or too few pages are free of cached content.

        Args:
            rows: for each row, the number of tokens that count as computed, and the number of new tokens. New tokens
                are drawn at random, because equal tokens would all go to the same experts.
        """
        draw = random.Random(self._next_step_id)
        pool, ends = self.kv.pool, [start + count for start, count in rows]
        if self._requests or self.kv.num_pages_at_most(ends) > pool.num_free_blocks - pool.num_cached_blocks:
            return None
        step, requests = _Step(ScheduledBatch(self._next_step_id), []), []
        for index, (start, count) in enumerate(rows):
            params = SamplingParams(temperature=0.0, max_tokens=1)
            token_ids = [0] * start + draw.choices(range(self._vocab_size), k=count)
            request = Request(f"probe {index}", token_ids, params, 1, frozenset())
            self._choose_rope(request)
            self.kv.admit(request, NO_PREFIX, start + count, keep_watermark=False)
            start_at(request, start)
            self.kv.extend(request, start + count)
            step.batch.new_rows.append(self._new_row(request))
            self._add_row(step, request, count)
            requests.append(request)
        for request in requests:
            self.kv.free(request)
        batch = step.batch
        batch.removed_request_ids, self._removed = self._removed, list(batch.request_ids)
        self._next_step_id += 1
        return batch

    def fail_probe(self, batch: ScheduledBatch) -> None:
        """Take in that the executor raised on a probe.

        It is not known whether the worker has applied the batch's removals, so they are sent again.
        """
        self._removed = batch.removed_request_ids + self._removed

    def update(self, batch: ScheduledBatch, result: StepResult) -> list[RequestDelta]:
        """Take in the result of the oldest submitted batch. Finished requests are freed.

        Returns:
            A delta for each request that has got tokens, or has ended.
        """
        deltas: list[RequestDelta] = []
        block_size, errors = self.kv.block_size, result.errors
        rows = self._in_flight.pop(batch.step_id).rows
        columns = zip(
            rows,
            batch.num_computed_tokens,
            batch.num_scheduled_tokens,
            batch.num_logits,
            result.token_ids,
            strict=True,
        )
        for row, (request, start, count, num_logits, token_ids) in enumerate(columns):
            if num_logits == 1 and start + count < request.num_tokens:
                num_logits = 0  # a grammar forces this token, as an earlier result has shown
            end = settle(request, start + count, num_logits, len(token_ids))
            if request.status is FINISHED:
                continue
            if row in errors:
                self._finish(request, "error", errors[row], result.error_codes.get(row))
                deltas.append(delta_of(request, []))
                continue
            num_taken, reason, has_drafts = 0, None, False
            if num_logits:
                num_sampled, token_ids = len(token_ids), token_ids + result.forced.get(row, [])
                num_taken, reason = append_tokens(request, token_ids)
                if request.first_token_time is None:
                    request.first_token_time = self._clock()
                    request.num_untimed_tokens = len(request.output_token_ids)
                force(request, max(num_taken - num_sampled, 0))
            if num_logits > 1:
                end = min(end, request.num_tokens)  # accepted drafts may come after a stop
                has_drafts = self.speculation.settle(request, row, num_logits - 1, result)
            if request.status is RUNNING and start // block_size != end // block_size:
                self.kv.register_computed(request, start, end)
            if result.prompt_logprobs:
                self._prompt_logprobs.collect(request, start, row, result)
            if num_logits:
                delta = self._answer(request, row, token_ids[:num_taken], reason, result)
                if has_drafts:
                    delta.drafts = num_logits - 1, max(num_sampled - 1, 0)
                deltas.append(delta)
        self.speculation.end_step(batch, result)
        self._drop_stopped()
        return deltas

    def fail(self, batches: list[ScheduledBatch], error: str, request_ids: Collection[str] = ()) -> list[RequestDelta]:
        """Take in that the executor raised on batches[0]. The later batches are void too.

        The rows in `request_ids` end with `error`. If there are none, blame.culprits chooses the rows that end. Other
        requests are computed again from their known tokens.
        """
        deltas = self.end(culprits(self.rows_of(batches[0]), request_ids), error)
        self.void(batches)
        return deltas

    def rows_of(self, batch: ScheduledBatch) -> list[Request]:
        """The requests of a submitted batch that has no result yet."""
        return self._in_flight[batch.step_id].rows

    def end(self, requests: Iterable[Request], error: str) -> list[RequestDelta]:
        """End these requests with `error`, unless they have ended. The caller calls `void` afterwards."""
        deltas = []
        for request in requests:
            if request.status is not FINISHED:
                self._finish(request, "error", error)
                deltas.append(delta_of(request, []))
        return deltas

    def void(self, batches: list[ScheduledBatch]) -> None:
        """Take in that submitted batches will have no results. Their requests restart from their known tokens."""
        for batch in batches:
            for request in self._in_flight.pop(batch.step_id).rows:
                lose_results(request)
                if request.status is RUNNING:
                    self._preempt(request)
        self._drop_stopped()
        # It is not known whether the worker has applied the removals of these batches, so they are sent again.
        unsure = [request_id for batch in batches for request_id in batch.removed_request_ids]
        self._removed = list(dict.fromkeys(unsure + self._removed))

    def fail_waiting(self, adapter: str, error: str) -> list[RequestDelta]:
        """End the requests that wait for this adapter. Those of other lanes stay."""
        deltas = []
        for request in self.adapters.waiting_for(adapter):
            if request.request_id not in self:
                continue
            self._finish(request, "error", error)
            deltas.append(delta_of(request, []))
        return deltas

    # Scheduling

    def _room_beside(
        self, starts: Sequence[int], counts: Sequence[int], num_logits: int, drafter_seconds: float = 0.0
    ) -> StepRoom | None:
        """The room for prompts beside these rows, within the target for the time between tokens; None: no target."""
        limits = self.limits
        if not limits.slo_itl or self._predicts is None or not self._enable_chunked_prefill:
            return None
        seconds = limits.slo_itl - drafter_seconds
        return self._predicts.room_within(seconds, limits.slo_attainment, starts, counts, num_logits)

    def _left_for_prompts(
        self,
        prompts: Sequence[Request],
        answers: Sequence[Request],
        beside: Rows,
        budget: int,
        room: StepRoom | None,
        drafter_seconds: float = 0.0,
    ) -> tuple[int, bool]:
        """What a step leaves for prompts.

        Args:
            prompts: the running requests with prompts.
            answers, beside: the requests of the other rows, and these rows.
            budget: the tokens that the other rows leave.
            drafter_seconds: the time of the worker's drafter in this step.
            room: what a target for the time between tokens leaves; None: there is no target.

        Returns:
            The tokens, and whether there is time for more than the oldest prompt.
        """
        if room is None:
            if self._is_shared():
                budget = self._shared_tokens(prompts, answers, beside, budget, drafter_seconds)
            return budget, True
        least = min(budget, LEAST_PROMPT_TOKENS)
        fitting = room.fitting(prompts[0].num_computed_tokens if prompts else 0, budget)
        return max(fitting, least), fitting >= least or len(answers) <= 1  # 0: other lanes have answers

    def _shared_tokens(
        self, prompts: Sequence[Request], answers: Sequence[Request], beside: Rows, budget: int, drafter_seconds: float
    ) -> int:
        """The prompt tokens of a step that is shared: `max_shared_prefill_tokens`, or as pace.py says."""
        limits, first = self.limits, self._queue.first_in_order()
        least = min(budget, limits.max_shared_prefill_tokens)
        if not limits.most_answer_times or self._predicts is None:
            return least
        if not budget or not (prompts or (first is not None and len(self._running) < limits.max_num_seqs)):
            return least  # the step gets no prompt
        oldest = [*prompts[:1], *([first[1]] if first is not None else [])]
        timed = [request for request in answers if request.first_token_time is not None]
        if not timed:
            return budget
        seconds = seconds_to_spare(
            self._clock(),
            timed,
            prompts,
            self._queue.num_lacking,
            len(self._queue),
            min(request.queued_time for request in oldest),
            limits.most_answer_times,
            self._predicts,
        )
        room = self._predicts.room_within(seconds - drafter_seconds, MEDIAN, *beside)
        fitting = room.fitting(prompts[0].num_computed_tokens if prompts else 0, budget)
        return fitting if fitting >= least else max(fitting, least_tokens(least, self._predicts))

    def _serve_oldest(self, step: _Step, prompts: list[Request], budget: int) -> None:
        """Serve only the oldest prompt, slowly, because decodes take all the time. Others wait until a request ends."""
        if prompts and (count := self._chunk(num_lacking(prompts[0]), budget)) > 0:
            self._add_row(step, prompts[0], count)

    def _serve_in_order(self, step: _Step, prompts: list[Request], budget: int) -> None:
        """Give the budget to prompts in order, running ones first. No request overtakes one that does not fit."""
        for request in prompts:
            count = self._chunk(num_lacking(request), budget)
            if count == 0:
                return
            budget -= self._add_prompt(step, request, count)
        while budget > 0 and (candidate := self._candidate(self._queue.first_in_order)) is not None:
            request, prefix = candidate
            count = self._chunk(request.num_tokens - prefix.num_tokens, budget)
            if count == 0 or not self._admit(step, request, prefix):
                return
            budget -= self._add_prompt(step, request, count)

    def _share(self, step: _Step, prompts: list[Request], budget: int) -> None:
        """Give half of the budget to the oldest prompt, and the rest to the prompts that lack the fewest tokens.

        So a long prompt always makes progress, and a short prompt does not wait for the rest of long ones. Among equal
        prompts, the oldest gets everything. A waiting request may overtake an older one only while a still older
        request computes its prompt. So a request that waits for blocks becomes the oldest at some time, and then no
        other request is admitted before it. No request overtakes a preempted one, because there are too few blocks.
        """
        head = self._candidate(self._queue.first_in_order) if budget > 0 else None
        may_admit = head is not None and head[0].status is not PREEMPTED
        if head is not None and (not prompts or self._key(head[0]) < self._key(prompts[0])):
            may_admit = self._admit(step, *head)
            prompts = [head[0], *prompts] if may_admit else prompts
        oldest = prompts[0] if prompts else None
        reserved = 0 if oldest is None else self._chunk(num_lacking(oldest), (budget + 1) // 2)

        turns = [(self._turn_key(request, num_lacking(request)), request) for request in prompts]
        heapq.heapify(turns)
        while budget > 0:
            waiting = self._queue.first_in_turn() if may_admit and budget > reserved else None
            if waiting is not None and (not turns or waiting[0] < turns[0][0]):
                candidate = self._candidate(self._queue.first_in_turn)
                may_admit = candidate is not None and self._admit(step, *candidate)
                if candidate is None or not may_admit:
                    continue
                request = candidate[0]
            elif turns:
                request = heapq.heappop(turns)[1]
            else:
                return
            reserved = 0 if request is oldest else reserved
            if (count := self._chunk(num_lacking(request), budget - reserved)) > 0:
                budget -= self._add_prompt(step, request, count)

    def _is_shared(self) -> bool:
        """Whether a prompt must leave room for others. After some time alone, a prompt gets the whole budget.

        A new request would have to wait for such a large step. So a short pause between two requests is not enough.
        """
        now = self._clock()
        if len(self._running) + len(self._queue) > 1:
            self._shared_until = now + SHARING_SECONDS
        is_wanted = self.limits.max_shared_prefill_tokens > 0 and self._enable_chunked_prefill
        return is_wanted and now < self._shared_until

    def _chunk(self, count: int, budget: int) -> int:
        """The number of `count` tokens that one request gets in one step.

        Without chunked prefill it gets all of them or none. But tokens that exceed the whole budget of a step are cut,
        because otherwise such a request could never run.
        """
        if self._enable_chunked_prefill:
            return min(count, budget, self.limits.long_prefill_token_threshold or count)
        is_too_long = count > self.limits.max_num_batched_tokens
        return min(count, budget) if count <= budget or is_too_long else 0

    @property
    def waits(self) -> bool:
        """Whether no batch is made before the tokens of the newest one are known, because drafts pay."""
        return self.speculation.waits and self._samples_in_flight()

    def _samples_in_flight(self) -> bool:
        """Whether the newest batch in flight samples tokens."""
        return bool(self._in_flight) and any(next(reversed(self._in_flight.values())).batch.num_logits)

    def _num_answers_of_batch(self, num_drafts: int) -> int:
        """The most decodes of one batch. With several stages, each batch gets an equal part of all decodes.

        If drafts pay, no batch is made before the tokens of the last one are known, so this batch gets all. So does one
        in which a worker tries drafts, because no other batch is in flight then.

        Args:
            num_drafts: the most drafts of the batch.
        """
        tries = num_drafts > 0 and self.speculation.drafter_time is not None
        if self.num_stages == 1 or self.speculation.waits or tries:
            return len(self._running)
        num_answers = sum(request.num_computed_tokens >= len(request.prompt_token_ids) for request in self._running)
        return max(-(-num_answers // self.num_stages), 1)

    def _num_drafts(self) -> int:
        """The most drafts of the next step.

        Memory was planned for a number of rows of logits. Each request that may be in the step needs one row. Drafts
        get the remaining rows.
        """
        limits, num_running = self.limits, len(self._running)
        num_others = max(num_running, min(num_running + len(self._queue), limits.max_num_seqs))
        return min(limits.max_num_batched_tokens, max(limits.max_num_seqs, LEAST_LOGITS_ROWS)) - num_others

    def _num_prompt_tokens(self) -> int:
        """The tokens of prompts in the next step if it has no drafts: of running requests, and of the next one to run.

        `schedule` asks the same questions, after it has chosen the drafts.
        """
        counts = [(request, self._num_schedulable(request)) for request in self._running]
        prompts = [request for request, count in counts if count > request.num_forced_tokens + 1]
        if not prompts and not len(self._queue):
            return 0
        answers = [(request, count) for request, count in counts if 0 < count <= request.num_forced_tokens + 1]
        # A grammar may have forced more tokens of answers than fit. They are computed in several steps.
        left = max(self.limits.max_num_batched_tokens - sum(count for _, count in answers), 0)
        room = None
        starts, counted = [request.num_computed_tokens for request, _ in answers], [count for _, count in answers]
        rows = starts, counted, len(answers)
        if answers and left > 0:
            room = self._room_beside(*rows)
        budget, has_time = self._left_for_prompts(prompts, [request for request, _ in answers], rows, left, room)
        left = budget
        for request in prompts if has_time else prompts[:1]:
            left -= self._chunk(num_lacking(request), left)
        if left > 0 and has_time and (candidate := self._candidate(self._queue.first_in_order)) is not None:
            request, prefix = candidate
            if self.kv.has_room(prefix, request.num_tokens, keep_watermark=bool(self._running)):
                left -= self._chunk(request.num_tokens - prefix.num_tokens, left)
        return budget - left

    def _draft(self, request: Request, most: int) -> Sequence[int]:
        """The drafts of a request after its newest token, if this token is known: see Speculation.

        Drafts must not cause a preemption. So there are none unless each running request could get a free block.
        """
        if request.num_in_flight_tokens or not request.output_token_ids:
            return ()
        most = min(most, request.max_tokens - len(request.output_token_ids) - 1)
        if self._rope_switches_after is not None and not request.rope_offset:
            most = min(most, self._rope_switches_after - request.num_tokens)
        most = min(most, self.speculation.most)
        if most <= 0 or self.kv.num_free_blocks <= len(self._running) + most // self.kv.block_size:
            return ()
        drafts = self.speculation.propose(request, most)
        if not drafts or not self.kv.extend(request, request.num_tokens + len(drafts)):
            return ()
        self.speculation.take(request, len(drafts))
        return drafts

    def _add_prompt(self, step: _Step, request: Request, count: int) -> int:
        """Put `count` tokens of a prompt into the step, or fewer if its time does not allow them. Returns their
        number.
        """
        if step.room is None:
            return self._add_row(step, request, count)
        start = request.num_computed_tokens
        count = max(step.room.fitting(start, count), min(count, LEAST_PROMPT_TOKENS))
        count = self._add_row(step, request, count)
        step.room.take(start, count)
        return count

    def _add_row(self, step: _Step, request: Request, count: int, drafts: Sequence[int] = ()) -> int:
        """Put `count` tokens of a running request, its drafts included, into the step. Returns their number.

        A prompt gets fewer tokens if it has slots for fewer, or if its last token has to wait for forks.
        """
        batch, table = step.batch, self.kv.table(request)
        count = min(count, table.num_tokens - request.num_computed_tokens, self.kv.step_tokens)
        if count > 1 and self._ends_before_forks(request, request.num_computed_tokens + count):
            count -= 1
        batch.request_ids.append(request.request_id)
        batch.num_computed_tokens.append(request.num_computed_tokens)
        batch.num_scheduled_tokens.append(count)
        batch.new_block_ids.append(table.take_new())
        step.rows.append(request)
        if (num_forced := request.num_forced_tokens) > 0 and request.num_computed_tokens < request.num_tokens:
            begin = request.num_tokens - num_forced
            batch.forced_tokens.append((request.request_id, begin, request.output_token_ids[-num_forced:]))
        num_logits = advance(request, count, len(drafts))
        batch.num_logits.append(num_logits)
        batch.draft_token_ids.append(drafts)
        if num_logits and request.num_computed_tokens > len(request.prompt_token_ids):
            self._stats.num_decode_tokens += count if count <= request.num_forced_tokens + 1 else num_logits
        return count

    def _extend_or_preempt(self, request: Request, count: int) -> bool:
        """Get slots for up to `count` more tokens. Requests are preempted only until there is one slot.

        False: the request itself was the last running one, and was preempted.
        """
        start = request.num_computed_tokens
        while not self.kv.extend(request, start + count) and self.kv.table(request).num_tokens <= start:
            victim = self._running[-1]
            self._warn_of_preemption(victim)
            self.preempt_last()
            if victim is request:
                return False
        return True

    def _candidate(self, first: Callable[[], tuple[Key, Request] | None]) -> tuple[Request, Prefix] | None:
        """The next waiting request and its prefix; None: no request may run now.

        Forks are deferred until the prompt of their parent is computed. Requests are deferred if their adapter has no
        place. A preempted request with results in flight ends the search.

        Args:
            first: gives the first waiting request.
        """
        while len(self._running) < self.limits.max_num_seqs and (entry := first()) is not None:
            request = entry[1]
            running = chain(self._running, *(other._running for other in self.others))
            if request.num_in_flight_steps > 0 or not may_join(request, running):
                return None
            if not self.adapters.may_run(request):
                self._queue.remove(request)
                self._deferred[request] = partial(self.adapters.may_run, request)
                continue
            parent = self._parent(request)
            if parent is None:
                return request, self._cached_prefix(request)
            if _is_prompt_settled(parent):
                prefix = self.kv.fork_prefix(parent)
                return request, self._cached_prefix(request) if prefix is None else prefix
            self._queue.remove(request)
            self._deferred[request] = partial(_is_prompt_settled, parent)
        return None

    def _parent(self, request: Request) -> Request | None:
        """The running request that shares the KV of its prompt with this fork; None: there is none.

        It is the first continuation. If that one does not run (any more), it is another one of the same prompt, unless
        that one ends with its prompt, which it computes in one piece.
        """
        self._choose_rope(request)
        if request.fork_of is None:
            return None
        parent = self._requests.get(request.fork_of)
        if parent is None or parent.status is not RUNNING:
            if request.max_tokens == 1 and not self._enable_chunked_prefill:
                return None
            others = (other for other in self._running if other.status is RUNNING)
            parent = next((other for other in others if other.fork_of == request.fork_of), None)
        return parent if parent is not None and self._may_share(parent, request) else None

    def _may_share(self, parent: Request, fork: Request) -> bool:
        """Whether a fork shares the KV of this parent's prompt. For prompt logprobs, it computes the prompt itself."""
        is_anew = fork.sampling_params.prompt_logprobs is not None
        return self.kv.can_fork and not is_anew and share_prompt(parent, fork)

    def _ends_before_forks(self, request: Request, end: int) -> bool:
        """Whether a request that computes the tokens before `end` would end before forks can share its blocks.

        Then its last token waits for a later step. Forks can begin as soon as the tokens before it are computed.
        """
        if request.max_tokens > 1 or end != request.num_prompt_tokens or not self._enable_chunked_prefill:
            return False
        forks = self._forks.get(request.fork_of or request.request_id, ())
        has_place = len(self._running) < self.limits.max_num_seqs
        return has_place and any(fork.status is not RUNNING and self._may_share(request, fork) for fork in forks)

    def _cached_prefix(self, request: Request) -> Prefix:
        """The prefix of a request in the prefix cache. It is empty if the request must not read the cache.

        A fork may read it: the first continuation, which may have ended, has computed the prompt anew. So may a request
        with output, which has computed its prompt anew: its prompt logprobs came with the first token.
        """
        params = request.sampling_params
        is_skipped = params.skip_reading_prefix_cache and request.fork_of is None
        is_anew = (params.prompt_logprobs is not None or is_skipped) and not request.output_token_ids
        return NO_PREFIX if is_anew else self.kv.find_cached_prefix(request)

    def _admit(self, step: _Step, request: Request, prefix: Prefix) -> bool:
        """Start a waiting request if there are free blocks for all its known tokens.

        So prompts that have begun do not compete for blocks.
        """
        copies = self.kv.admit(request, prefix, request.num_tokens, keep_watermark=bool(self._running))
        if copies is None:
            return False
        self._queue.remove(request)
        self.adapters.start(request)
        request.status = RUNNING
        start_at(request, prefix.num_tokens)
        self.speculation.admit(request, prefix.num_tokens)
        insort(self._running, request, key=self._key)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._clock()
            request.num_cached_tokens = prefix.num_tokens
            if request.fork_of is None:
                self._stats.prefix_cache_queries += request.num_tokens
                self._stats.prefix_cache_hits += prefix.num_tokens
        step.batch.block_copies += copies
        step.batch.new_rows.append(self._new_row(request))
        return True

    def _new_row(self, request: Request) -> NewRow:
        return NewRow(
            request_id=request.request_id,
            token_ids=request.token_ids(),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.sampling_params,
            block_ids=self.kv.table(request).take_new(),
            stop_token_ids=request.stop_token_ids,
            adapter=request.adapter,
            rope_offset=request.rope_offset,
            wants_vector=request.wants_vector,
        )

    def _close(self, step: _Step) -> ScheduledBatch | None:
        """Count the step as submitted. An empty batch is no step; its removals go into the next batch."""
        if not step.rows:
            return None
        step.batch.removed_request_ids, self._removed = self._removed, []
        self._in_flight[step.batch.step_id] = step
        self._next_step_id += 1
        return step.batch

    # Rare events of a request

    def _wait(self, request: Request) -> None:
        """Put a request into the queue. Its turn depends on the number of its tokens that are not cached now."""
        self._choose_rope(request)
        request.queued_time = self._clock()
        self._queue.push(request, request.num_tokens - self._cached_prefix(request).num_tokens)

    def _preempt(self, request: Request) -> None:
        """Preempt a running request, because blocks are missing. The caller removes it from `_running`."""
        self._take_back(request, PREEMPTED)
        request.num_preemptions += 1
        self._stats.num_preemptions += 1

    def _take_back(self, request: Request, status: RequestStatus) -> None:
        """Free the blocks of a running request. It returns to its place in the queue, and is computed again later."""
        self.kv.free(request)
        self.adapters.stop(request)
        request.status = status
        request.first_token_time = None  # the time of its answer begins again, so that it has none in the queue
        start_at(request, 0)
        self._removed.append(request.request_id)
        self.adapters.wait(request)
        self._wait(request)

    def _choose_rope(self, request: Request) -> None:
        """Choose the rotary table of a request (longrope): the long one if more tokens are known than the border."""
        border = self._rope_switches_after
        if border is not None and request.num_tokens > border and not request.rope_offset:
            request.rope_offset = border
            request.block_hashes.clear()

    def _take_back_lengthened(self, border: int) -> None:
        """Take back running requests that the next step would bring beyond the border. They restart as long ones."""
        for request in self._running:
            num_known = request.num_tokens + request.num_in_flight_tokens
            if num_known > border and not request.rope_offset and self._num_schedulable(request) > 0:
                self._take_back(request, WAITING)  # blocks are not missing, so other requests may be admitted before it
        self._drop_stopped()

    def _warn_of_preemption(self, victim: Request) -> None:
        self._preemption_log.warning(
            "Request %s is preempted by PreemptionMode.RECOMPUTE: %d running requests use all %d KV cache blocks, so "
            "it will be computed again later. If this happens often, give the KV cache more memory "
            "(--gpu-memory-utilization, --kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE), or lower --max-num-seqs or "
            "--max-model-len.",
            victim.request_id,
            len(self._running),
            self.kv.pool.num_blocks,
        )

    def _queue_ready(self) -> None:
        """Put deferred requests into the queue if they no longer have a reason to wait."""
        if self._deferred:
            for request in [request for request, is_ready in self._deferred.items() if is_ready()]:
                del self._deferred[request]
                self._wait(request)

    def _finish(
        self, request: Request, reason: FinishReason, error: str | None = None, error_code: str | None = None
    ) -> None:
        """End a request, and free its blocks at once. A running request stays in `_running` until `_drop_stopped`."""
        if request.status is RUNNING:
            self.adapters.stop(request)
            self.kv.free(request)
            self._removed.append(request.request_id)
        else:
            self.adapters.leave(request)
            if self._deferred.pop(request, None) is None:
                self._queue.remove(request)
        request.status = FINISHED
        request.finish_reason = reason
        request.error, request.error_code = error, error_code
        del self._requests[request.request_id]
        if request.fork_of is not None:
            forks = self._forks[request.fork_of]
            forks.remove(request)
            if not forks:
                del self._forks[request.fork_of]
        self._prompt_logprobs.drop(request)
        self.speculation.forget(request.request_id)

    def _answer(
        self, request: Request, row: int, token_ids: list[int], reason: FinishReason | None, result: StepResult
    ) -> RequestDelta:
        """The delta of a row. The request has the tokens already. If they end the request, its blocks are freed."""
        if not token_ids:
            vector = result.vectors.get(row)
            missing = "vector" if request.wants_vector else "token"
            error = None if vector else f"The model produced no {missing} for this request."
            self._finish(request, "error" if error else "stop", error)
            delta = delta_of(request, [])
            delta.vector = vector
            return delta
        request.is_suspect = False
        is_first = len(request.output_token_ids) == len(token_ids)
        prompt_logprobs = self._prompt_logprobs.take(request) if is_first else None
        if reason is not None:
            self._finish(request, reason)
        delta = delta_of(request, token_ids)
        delta.prompt_logprobs = prompt_logprobs
        if row in result.logprobs:
            delta.logprobs = result.logprobs[row][: len(token_ids)]
        return delta

    def _drop_stopped(self) -> None:
        """Remove requests from `_running` that no longer run.

        `_finish` and `_preempt` leave this work here, so that many ends in one step cost only one pass.
        """
        self._running = [request for request in self._running if request.status is RUNNING]


def _is_prompt_settled(parent: Request) -> bool:
    """Whether a fork of this parent need not wait: what it shares of the prompt's KV is computed, or is gone.

    A fork computes the last token of the prompt itself.
    """
    return parent.status is not RUNNING or parent.num_settled_tokens >= parent.num_prompt_tokens - 1
