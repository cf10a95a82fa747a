"""EchoClient: an engine without a model, to test everything in front of an engine and to measure its capacity."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quire.errors import AdapterError, EngineDeadError, QueueFullError, QuireError
from quire.lora.facts import AdapterFacts
from quire.messages import (
    Abort,
    AdapterState,
    AddRequest,
    Command,
    EngineBegun,
    EngineFailed,
    EngineInput,
    EngineMessage,
    EngineOutputs,
    EngineReady,
    LoadAdapter,
    RequestDelta,
    SetLimits,
    UnloadAdapter,
    pack,
)
from quire.schedule import StepRecord, TokenLogprobs

ECHO_BLOCK_SIZE = 16
ECHO_NUM_BLOCKS = 1024


@dataclass(slots=True)
class _Row:
    request: AddRequest
    num_output: int = 0


class EchoClient:
    """Answers every request with its own prompt, repeated, or with fixed tokens and EOS.

    It obeys max_tokens, min_tokens, stop_token_ids, logprobs, aborts and limits, but not priorities. A step gives every
    running request `tokens_per_step` tokens and takes `step_seconds`.

    Args:
        answer: token ids of every answer; the request's first stop token ends it. None: the prompt, without end.
        error_of: the error for a request; None: the request is served.
        max_num_queued_reqs: further waiting requests are refused with QueueFullError; None: no limit.
        is_ready: False: EngineReady comes only with `make_ready`.
        engine_index: the index in its messages.
        adapters: digests by path; requests may name the adapters that were loaded.
    """

    def __init__(
        self,
        answer: Sequence[int] | None = None,
        *,
        step_seconds: float = 0.0,
        tokens_per_step: int = 1,
        max_model_len: int = 2048,
        max_num_seqs: int = 256,
        max_num_queued_reqs: int | None = None,
        error_of: Callable[[AddRequest], QuireError | None] = lambda request: None,
        is_ready: bool = True,
        engine_index: int = 0,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self.adapters = dict(adapters or {})
        self.holds_adapters = False  # True: LoadAdapters stay unanswered
        self._loaded: list[str] = []  # digests
        self._answer = None if answer is None else list(answer)
        self.step_seconds, self.tokens_per_step = step_seconds, tokens_per_step
        self._max_model_len, self._max_num_seqs, self._max_num_queued_reqs = (
            max_model_len,
            max_num_seqs,
            max_num_queued_reqs,
        )
        self._error_of, self._engine_index = error_of, engine_index
        self._waiting: deque[_Row] = deque()
        self._running: dict[str, _Row] = {}
        self._messages: deque[EngineMessage] = deque()
        self._refused: list[RequestDelta] = []
        self._wake = asyncio.Event()
        self._death: str | None = None
        self._step_id = 0
        self.is_paused = False  # True: take requests, and end no step, like a stuck engine
        self.sent: list[EngineInput] = []  # every message, for tests
        if is_ready:
            self.make_ready()

    @property
    def is_alive(self) -> bool:
        return self._death is None

    @property
    def num_requests(self) -> int:
        """The number of running and waiting requests."""
        return len(self._running) + len(self._waiting)

    def make_ready(self) -> None:
        """Send EngineReady."""
        ready = EngineReady(
            self._max_model_len, ECHO_NUM_BLOCKS, ECHO_BLOCK_SIZE, self._max_num_seqs, self._max_model_len
        )
        ready.resolved = {"max_num_queued_reqs": {"value": self._max_num_queued_reqs}}
        self.push(ready)

    def push(self, message: EngineMessage) -> None:
        """Send a message to the front end in the engine's name."""
        message.engine_index = self._engine_index
        self._messages.append(message)
        self._wake.set()

    def fail_request(self, request_id: str, error: QuireError) -> None:
        """End a request with an error."""
        self._remove(request_id)
        self._refuse(request_id, error)

    def die(self, message: str = "The echo engine was told to die") -> None:
        """End like an engine process."""
        self._death = message
        self.push(EngineFailed(message))

    def mark_dead(self, message: str) -> None:
        if self._death is None:
            self.die(message)

    def send(self, message: EngineInput) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        messages = list(message.continuations()) if isinstance(message, AddRequest) else [message]
        self.sent += messages
        for each in messages:
            self._take(each)
        self._wake.set()

    def _take(self, message: EngineInput) -> None:
        match message:
            case AddRequest():
                self._add(message)
            case Abort():
                for request_id in message.request_ids:
                    self._remove(request_id)
            case SetLimits():
                self._max_num_seqs = message.max_num_seqs or self._max_num_seqs
                self._max_num_queued_reqs = message.max_num_queued_reqs or self._max_num_queued_reqs
            case LoadAdapter():
                self._load(message)
            case UnloadAdapter():
                self._loaded.remove(message.digest)
            case Command(name="shutdown"):
                self._death = "The echo engine was shut down"

    def _load(self, message: LoadAdapter) -> None:
        digest = message.digest or self.adapters.get(message.path)
        if self.holds_adapters:
            return
        if digest is not None:
            self._loaded.append(digest)
        if message.digest is None:
            state = AdapterState(path=message.path, operation=message.operation)
            if digest is None:
                state.error, state.error_code = "There is no adapter at this path.", "adapter_not_found"
            else:
                state.facts = AdapterFacts(digest, 8, 1000, 7)
            self.push(state)

    def _add(self, request: AddRequest) -> None:
        error = self._error_of(request)
        if request.adapter is not None and request.adapter not in self._loaded:
            error = AdapterError("The adapter is not loaded", value=request.adapter)
        is_full = len(self._running) >= self._max_num_seqs
        limit = self._max_num_queued_reqs
        if error is None and is_full and limit is not None and len(self._waiting) >= limit:
            error = QueueFullError("The waiting queue is full", value=limit, fix="Retry later")
        if error is not None:
            self._refuse(request.request_id, error)
            return
        self._waiting.append(_Row(request, len(request.output_token_ids)))
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            row = self._waiting.popleft()
            self._running[row.request.request_id] = row
            if row.request.is_retry:
                self.push(EngineBegun([row.request.request_id]))

    def _refuse(self, request_id: str, error: QuireError) -> None:
        self._refused.append(
            RequestDelta(request_id, finish_reason="error", error=error.message, error_code=error.code)
        )
        self._wake.set()

    def _remove(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._waiting = deque(row for row in self._waiting if row.request.request_id != request_id)
        self._admit()

    async def receive(self) -> EngineMessage:
        while not self._messages:
            if self._death is not None:
                raise EngineDeadError(self._death)
            if not self.is_paused and (self._running or self._refused):
                await asyncio.sleep(self.step_seconds)
                if not self.is_paused and (self._running or self._refused):
                    return self._step()
            else:
                self._wake.clear()
                await self._wake.wait()
        return self._messages.popleft()

    def _step(self) -> EngineOutputs:
        self._step_id += 1
        deltas, self._refused = self._refused, []
        rows = list(self._running.values())
        num_prefill = sum(len(row.request.prompt_token_ids) for row in rows if row.num_output == 0)
        num_decode = sum(row.num_output > 0 for row in rows)
        for row in rows:
            delta = self._advance(row)
            deltas.append(delta)
            if delta.finish_reason is not None:
                del self._running[delta.request_id]
        self._admit()
        return EngineOutputs(deltas, self._record(rows, num_prefill, num_decode), engine_index=self._engine_index)

    def _advance(self, row: _Row) -> RequestDelta:
        request = row.request
        delta = RequestDelta(request.request_id, [])
        if row.num_output == 0:
            delta.queued_seconds = 0.0
            if request.sampling_params.prompt_logprobs is not None:
                delta.prompt_logprobs = [
                    pack(_logprobs(token, request.sampling_params.prompt_logprobs))
                    for token in request.prompt_token_ids[1:]
                ]
        for _ in range(self.tokens_per_step):
            token_id = self._next_token(row)
            delta.token_ids.append(token_id)
            row.num_output += 1
            if token_id in request.stop_token_ids and row.num_output >= request.sampling_params.min_tokens:
                delta.finish_reason = "stop"
                delta.stop_reason = token_id if token_id in (request.sampling_params.stop_token_ids or ()) else None
                break
            if row.num_output >= request.max_tokens:
                delta.finish_reason = "length"
                break
        count = request.sampling_params.num_logprobs
        if count is not None:
            delta.logprobs = [_logprobs(token_id, count) for token_id in delta.token_ids]
        return delta

    def _next_token(self, row: _Row) -> int:
        request = row.request
        source = request.prompt_token_ids if self._answer is None else self._answer
        is_over = self._answer is not None and row.num_output >= len(source)
        if is_over and request.stop_token_ids and row.num_output + 1 >= request.sampling_params.min_tokens:
            return request.stop_token_ids[0]
        return source[row.num_output % len(source)]

    def _record(self, rows: list[_Row], num_prefill: int, num_decode: int) -> StepRecord:
        num_kv = sum(len(row.request.prompt_token_ids) + row.num_output for row in rows)
        return StepRecord(
            step_id=self._step_id,
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decode,
            num_sampled_tokens=len(rows) * self.tokens_per_step,
            num_rows=len(rows),
            num_kv_tokens_read=num_kv,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks_in_use=min(-(-num_kv // ECHO_BLOCK_SIZE), ECHO_NUM_BLOCKS),
            num_blocks_total=ECHO_NUM_BLOCKS,
            num_preemptions=0,
            prefix_cache_queries=num_prefill,
            prefix_cache_hits=0,
            step_seconds=self.step_seconds,
        )

    def close(self) -> None:
        self._death = self._death or "The echo engine is closed"
        self._wake.set()


def _logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The token at rank 1, and neighbouring ids as the next likely ones."""
    ids = [token_id, *(token_id ^ (index + 1) for index in range(1, max(count, 1)))]
    return TokenLogprobs(ids, [-0.25 * (rank + 1) for rank in range(len(ids))], list(range(1, len(ids) + 1)))
