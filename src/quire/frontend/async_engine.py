"""AsyncEngine: the front end as a server uses it. One task receives from the engine; every request has a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Unpack

from quire.errors import (
    EngineDeadError,
    EngineRestartedError,
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
    QuireError,
    ShuttingDownError,
)
from quire.frontend.admission import Admission
from quire.frontend.client import EngineClient
from quire.frontend.input_processor import InputProcessor, ProcessedRequest, RequestOptions
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.prompts import PromptType
from quire.frontend.stats import FailureReason
from quire.frontend.stream import RequestStream
from quire.frontend.supervisor import EngineStarter, RecoveryLimits, Supervisor
from quire.logs import get_logger
from quire.messages import (
    Abort,
    Command,
    EngineMessage,
    EngineOutputs,
    EngineProgress,
    EngineReady,
    SetLimits,
)
from quire.outputs import FinishReason, RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.schedule import StepRecord

logger = get_logger(__name__)

INLINE_PROMPT_CHARS = 4096  # about 1 ms of tokenization; longer texts are tokenized in a thread


class AsyncEngine:
    """Requests in, streams of outputs out, over one engine at a time.

    Args:
        client: the connection to the engine; owned from now on.
        input_processor: replaced by one with the engine's context length once that is known.
        output_processor: owned from now on; its metrics also hear of every step.
        starter: starts another engine after one that served has failed; None: there is no other.
        recovery: when an engine counts as failed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        client: EngineClient,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        *,
        starter: EngineStarter | None = None,
        recovery: RecoveryLimits = RecoveryLimits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.input_processor = input_processor
        self.output_processor = output_processor
        self.ready: EngineReady | None = None
        self.progress: EngineProgress | None = None  # of the start or the start after a failure, until ready
        self.on_progress: Callable[[EngineProgress], None] | None = None  # hears every report of a start
        self.error: QuireError | None = None  # why the engine is gone
        self.last_record: StepRecord | None = None  # of the engine's last step
        self.admission = Admission()
        self._clock = clock
        self._streams: dict[str, RequestStream] = {}
        self._supervisor = Supervisor(self, client, starter, recovery, clock)
        self._lost_ready: EngineReady | None = None  # of the engine that failed, until the next is ready
        self._moved_limits: dict[str, int] = {}  # since the start of the first engine
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # ready or dead

    def start(self) -> None:
        """Begin to receive. Needs a running event loop; once."""
        assert self._task is None, "started twice"
        self._task = asyncio.get_running_loop().create_task(self._supervise(), name="engine outputs")

    @property
    def client(self) -> EngineClient:
        """The connection to the engine of the moment."""
        return self._supervisor.client

    async def wait_ready(self, timeout: float | None = None) -> EngineReady:
        """Wait until the engine has produced a token.

        Raises:
            QuireError: why it could not start. NotReadyError: not within `timeout` seconds.
        """
        try:
            await asyncio.wait_for(self._settled.wait(), timeout)
        except TimeoutError:
            raise NotReadyError(f"The engine was not ready within {timeout:g} seconds", fix="See its log") from None
        if self.error is not None:
            raise self.error
        assert self.ready is not None
        return self.ready

    @property
    def is_ready(self) -> bool:
        """A real token has been produced, and the engine lives."""
        return self.ready is not None and self.error is None

    @property
    def is_healthy(self) -> bool:
        """Ready, gives signs of life, and a step has ended in time if there is work."""
        verdict = self._supervisor.watch.verdict(self._clock(), has_work=self.num_unfinished > 0)
        return self.is_ready and self.client.is_alive and verdict is None

    @property
    def is_restarting(self) -> bool:
        """An engine has failed, and the next is not ready yet."""
        return self._lost_ready is not None and self.error is None

    @property
    def num_unfinished(self) -> int:
        """Requests without their last output."""
        return self.output_processor.num_unfinished

    async def add_request(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> RequestStream:
        """Check, tokenize and send one request. Whoever gets the stream must iterate it to its end or close it.

        Raises:
            InvalidRequestError, ContextLengthError: the request is refused. QueueFullError: the engine's queue is full.
            NotReadyError, EngineDeadError: as it says.
        """
        self.check_running()
        self.check_room()
        arrival_time = self._clock()

        def process() -> ProcessedRequest:
            return self.input_processor.process(
                request_id, prompt, sampling_params, arrival_time=arrival_time, **options
            )

        spells = isinstance(sampling_params, SamplingParams) and bool(sampling_params.bad_words)
        processed = await asyncio.to_thread(process) if spells or _is_long(prompt) else process()
        self.check_running()
        if request_id in self.output_processor:
            raise InvalidRequestError(
                "The request id is in use", value=request_id, fix="Use another id", param="request_id"
            )
        if self.num_unfinished == 0:
            self._supervisor.watch.on_step(self._clock())
        self.output_processor.add(processed)
        is_delta = processed.sampling_params.output_kind is RequestOutputKind.DELTA
        stream = RequestStream(request_id, is_delta=is_delta, on_leave=self._on_leave)
        self._streams[request_id] = stream
        with suppress(EngineDeadError):  # what is received last says so too: then it is sent to the next engine
            for message in processed.requests:
                self.client.send(message)
            self.admission.on_sent(len(processed.requests))
        return stream

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """`add_request` and its stream as one generator: errors come at its first step, leaving it aborts."""
        stream = await self.add_request(prompt, sampling_params, request_id, **options)
        async with stream:
            async for output in stream:
                yield output

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests. Their readers' streams end without a further output; unknown ids are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.close()

    def _on_leave(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._send_abort(self.output_processor.abort([request_id]))

    def _send_abort(self, engine_ids: list[str]) -> None:
        if engine_ids and self.error is None:
            with suppress(EngineDeadError):  # then there is nothing left to abort; `receive` reports the death
                self.client.send(Abort(engine_ids))

    def set_limits(self, limits: SetLimits) -> None:
        """Move limits of the running engine. Raises NotReadyError, EngineDeadError."""
        self.check_running()
        self.client.send(limits)
        given = {name: getattr(limits, name) for name in limits.__struct_fields__}
        self._moved_limits |= {name: value for name, value in given.items() if value is not None}
        if limits.max_num_queued_reqs is not None:
            self.admission.max_num_queued_reqs = limits.max_num_queued_reqs

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompts that no running request uses. Raises NotReadyError, EngineDeadError."""
        self.check_running()
        self.client.send(Command("reset_prefix_cache"))

    def check_running(self) -> None:
        """Raise NotReadyError before the engine is ready, EngineDeadError (ShuttingDownError) after its end."""
        if self.error is not None:
            raise _as_dead(self.error) from self.error
        if self.ready is None:
            again = " again, after a failure" if self.is_restarting else ""
            phase = f" ({self.progress.phase}, {self.progress.fraction:.0%})" if self.progress is not None else ""
            raise NotReadyError(f"The engine is starting{again}{phase}", fix="Retry in a few seconds")

    def check_room(self) -> None:
        """Refuse at the door, before a request costs anything. Raises QueueFullError."""
        if self.num_unfinished == 0:
            self.admission.on_idle()
        try:
            self.admission.check()
        except QueueFullError:
            self.output_processor.metrics.on_rejected("queue_full")
            raise

    async def _supervise(self) -> None:
        try:
            await self._supervisor.run()
        except Exception as error:  # nobody can be served without this task: everybody must hear of it
            logger.exception("receiving from the engine failed")
            self.on_gone(EngineDeadError(f"Receiving from the engine failed ({type(error).__name__})"))

    def on_message(self, message: EngineMessage) -> None:
        """For the supervisor: the engine of the moment says something."""
        match message:
            case EngineOutputs():
                self._handle_outputs(message)
            case EngineProgress():
                self.progress = message
                if self.on_progress is not None:
                    self.on_progress(message)
            case EngineReady():
                if self._lost_ready is not None:
                    self._restore(message, self._lost_ready)
                self.ready, self.progress, self._lost_ready = message, None, None
                self.output_processor.metrics.on_ready(message)
                self.admission.on_ready(message)
                self.input_processor = self.input_processor.with_max_model_len(message.max_model_len)
                self._settled.set()

    def _restore(self, ready: EngineReady, before: EngineReady) -> None:
        """Bring a new engine to where the last one was: moved limits, and the requests that it can still answer."""
        moved = self._moved_limits
        ready.resolved |= {name: before.resolved[name] for name in moved if name in before.resolved}
        ready.max_num_seqs = moved.get("max_num_seqs", ready.max_num_seqs)
        ready.max_num_batched_tokens = moved.get("max_num_batched_tokens", ready.max_num_batched_tokens)
        if moved:
            self.client.send(SetLimits(**moved))
        for message in self.output_processor.send_again():
            self.client.send(message)
        logger.info("the engine is ready again; %d requests are sent to it again", self.num_unfinished)

    def on_lost(self, reason: FailureReason) -> None:
        """For the supervisor: the engine is gone with what it had computed, and the next one is on its way.

        Requests of which nothing was handed on wait for it, once; the others end now.
        """
        if self.ready is not None:
            self._lost_ready, self.ready = self.ready, None
            self._settled.clear()
            self.admission.on_idle()
            for request_id in self.output_processor.lose_engine():
                self._streams.pop(request_id).fail(
                    EngineRestartedError("The engine failed, and this request could not be saved", fix="Send it again")
                )
        self.progress = EngineProgress("restart", 0.0, "the engine has failed")
        self.output_processor.metrics.on_restart(reason)

    def _handle_outputs(self, message: EngineOutputs) -> None:
        self._supervisor.watch.on_step(self._clock())
        if message.record is not None:
            self.last_record = message.record
            self.admission.on_step(message.record)
            self.output_processor.metrics.on_step(message.record)
        result = self.output_processor.process(message.deltas)
        streams = self._streams
        for output in result.outputs:
            stream = streams.get(output.request_id)
            if stream is not None:
                if output.finished:
                    del streams[output.request_id]
                    self._count_service(output)
                stream.put(output)
                if output.error is not None:
                    stream.fail(self._completed(result.errors[output.request_id]))
        self._send_abort(result.abort_ids)

    def _count_service(self, output: RequestOutput) -> None:
        metrics = output.metrics
        if metrics is not None and metrics.finished_time is not None and metrics.first_scheduled_time is not None:
            self.admission.on_finished(metrics.finished_time - metrics.first_scheduled_time)

    def _completed(self, error: QuireError) -> QuireError:
        """The engine knows only its queue's length; when to come again is known here."""
        if isinstance(error, QueueFullError):
            error.retry_after_seconds = self.admission.retry_after_seconds
            self.output_processor.metrics.on_rejected("queue_full")
        return error

    def on_gone(self, error: QuireError) -> None:
        """For the supervisor: there is no engine any more. All streams end with an error; no request is taken."""
        for _ in self._streams:
            self.output_processor.metrics.on_unsaved("gave_up")
        self._end(error, "error")

    def _end(self, error: QuireError, reason: FinishReason) -> None:
        if self.error is not None:
            return
        self.error = error
        streams, self._streams = self._streams, {}
        self.output_processor.abort(list(streams), reason)
        for stream in streams.values():
            stream.fail(_as_dead(error))
        self._settled.set()

    def close(self) -> None:
        """Tell the engine to stop, end every stream and free the connection. May be called again."""
        if self.error is None:
            with suppress(EngineDeadError):  # already gone is what was asked for
                self.client.send(Command("shutdown"))
        self._end(ShuttingDownError("The server is shutting down", fix="Ask another server"), "abort")
        if self._task is not None:
            self._task.cancel()
        self.client.close()

    async def shutdown(self) -> None:
        """`close`, and wait until nothing is received any more."""
        self.close()
        if self._task is not None:
            await asyncio.wait((self._task,))  # awaiting the task itself could not be told from being cancelled


def _as_dead(error: QuireError) -> EngineDeadError:
    """What a request is told of an engine that is gone: an exception of its own."""
    kind = ShuttingDownError if isinstance(error, ShuttingDownError) else EngineDeadError
    return kind(error.message)


def _is_long(prompt: PromptType) -> bool:
    """Of text, or of token ids, each of which is checked."""
    given = (prompt.get("prompt_token_ids") or prompt.get("prompt")) if isinstance(prompt, dict) else prompt
    return isinstance(given, (str, list, tuple)) and len(given) > INLINE_PROMPT_CHARS
