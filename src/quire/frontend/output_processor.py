"""Turns the engine's deltas into RequestOutputs: text, stop strings, logprobs, n continuations of one request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from quire import errors
from quire.config import EngineConfig, max_draft
from quire.errors import QuireError
from quire.frontend.input_processor import ProcessedRequest
from quire.frontend.request_state import Continuation, RequestState
from quire.frontend.stats import EngineMetrics, NoMetrics, Targets
from quire.frontend.timeline import Timelines
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tracing import RequestTracer
from quire.logs import get_logger
from quire.messages import AddRequest, RequestDelta
from quire.outputs import FinishReason, RequestOutput, SpecDecodeMetrics

logger = get_logger(__name__)

_ERRORS = {kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, QuireError)}


def error_of(code: str | None, message: str) -> QuireError:
    """The exception for an error that crossed the process boundary as a code and a message."""
    return _ERRORS.get(code or "", QuireError)(message)


def draft_metrics(config: EngineConfig) -> Callable[[], SpecDecodeMetrics] | None:
    """A function that makes the counters of a request's drafts, if the setting asks for them; else None."""
    if config.per_request_spec_decode_metrics == "none":
        return None
    return partial(SpecDecodeMetrics, max_draft(config), config.per_request_spec_decode_metrics == "detailed")


@dataclass(slots=True)
class ProcessedOutputs:
    """The results of some deltas: outputs to hand on, engine requests to abort, and errors of failed requests."""

    outputs: list[RequestOutput] = field(default_factory=list)
    abort_ids: list[str] = field(default_factory=list)
    errors: dict[str, QuireError] = field(default_factory=dict)  # by request_id; the last output has the error too
    # Of requests with their first token from this engine: request_id, and seconds since the engine got the request.
    first_tokens: list[tuple[str, float]] = field(default_factory=list)
    num_ended: int = 0  # continuations


class OutputProcessor:
    """Follows every request from `add` to its last output.

    Args:
        tokenizer: None if outputs are only token ids.
        metrics: gets first tokens, tokens and ends.
        clock: monotonic seconds, the clock of the requests' arrival times.
        new_draft_metrics: makes what a request's drafts are counted in; None: they are not counted.
        tracer: gets each request at its end; the caller closes it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        metrics: EngineMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        new_draft_metrics: Callable[[], SpecDecodeMetrics] | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.metrics: EngineMetrics = NoMetrics() if metrics is None else metrics
        self.targets = Targets()  # the SLO targets, for the metrics
        self.timelines = Timelines()  # the timelines of recent requests
        self._clock = clock
        self._new_draft_metrics, self._tracer = new_draft_metrics, tracer
        self._requests: dict[str, RequestState] = {}
        self._continuations: dict[str, Continuation] = {}  # the key is the engine's request id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_unfinished(self) -> int:
        """The number of requests (not of continuations) without their last output."""
        return len(self._requests)

    @property
    def num_continuations(self) -> int:
        """The number of continuations that have not ended."""
        return len(self._continuations)

    def add(self, processed: ProcessedRequest) -> None:
        """Expect deltas for this request. Its id must not be in use."""
        assert processed.request_id not in self._requests, f"request id {processed.request_id} is in use"
        new_drafts = self._new_draft_metrics if len(processed.requests) == 1 else None
        drafts = None if new_drafts is None else new_drafts()
        request = RequestState(processed, self._tokenizer, self.timelines, self._clock(), drafts)
        self._requests[processed.request_id] = request
        self._continuations |= {child.request_id: child for child in request.continuations}
        self.metrics.on_request_arrived(processed)

    def process(self, deltas: Iterable[RequestDelta]) -> ProcessedOutputs:
        """Process the deltas of one step. Late deltas of forgotten requests are ignored."""
        result = ProcessedOutputs()
        now = self._clock()
        for delta in deltas:
            child = self._continuations.get(delta.request_id)
            if child is None:
                continue
            if delta.error is not None:
                self._end(child, "error", now)
                self._fail(child.request, error_of(delta.error_code, delta.error), now, result)
                continue
            try:
                self._update(child, delta, now, result)
            except Exception as error:  # a defect of ours that concerns one request: the others continue
                logger.exception("the output of request %s could not be processed", child.request.request_id)
                message = f"The output could not be processed ({type(error).__name__})"
                self._fail(child.request, QuireError(message, fix="The server's log has the details"), now, result)
        return result

    def abort(self, request_ids: Iterable[str], reason: FinishReason = "abort") -> list[str]:
        """Forget these requests. Returns the engine's request ids to abort. Unknown ids are ignored."""
        now = self._clock()
        engine_ids = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                engine_ids += self._end_all(request, reason, now)
        return engine_ids

    def lose_engine(self) -> list[str]:
        """The engine is gone. End and return the requests that may be the reason: see RequestState.lose_engine."""
        unsaved = [name for name, request in self._requests.items() if not request.lose_engine()]
        for _ in unsaved:
            self.metrics.on_unsaved("retried")
        self.abort(unsaved, "error")
        return unsaved

    def note_begun(self, engine_ids: Iterable[str]) -> None:
        """Note that the engine begins to compute these continuations of requests that other engines have lost."""
        for engine_id in engine_ids:
            if (child := self._continuations.get(engine_id)) is not None:
                child.request.is_begun = True

    def release(self) -> list[RequestState]:
        """Forget and return all requests, because other engines go on with them."""
        released = self.requests
        for request in released:
            del self._requests[request.request_id]
            running = [child for child in request.continuations if self._continuations.pop(child.request_id, None)]
            self.metrics.on_moved(-len(running))
        return released

    def take_over(self, request: RequestState) -> None:
        """Follow a request that was released. Its id must not be in use."""
        self._requests[request.request_id] = request
        running = {child.request_id: child for child in request.continuations if child.finish_reason is None}
        self._continuations |= running
        self.metrics.on_moved(len(running))

    @property
    def requests(self) -> list[RequestState]:
        """The requests without their last output, in the order in which they came here."""
        return list(self._requests.values())

    def send_again(self, request: RequestState) -> list[AddRequest]:
        """The messages for a further engine about a request. It goes on after the tokens that are known here."""
        self.metrics.on_retry()
        return request.messages_again(self._clock())

    def add_adapter_names(self, running: set[str], waiting: set[str]) -> None:
        """Add the names of the adapters of unfinished requests: of requests with a token, and of requests without."""
        for request in self._requests.values():
            if (adapter := request.processed.adapter) is not None:
                (waiting if request.metrics.first_token_time is None else running).add(adapter.name)

    def _update(self, child: Continuation, delta: RequestDelta, now: float, result: ProcessedOutputs) -> None:
        request = child.request
        request.take_facts(child, delta)
        if delta.token_ids:
            self._count_tokens(child, len(delta.token_ids), now)
            if not request.has_advanced:
                request.has_advanced = True
                seconds = now - request.metrics.arrival_time - request.sent_after
                result.first_tokens.append((request.request_id, seconds))
        child.take_tokens(delta)
        if child.finish_reason is not None:
            if delta.finish_reason is None:
                result.abort_ids.append(child.request_id)  # a stop string; the engine does not know it
            self._end(child, child.finish_reason, now)
            result.num_ended += 1
        output = request.take_output(child)
        if output is not None:
            result.outputs.append(output)

    def _count_tokens(self, child: Continuation, num_tokens: int, now: float) -> None:
        child.num_counted += num_tokens
        metrics = child.request.metrics
        child.timeline.chunks.add(now - metrics.arrival_time, num_tokens)
        if child.first_token_time is None:
            child.first_token_time = now
            num_prompt_tokens = num_cached_tokens = 0
            if metrics.first_token_time is None:
                metrics.first_token_time = now
                num_prompt_tokens = len(child.request.processed.prompt_token_ids)
                num_cached_tokens = child.request.num_cached_tokens
            self.metrics.on_first_token(now - metrics.arrival_time, num_tokens, num_prompt_tokens, num_cached_tokens)
        else:
            assert child.last_token_time is not None
            seconds = now - child.last_token_time
            child.num_late += 0 < self.targets.itl < seconds
            self.metrics.on_tokens(num_tokens, seconds)
        child.last_token_time = metrics.last_token_time = now

    def _fail(self, request: RequestState, error: QuireError, now: float, result: ProcessedOutputs) -> None:
        """An error of one continuation ends the whole request."""
        result.abort_ids += self._end_all(request, "error", now)
        result.errors[request.request_id] = error
        result.outputs.append(request.failed_output(error.message))

    def _end_all(self, request: RequestState, reason: FinishReason, now: float) -> list[str]:
        """End the running continuations. Returns their engine ids."""
        running = [child for child in request.continuations if child.request_id in self._continuations]
        for child in running:
            self._end(child, reason, now)
        return [child.request_id for child in running]

    def _end(self, child: Continuation, reason: FinishReason, now: float) -> None:
        del self._continuations[child.request_id]
        child.finish_reason = reason
        request = child.request
        child.close_timeline(now)
        request.num_running -= 1
        if request.num_running == 0:
            request.metrics.finished_time = now
            del self._requests[request.request_id]
            if self._tracer is not None:
                self._tracer.on_ended(request)
        self.metrics.on_finished(child.summary(reason, now, self.targets))
