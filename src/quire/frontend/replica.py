"""Replica: one engine of the front end, from its first process to the last, with its requests."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from quire.errors import (
    EngineDeadError,
    EngineRestartedError,
    QueueFullError,
    QuireError,
    ShuttingDownError,
    TargetMissedError,
)
from quire.frontend.admission import Admission
from quire.frontend.client import EngineClient
from quire.frontend.input_processor import ProcessedRequest
from quire.frontend.output_processor import OutputProcessor, error_of
from quire.frontend.request_state import RequestState
from quire.frontend.router import Backlog
from quire.frontend.stats import FailureReason
from quire.frontend.stream import RequestStream
from quire.frontend.supervisor import EngineStarter, RecoveryLimits, Supervisor
from quire.logs import get_logger
from quire.lora.facts import AdapterFacts
from quire.messages import (
    Abort,
    AdapterState,
    AddRequest,
    Command,
    EngineBegun,
    EngineInput,
    EngineMessage,
    EngineOutputs,
    EngineProgress,
    EngineReady,
    LoadAdapter,
    ObservedOverhead,
    SetLimits,
    UnloadAdapter,
    joined,
)
from quire.outputs import FinishReason
from quire.sampling_params import RequestOutputKind
from quire.schedule import StepRecord

logger = get_logger(__name__)

MAX_RECORDS = 1024  # the most records of steps, about 1 KB each


class Replica:
    """One engine and the engines that replace it after failures. Other replicas do not notice a replacement.

    Args:
        client: the connection to the first engine; the replica owns it.
        output_processor: follows the requests of this replica, which owns it. Its metrics get every step too.
        index: the index of this replica, also in the messages of its engines.
        starter: starts a new engine after a failure; None: there is only one engine.
        recovery: the rules for failed engines.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        client: EngineClient,
        output_processor: OutputProcessor,
        *,
        index: int = 0,
        starter: EngineStarter | None = None,
        recovery: RecoveryLimits = RecoveryLimits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index, self.output_processor = index, output_processor
        # from the last engine that was ready, with limits that were changed since
        self.facts: EngineReady | None = None
        self.is_ready = False  # whether its engine has produced a real token and has not failed
        self.progress: EngineProgress | None = None  # the progress of a start, until the engine is ready
        self.error: QuireError | None = None  # the reason why no engine is left
        self.failure: str | None = None  # why the last engine was lost, until the next one is ready
        self.records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)  # the records of the last steps
        self.admission = Admission()
        self._clock = clock
        self._streams: dict[str, RequestStream] = {}
        self._supervisor = Supervisor(self, client, starter, recovery, clock)
        self._moved_limits: dict[str, Any] = {}  # since the start of the first engine
        self._adapters: list[tuple[str, str]] = []  # path and digest of each that requests may name
        self._reading: dict[int, asyncio.Future[AdapterFacts]] = {}  # the key is the operation
        self._operations = itertools.count()
        self._task: asyncio.Task[None] | None = None
        self._suspect: str | None = None  # the suspect that the engine computes: see RequestState.lose_engine
        self._held: deque[RequestState] = deque()  # the suspects that wait for it

    def start(self, on_change: Callable[[], None], on_progress: Callable[[], None]) -> None:
        """Begin to receive. It needs a running event loop and is called once.

        Args:
            on_change: called when the replica becomes ready, loses its engine, or gives up.
            on_progress: called with every report of a start.
        """
        assert self._task is None, "started twice"
        self._on_change, self._on_progress = on_change, on_progress
        self._task = asyncio.get_running_loop().create_task(self._supervise(), name=f"outputs of engine {self.index}")

    @property
    def client(self) -> EngineClient:
        """The connection to the present engine."""
        return self._supervisor.client

    @property
    def is_healthy(self) -> bool:
        """Whether the engine is ready, sends signs of life, and ends its steps in time."""
        verdict = self._supervisor.watch.verdict(self._clock(), has_work=self.num_unfinished > 0)
        return self.is_ready and self.client.is_alive and verdict is None

    @property
    def is_restarting(self) -> bool:
        """Whether an engine has failed, and the next one is not ready yet."""
        return self.facts is not None and not self.is_ready and self.error is None

    @property
    def num_unfinished(self) -> int:
        """Requests without their last output."""
        return self.output_processor.num_unfinished

    def check_room(self, num_prompt_tokens: int = 1, waited: float = 0.0) -> None:
        """Raise QueueFullError for a request that would wait too long: see Admission.refusal."""
        if (error := self._refusal(num_prompt_tokens, waited)) is not None:
            self._count_refusal(error)
            raise error

    def has_room(self, num_prompt_tokens: int = 1, waited: float = 0.0) -> bool:
        """Whether check_room would not raise."""
        return self._refusal(num_prompt_tokens, waited) is None

    def _refusal(self, num_prompt_tokens: int, waited: float) -> QueueFullError | None:
        if self.num_unfinished == 0:
            self.admission.on_idle()
        return self.admission.refusal(num_prompt_tokens, waited)

    @property
    def backlog(self) -> Backlog:
        """The work that is left for its engine, for the router."""
        return self.admission.backlog(self.output_processor.num_continuations)

    def _count_refusal(self, error: QueueFullError) -> None:
        is_late = isinstance(error, TargetMissedError)
        self.output_processor.metrics.on_rejected("ttft_target" if is_late else "queue_full")

    def add(self, processed: ProcessedRequest, came_time: float) -> RequestStream:
        """Send one request with an unused id. The caller must iterate the stream to its end or close it.

        Args:
            came_time: when it came to this process.
        """
        self._end_idle_time()
        self.output_processor.add(processed)
        before, num_tokens = self._clock() - came_time, len(processed.prompt_token_ids)

        def on_written(seconds: float) -> None:
            self._send(ObservedOverhead(num_tokens, before + seconds))

        is_delta = processed.sampling_params.output_kind is RequestOutputKind.DELTA
        stream = RequestStream(processed.request_id, is_delta=is_delta, on_leave=self._on_leave, on_written=on_written)
        self._streams[processed.request_id] = stream
        with suppress(EngineDeadError):  # `receive` reports it too, and the next engine gets the request
            self._send_request(processed.request_id, processed.requests)
        return stream

    def release(self) -> list[tuple[RequestState, RequestStream]]:
        """Forget and return all requests. Other replicas will go on with them."""
        return [(request, self._streams.pop(request.request_id)) for request in self.output_processor.release()]

    def take_over(self, request: RequestState, stream: RequestStream) -> None:
        """Go on with a request that another replica has released."""
        self._end_idle_time()
        self.output_processor.take_over(request)
        stream.move(self._on_leave)
        self._streams[request.request_id] = stream
        self._resume(request)

    def _resume(self, request: RequestState) -> None:
        """Let the engine go on with a request of another engine. A suspect waits for the suspect before it."""
        if request.is_suspect:
            if self._suspect is not None:
                self._held.append(request)
                return
            self._suspect = request.request_id
        messages = self.output_processor.send_again(request)
        adapter = request.processed.adapter
        is_old = adapter is not None and (adapter.path, adapter.digest) not in self._adapters
        with suppress(EngineDeadError):
            if adapter is not None and is_old:
                self.client.send(_known(adapter.path, adapter.digest))
            self._send_request(request.request_id, messages)
            if adapter is not None and is_old:  # only this request names it
                self.client.send(UnloadAdapter(adapter.digest, adapter.path))

    def _end_idle_time(self) -> None:
        """End a time without requests, because a request comes. The engine need not have done steps in this time."""
        if self.num_unfinished == 0:
            self._supervisor.watch.on_step(self._clock())

    def _send_request(self, request_id: str, messages: Sequence[AddRequest]) -> None:
        """Send all or the remaining continuations. Raises EngineDeadError."""
        self.client.send(joined(messages))
        num_tokens = len(messages[0].prompt_token_ids) + sum(len(message.output_token_ids) for message in messages)
        self.admission.on_sent(request_id, num_tokens, len(messages))

    def _clear(self, request_id: str) -> None:
        """Note that a request has a token of this engine, or has ended. The next suspect may come."""
        if request_id == self._suspect:
            self._suspect = None
            if self._held:
                self._resume(self._held.popleft())

    def abort(self, request_id: str) -> None:
        """End a request. Its stream ends without a further output. An unknown id is ignored."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.close()

    def _on_leave(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._held = deque(request for request in self._held if request.request_id != request_id)
        self.admission.on_left(request_id)
        self._send_abort(self.output_processor.abort([request_id]))
        self._clear(request_id)

    def _send_abort(self, engine_ids: list[str]) -> None:
        if engine_ids:
            self._send(Abort(engine_ids))

    def _send(self, message: EngineInput) -> None:
        """Send a message that a dead engine does not need. `receive` reports the death."""
        if self.error is None:
            with suppress(EngineDeadError):
                self.client.send(message)

    def set_limits(self, limits: SetLimits) -> None:
        """Move limits of this engine and of later ones. An engine that starts gets them when it is ready."""
        given = {name: getattr(limits, name) for name in limits.__struct_fields__}
        self._moved_limits |= {name: value for name, value in given.items() if value is not None}
        self.admission.on_limits(limits)
        self._take_targets()
        if self.is_ready:
            self._send(limits)

    def _take_targets(self) -> None:
        targets = self.admission.targets
        self.output_processor.targets = targets
        self.output_processor.metrics.on_targets(targets)

    async def read_adapter(self, path: str, *, is_awaited: bool = False) -> AdapterFacts:
        """Let the engine read an adapter and keep it. Raises AdapterError, EngineDeadError.

        Args:
            is_awaited: a request waits for it.
        """
        operation = next(self._operations)
        reading: asyncio.Future[AdapterFacts] = asyncio.get_running_loop().create_future()
        self._reading[operation] = reading
        try:
            self.client.send(LoadAdapter(operation, path, is_awaited=is_awaited))
            return await reading
        except asyncio.CancelledError:
            if reading.done() and not reading.cancelled() and reading.exception() is None:
                self.unregister_adapter(path, reading.result().digest)  # it was read at the same moment
            raise
        finally:
            self._reading.pop(operation, None)

    def register_adapter(self, path: str, digest: str) -> None:
        """Let requests name an adapter that another replica has read. This engine and later ones will read it too."""
        self._adapters.append((path, digest))
        if self.is_ready:
            self._send(_known(path, digest))

    def unregister_adapter(self, path: str, digest: str) -> None:
        """Take back one registration."""
        self._adapters.remove((path, digest))
        if self.is_ready:
            self._send(UnloadAdapter(digest, path))

    def _on_adapter(self, state: AdapterState) -> None:
        """Take the answer about an adapter: it was read, or it could not be read."""
        self.output_processor.metrics.on_adapter_read(state)
        if state.operation is None:
            return
        reading = self._reading.get(state.operation)
        if reading is None or reading.done():  # the caller has gone
            if state.facts is not None:
                self._send(UnloadAdapter(state.facts.digest, state.path))
        elif state.facts is None:
            reading.set_exception(error_of(state.error_code, state.error or ""))
        else:
            self._adapters.append((state.path, state.facts.digest))
            reading.set_result(state.facts)

    def _lose_readings(self, error: QuireError) -> None:
        for reading in self._reading.values():
            if not reading.done():
                reading.set_exception(error)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompts that no running request uses. A new engine has none."""
        if self.is_ready:
            self._send(Command("reset_prefix_cache"))

    async def _supervise(self) -> None:
        try:
            await self._supervisor.run()
        except Exception as error:  # no request can be served without this task, so all must end
            logger.exception("receiving from the engine failed")
            self.on_gone(EngineDeadError(f"Receiving from the engine failed ({type(error).__name__})"))

    def on_message(self, message: EngineMessage) -> None:
        """For the supervisor: a message of the present engine."""
        match message:
            case EngineOutputs():
                self._handle_outputs(message)
            case EngineBegun():
                self.output_processor.note_begun(message.request_ids)
            case AdapterState():
                self._on_adapter(message)
            case EngineProgress():
                self.progress = message
                self._on_progress()
            case EngineReady():
                if self.is_restarting and self.facts is not None:
                    self._restore(message, self.facts)
                self.facts, self.is_ready, self.progress, self.failure = message, True, None, None
                self.output_processor.metrics.on_ready(message)
                self.admission.on_ready(message)
                self._take_targets()
                self._on_change()

    def _restore(self, ready: EngineReady, before: EngineReady) -> None:
        """Give a new engine the state of the last one: moved limits, adapters and requests."""
        moved = self._moved_limits
        ready.resolved |= {name: before.resolved[name] for name in moved if name in before.resolved}
        ready.max_num_seqs = moved.get("max_num_seqs", ready.max_num_seqs)
        ready.max_num_batched_tokens = moved.get("max_num_batched_tokens", ready.max_num_batched_tokens)
        if moved:
            self.client.send(SetLimits(**moved))
        for path, digest in self._adapters:
            self.client.send(_known(path, digest))
        for request in self.output_processor.requests:
            self._resume(request)
        logger.info("the engine is ready again; %d requests go on", self.num_unfinished)

    def on_lost(self, reason: FailureReason, why: str) -> None:
        """For the supervisor: the engine is gone with its results, and the next one starts.

        Requests go on at other replicas or wait for it. Those that may be the reason of the failure end now.
        """
        was_ready, self.is_ready, self.failure = self.is_ready, False, why
        self._lose_readings(EngineRestartedError("The engine failed while it read the adapter", fix="Load it again"))
        self.progress = EngineProgress("restart", 0.0, "the engine has failed", engine_index=self.index)
        if was_ready:
            self._lose_engine()
        self.output_processor.metrics.on_restart(reason)
        self._on_change()

    def _lose_engine(self) -> None:
        self.admission.on_idle()
        self._suspect = None
        self._held.clear()
        for request_id in self.output_processor.lose_engine():
            self._streams.pop(request_id).fail(
                EngineRestartedError(
                    "Several engines failed while they computed this request, and it may be the reason",
                    fix="See the server's log before you send it again",
                )
            )

    def on_gone(self, error: QuireError) -> None:
        """For the supervisor: no engine is left. Streams that others cannot take end with an error."""
        if self.is_ready:
            self.is_ready = False
            self._lose_engine()
        self._on_change()  # other replicas take what they can
        for _ in self._streams:
            self.output_processor.metrics.on_unsaved("gave_up")
        self._end(error, "error")
        self._on_change()

    def _handle_outputs(self, message: EngineOutputs) -> None:
        self._supervisor.watch.on_step(self._clock())
        if message.record is not None:
            self.records.append(message.record)
            self.admission.on_step(message.record)
            self.output_processor.metrics.on_step(message.record)
        result = self.output_processor.process(message.deltas)
        for request_id, seconds in result.first_tokens:
            self.admission.on_first_token(request_id, seconds)
            self._clear(request_id)
        self.admission.on_answers(result.num_ended)
        streams = self._streams
        for output in result.outputs:
            stream = streams.get(output.request_id)
            if stream is not None:
                if output.finished:
                    del streams[output.request_id]
                    self.admission.on_left(output.request_id)
                    self._clear(output.request_id)
                stream.put(output)
                if output.error is not None:
                    stream.fail(self._completed(result.errors[output.request_id]))
        self._send_abort(result.abort_ids)

    def _completed(self, error: QuireError) -> QuireError:
        """Add a time to retry to an engine's error. The engine knows only the length of its queue."""
        if isinstance(error, QueueFullError):
            error.retry_after_seconds = self.admission.retry_after_seconds
            self._count_refusal(error)
        return error

    def _end(self, error: QuireError, reason: FinishReason) -> None:
        if self.error is not None:
            return
        self.error, self.is_ready = error, False
        self._lose_readings(as_dead(error))
        streams, self._streams = self._streams, {}
        self.output_processor.abort(list(streams), reason)
        for stream in streams.values():
            stream.fail(as_dead(error))

    def close(self, error: QuireError, reason: FinishReason) -> None:
        """Tell the engine to stop, end every stream and free the connection. May be called again.

        Args:
            error: the error for readers.
            reason: the finish reason of their requests.
        """
        self._send(Command("shutdown"))
        self._end(error, reason)
        if self._task is not None:
            self._task.cancel()
        self.client.close()

    async def wait_closed(self) -> None:
        """Wait after `close` until receiving has stopped."""
        if self._task is not None:
            await asyncio.wait((self._task,))  # `await task` would raise the same error as our own cancellation


def _known(path: str, digest: str) -> LoadAdapter:
    """A message about an adapter that an engine has read before. No answer is expected."""
    return LoadAdapter(-1, path, digest)


def as_dead(error: QuireError) -> EngineDeadError:
    """A new exception for a request of an engine that is gone."""
    kind = ShuttingDownError if isinstance(error, ShuttingDownError) else EngineDeadError
    return kind(error.message)
