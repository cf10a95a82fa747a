"""The engine core. It schedules a batch, submits it, and turns its result into one delta for each request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from quire.cost.arithmetic import Load
from quire.cost.model import CostModel
from quire.cost.step_time import StepTime
from quire.errors import (
    AdapterError,
    EngineDeadError,
    InvalidRequestError,
    OutOfMemoryError,
    QuireError,
    is_out_of_memory,
)
from quire.logs import get_logger
from quire.lora.registry import AdapterRegistry
from quire.messages import AddRequest, Command, ObservedOverhead, RequestDelta, SetLimits, UseTokenizer
from quire.request import Request
from quire.schedule import Executor, Pending, Polled, RowsFailedError, ScheduledBatch, StepRecord, StepResult
from quire.scheduler.lanes import Lanes
from quire.scheduler.scheduler import Scheduler, ScheduleStats

logger = get_logger(__name__)

DEFERRED_SECONDS = 0.001  # the time between two checks of deferred requests, if there is nothing else to do

OnBegun = Callable[[list[str]], None]  # takes the ids of requests


class Preparer(Protocol):
    """Prepares resources of requests at the same time as steps run: see life_cycle.WorkerExecutor."""

    def use_tokenizer(self, tokenizer: str, eos_token_ids: Sequence[int]) -> None: ...

    def prepare_grammar(self, text: str) -> Polled[object]: ...


@dataclass(slots=True)
class _Step:
    """A submitted batch without a result."""

    batch: ScheduledBatch
    pending: Pending[StepResult]
    stats: ScheduleStats
    start_time: float
    schedule_seconds: float
    load: Load | None  # with lanes, that of the busiest one
    predicted: StepTime | None
    predicted_seconds: float  # with the drafter's time; nine of ten steps take at most this time; 0: no cost model
    pause: float  # the seconds before this step in which the engine was idle


class EngineCore:
    """Connects a scheduler (or one for each lane) with an executor. It is not thread-safe: one loop calls everything.

    Args:
        depth: the most batches in flight. With two, the engine schedules while the executor computes.
        cost: predicts the times of steps, and learns from them; None: there are no predictions.
        clock: gives monotonic seconds.
        sleep: waits for a number of seconds.
        preparer: compiles grammars; None: there are no grammars.
        adapters: the adapters of the engine; None: there are none.
        on_begun: is told which requests of other engines this one begins to prepare or to compute, before it does. It
            is told all of them if scheduling fails.

    Raises ValueError if the depth is below 1.
    """

    def __init__(
        self,
        scheduler: Scheduler | Lanes,
        executor: Executor,
        depth: int = 1,
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        preparer: Preparer | None = None,
        adapters: AdapterRegistry | None = None,
        on_begun: OnBegun = lambda request_ids: None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"The engine needs a depth of at least 1, got {depth}.")
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.cost = cost
        self.adapters = adapters
        # The predicted seconds of the batches in flight. Other threads may read it.
        self.predicted_seconds = 0.0
        self.last_record: StepRecord | None = None  # of the batch that the last step() took in; None: it took in none
        self._clock, self._sleep = clock, sleep
        self._in_flight: deque[_Step] = deque()
        self._refused: list[RequestDelta] = []
        self._on_begun = on_begun
        self._preparer = preparer
        self._preparing: dict[str, Polled[object]] = {}  # request id -> its grammar that is being compiled
        self._last_end_time = 0.0  # the time at which the last step ended; 0: there was none

    def add(self, message: AddRequest, is_ready: Callable[[], bool] | None = None) -> None:
        """Queue the continuations of a request. If one is refused, the next step returns its error.

        Args:
            is_ready: see Scheduler.add.
        """
        for continuation in message.continuations():
            self._add(continuation, is_ready)

    def _add(self, message: AddRequest, is_ready: Callable[[], bool] | None) -> None:
        grammar = message.sampling_params.grammar
        if grammar is not None:
            assert self._preparer is not None and is_ready is None, "nobody compiles grammars"
            is_ready = self._is_prepared(message.request_id)
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            sampling_params=message.sampling_params,
            max_tokens=message.max_tokens,
            stop_token_ids=frozenset(message.stop_token_ids),
            arrival_time=message.arrival_time,
            priority=message.priority,
            cache_salt=message.cache_salt,
            adapter=message.adapter,
            fork_of=message.fork_of,
            wants_vector=message.wants_vector,
            lane=message.lane,
            output_token_ids=list(message.output_token_ids),
            is_retry=message.is_retry,
        )
        if grammar is not None or message.adapter is not None:
            self._tell_begun([request])
        try:
            if message.adapter is not None and self.adapters is not None and message.adapter not in self.adapters:
                raise AdapterError("The adapter is not loaded", value=message.adapter, fix="Load it again")
            self.scheduler.add(request, is_retry=message.is_retry, is_ready=is_ready)
        except QuireError as error:
            self._refuse(message.request_id, error)
        else:
            if grammar is not None and self._preparer is not None:
                request.prepared = self._preparing[message.request_id] = self._preparer.prepare_grammar(grammar)

    def _is_prepared(self, request_id: str) -> Callable[[], bool]:
        return lambda: request_id not in self._preparing

    def _refuse(self, request_id: str, error: QuireError) -> None:
        delta = RequestDelta(request_id, finish_reason="error", error=error.message, error_code=error.code)
        self._refused.append(delta)

    def use_tokenizer(self, message: UseTokenizer) -> None:
        """Take the tokenizer whose vocabulary the grammars of later requests use."""
        assert self._preparer is not None, "nobody compiles grammars"
        self._preparer.use_tokenizer(message.tokenizer, message.eos_token_ids)

    def _end_unprepared(self) -> None:
        """Refuse requests if their resources could not be prepared."""
        for request_id in [name for name, preparation in self._preparing.items() if preparation.done()]:
            try:
                self._preparing.pop(request_id).result()
            except Exception as error:
                self.scheduler.abort([request_id])
                if not isinstance(error, QuireError):
                    logger.error("a grammar could not be compiled", exc_info=error)
                    error = InvalidRequestError(f"The grammar could not be compiled ({type(error).__name__})")
                self._refuse(request_id, error)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Free these requests now. There are no more deltas for them."""
        left = list(request_ids)
        self.scheduler.abort(left)
        for request_id in left:
            self._preparing.pop(request_id, None)  # a grammar that nobody holds is not compiled

    def set_limits(self, message: SetLimits) -> None:
        """Change limits from the next step on. Raises ValueError for an illegal limit; then nothing changes."""
        self.scheduler.set_limits(message)

    def note_overhead(self, message: ObservedOverhead) -> None:
        """Take in the overhead that the front end has measured for a request."""
        if self.cost is not None:
            self.cost.observe_overhead(message.num_prompt_tokens, message.seconds)

    def command(self, message: Command) -> None:
        """Carry out reset_prefix_cache or shutdown. Raises ValueError for another name."""
        commands: dict[str, Callable[[], None]] = {
            "reset_prefix_cache": self.scheduler.reset_prefix_cache,
            "shutdown": self.shutdown,
        }
        if message.name not in commands:
            raise ValueError(f"Unknown engine command {message.name!r}, expected one of {', '.join(commands)}.")
        commands[message.name]()

    def shutdown(self) -> None:
        """Stop the executor. Batches in flight are dropped."""
        self._in_flight.clear()
        self.executor.shutdown()

    def probe(self, rows: Sequence[tuple[int, int]]) -> tuple[Load, float] | None:
        """Compute a step without a request, to measure it. Raises the executor's errors.

        Args:
            rows: see Scheduler.probe.

        Returns:
            The load of the step and its seconds. None: there are requests, or too few pages are free.
        """
        assert self.cost is not None
        if self._in_flight or (batch := self.scheduler.probe(rows)) is None:
            return None
        starts, counts = zip(*rows, strict=True)
        start = self._clock()
        try:
            self.executor.submit(batch).result()
        except Exception:
            self.scheduler.fail_probe(batch)
            raise
        self._last_end_time = self._clock()
        return self.cost.arithmetic.load(starts, counts, len(rows)), self._last_end_time - start

    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        is_reading = self.adapters is not None and self.adapters.is_busy
        return bool(self._in_flight or self._refused) or self.scheduler.has_requests() or is_reading

    def step(self) -> list[RequestDelta]:
        """Submit the next batch. If `depth` batches are in flight, or no batch can be made, take in the oldest result.

        An error of the executor ends requests and not the loop, unless it is an EngineDeadError.

        Returns:
            The deltas of requests.
        """
        self.last_record = None
        if self._preparing:
            self._end_unprepared()
        refused, self._refused = self._refused, []
        if self.adapters is not None:
            refused += self._step_adapters(self.adapters)

        is_submitted = len(self._in_flight) < self.depth and self._submit()
        if is_submitted and len(self._in_flight) < self.depth and self.scheduler.has_ready_requests():
            return refused

        if not self._in_flight:
            is_waiting = self.scheduler.num_deferred or (self.adapters is not None and self.adapters.is_busy)
            if is_waiting and not refused:
                self._sleep(DEFERRED_SECONDS)
            return refused
        step = self._in_flight.popleft()
        try:
            result = step.pending.result()
            self.predicted_seconds = sum(later.predicted_seconds for later in self._in_flight)
            if len(result.token_ids) != len(step.batch.request_ids):
                raise ValueError(f"{len(step.batch.request_ids)} rows submitted, {len(result.token_ids)} answered")
        except EngineDeadError:
            raise
        except Exception as error:
            return refused + self._fail(step, error)
        return refused + self._update(step, result)

    def _step_adapters(self, adapters: AdapterRegistry) -> list[RequestDelta]:
        """Load and drop adapters. Requests end if their adapter is lost."""
        lost = adapters.step(self.scheduler.adapters)
        if lost is None:
            return []
        deltas = self.scheduler.fail_waiting(lost.digest, lost.error.message)
        for delta in deltas:
            delta.error_code = lost.error.code
        return deltas

    def _submit(self) -> bool:
        """Schedule and submit a batch, if there is anything to compute."""
        start = self._clock()
        try:
            batch = self.scheduler.schedule()
        except Exception:  # the engine ends, and any of its requests may be the reason
            self._tell_begun(self.scheduler.requests)
            raise
        if batch is None:
            return False
        scheduled = self._clock()
        if batch.new_rows:
            self._tell_begun(self.scheduler.rows_of(batch))

        load, predicted, predicted_seconds = None, None, 0.0
        pause = max(start - self._last_end_time, 0.0) if self._last_end_time and not self._in_flight else 0.0
        if self.cost is not None:
            # Lanes compute side by side, so a step takes as long as the busiest one, whose experts get all tokens.
            rows = max(batch.lanes, key=lambda lane: lane.num_tokens) if batch.lanes else batch
            load, predicted = self.cost.predict_rows(
                rows.num_computed_tokens,
                rows.num_scheduled_tokens,
                sum(rows.num_logits),
                pause,
                batch.num_tokens - rows.num_tokens if batch.lanes else 0,
            )
            predicted_seconds = predicted.high + self.scheduler.speculation.drafter_seconds(batch)
            self.predicted_seconds += predicted_seconds
        try:
            pending = self.executor.submit(batch)
        except EngineDeadError:
            raise
        except Exception as error:  # handled in the order of the batches, as if result() had raised it
            pending = Future()
            pending.set_exception(error)

        stats = self.scheduler.take_stats()
        self._in_flight.append(
            _Step(batch, pending, stats, start, scheduled - start, load, predicted, predicted_seconds, pause)
        )
        return True

    def _tell_begun(self, requests: Iterable[Request]) -> None:
        """Say which of these requests were not begun before. From now on, they may be the reason of a failure."""
        begun = [request for request in requests if request.is_retry]
        for request in begun:
            request.is_retry = False
        if begun:
            self._on_begun([request.request_id for request in begun])

    def _update(self, step: _Step, result: StepResult) -> list[RequestDelta]:
        arrived = self._clock()
        deltas = self.scheduler.update(step.batch, result)
        end = self._clock()
        self.last_record = self._record(step, result, end - arrived, end)
        if self.cost is not None and step.load is not None and step.predicted is not None and not result.has_captured:
            self.cost.observe(step.load, step.predicted.seconds, self.last_record.timed_seconds, step.pause)
        self._last_end_time = self._clock()  # the fit of the cost model takes time that belongs to no step
        return deltas

    def _fail(self, step: _Step, error: Exception) -> list[RequestDelta]:
        """End the requests that made the executor raise. The other requests are computed again.

        If memory was missing and the request to blame is not known, the newest request ends.
        """
        logger.error("step %d failed: %s", step.batch.step_id, error, exc_info=error)
        steps = [step, *self._in_flight]
        self._in_flight.clear()
        for later in steps[1:]:
            _wait_for_void(later)
        self.predicted_seconds = 0.0
        request_ids: list[str] = []
        code, message = None, f"The model step failed ({type(error).__name__})."
        if is_out_of_memory(error):
            request_ids = error.request_ids if isinstance(error, RowsFailedError) else step.batch.request_ids[-1:]
            error = OutOfMemoryError(
                "The engine had no memory left for this request", fix="Send it again, or a smaller one"
            )
        if isinstance(error, QuireError):
            code, message = error.code, error.message
        elif isinstance(error, RowsFailedError):
            request_ids, message = error.request_ids, str(error)
        deltas = self.scheduler.fail([step.batch for step in steps], message, request_ids)
        for delta in deltas:
            delta.error_code = code
        return deltas

    def _record(self, step: _Step, result: StepResult, output_seconds: float, end: float) -> StepRecord:
        batch, stats, scheduler = step.batch, step.stats, self.scheduler
        load, predicted = step.load, step.predicted
        num_tokens = batch.num_tokens
        record = StepRecord(
            step_id=batch.step_id,
            num_prefill_tokens=num_tokens - stats.num_decode_tokens,
            num_decode_tokens=stats.num_decode_tokens,
            num_sampled_tokens=sum(map(len, [*result.token_ids, *result.forced.values()])),
            num_rows=len(batch.request_ids),
            num_kv_tokens_read=sum(batch.num_computed_tokens) + num_tokens,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks_in_use=scheduler.num_blocks_in_use,
            num_blocks_total=scheduler.num_blocks,
            num_preemptions=stats.num_preemptions,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            num_deferred=scheduler.num_deferred,
            schedule_seconds=step.schedule_seconds,
            prepare_seconds=result.prepare_seconds,
            forward_seconds=result.forward_seconds,
            sample_seconds=result.sample_seconds,
            output_seconds=output_seconds,
            # With two batches in flight, a step begins when the step before it has ended.
            step_seconds=end - max(step.start_time, self._last_end_time),
            draft_seconds=result.draft_seconds,
            has_captured=result.has_captured,
            evicted_blocks=scheduler.take_evicted_blocks(),
            experts=result.experts,
            ranks=result.ranks,
            lanes=scheduler.uses(batch),
        )
        if load is not None and predicted is not None:
            record.predicted_seconds, record.bound = predicted.seconds, predicted.bound
            record.predicted_low_seconds, record.predicted_high_seconds = predicted.low, predicted.high
            if not result.has_captured:
                # The prediction covers all stages, and with several stages steps overlap.
                seconds = end - step.start_time if scheduler.num_stages > 1 else record.step_seconds
                record.timed_seconds = seconds - record.draft_seconds
            if batch.lanes and self.cost is not None:  # the work of all
                load = self.cost.arithmetic.load(
                    batch.num_computed_tokens, batch.num_scheduled_tokens, sum(batch.num_logits)
                )
            record.num_logits, record.kv_tokens, record.pairs = load.num_logits, load.kv_tokens, load.pairs
        counts = scheduler.speculation.take_counts()
        record.num_drafts, record.num_draft_tokens = counts.num_drafts, counts.num_draft_tokens
        record.num_accepted_tokens, record.num_draft_failures = counts.num_accepted_tokens, counts.num_failures
        record.accepted_per_position = tuple(counts.accepted_per_position)
        if self.adapters is not None:
            record.num_adapters, record.num_adapters_in_memory = self.adapters.num_known, self.adapters.num_in_memory
        return record


def _wait_for_void(step: _Step) -> None:
    """Wait for a batch that comes after a failed one. The executor must be idle before requests are computed again."""
    try:
        step.pending.result()
    except EngineDeadError:
        raise
    except Exception as error:
        logger.info(
            "step %d, which is void because an earlier step failed, failed as well: %s", step.batch.step_id, error
        )
