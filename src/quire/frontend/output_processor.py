"""From the engine's deltas to RequestOutputs: text, stop strings, logprobs, and n continuations as one request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

from quire import errors
from quire.errors import QuireError
from quire.frontend.input_processor import ProcessedRequest
from quire.frontend.logprobs import LogprobDecoder, prompt_logprobs
from quire.frontend.stats import EngineMetrics, FinishedRequest, NoMetrics
from quire.frontend.text.pipeline import TextPipeline
from quire.frontend.timeline import Timelines
from quire.frontend.tokenizer import Tokenizer
from quire.logs import get_logger
from quire.messages import AddRequest, RequestDelta
from quire.outputs import CompletionOutput, FinishReason, PositionLogprobs, RequestMetrics, RequestOutput
from quire.sampling_params import RequestOutputKind

logger = get_logger(__name__)

_ERRORS = {kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, QuireError)}


def error_of(code: str | None, message: str) -> QuireError:
    """The exception for an error that crossed the process boundary as a code and a message."""
    return _ERRORS.get(code or "", QuireError)(message)


@dataclass(slots=True)
class ProcessedOutputs:
    """What some deltas meant: outputs to hand on, engine requests to abort, and the errors of requests that failed."""

    outputs: list[RequestOutput] = field(default_factory=list)
    abort_ids: list[str] = field(default_factory=list)
    errors: dict[str, QuireError] = field(default_factory=dict)  # by request_id; its last output says so too


class OutputProcessor:
    """Follows every request from `add` to its last output.

    Args:
        tokenizer: None if outputs are token ids only.
        metrics: told about first tokens, tokens and ends.
        clock: monotonic seconds; the same as the requests' arrival times.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        metrics: EngineMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self.metrics: EngineMetrics = NoMetrics() if metrics is None else metrics
        self.timelines = Timelines()  # of recent requests
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._continuations: dict[str, _Continuation] = {}  # by the engine's request id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_unfinished(self) -> int:
        """Requests (not continuations) without their last output."""
        return len(self._requests)

    def add(self, processed: ProcessedRequest) -> None:
        """Expect deltas for this request. Its id must not be in use."""
        assert processed.request_id not in self._requests, f"request id {processed.request_id} is in use"
        request = _Request(processed, self._tokenizer, self.timelines, self._clock())
        self._requests[processed.request_id] = request
        self._continuations |= {child.request_id: child for child in request.continuations}
        self.metrics.on_request_arrived(processed)

    def process(self, deltas: Iterable[RequestDelta]) -> ProcessedOutputs:
        """Take in the deltas of one step. Deltas of requests that are not known any more are late, and ignored."""
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
            except Exception as error:  # ours, and of one request: the others go on
                logger.exception("the output of request %s could not be processed", child.request.request_id)
                message = f"The output could not be processed ({type(error).__name__})"
                self._fail(child.request, QuireError(message, fix="The server's log has the details"), now, result)
        return result

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Forget these requests. Returns the engine's request ids to abort; unknown ids are ignored."""
        now = self._clock()
        engine_ids = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                engine_ids += self._end_all(request, "abort", now)
        return engine_ids

    def _update(self, child: _Continuation, delta: RequestDelta, now: float, result: ProcessedOutputs) -> None:
        request = child.request
        request.take_facts(child, delta)
        self._count_tokens(child, len(delta.token_ids), now)
        child.take_tokens(delta)
        if child.finish_reason is not None:
            if delta.finish_reason is None:
                result.abort_ids.append(child.request_id)  # a stop string, which the engine does not know of
            self._end(child, child.finish_reason, now)
        output = request.take_output(child)
        if output is not None:
            result.outputs.append(output)

    def _count_tokens(self, child: _Continuation, num_tokens: int, now: float) -> None:
        if num_tokens == 0:
            return
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
            self.metrics.on_tokens(num_tokens, now - child.last_token_time)
        child.last_token_time = metrics.last_token_time = now

    def _fail(self, request: _Request, error: QuireError, now: float, result: ProcessedOutputs) -> None:
        """An error of one continuation ends the request with all of them."""
        result.abort_ids += self._end_all(request, "error", now)
        result.errors[request.request_id] = error
        result.outputs.append(request.failed_output(error.message))

    def _end_all(self, request: _Request, reason: FinishReason, now: float) -> list[str]:
        """End what still runs. Returns the engine's ids of it."""
        running = [child for child in request.continuations if child.request_id in self._continuations]
        for child in running:
            self._end(child, reason, now)
        return [child.request_id for child in running]

    def _end(self, child: _Continuation, reason: FinishReason, now: float) -> None:
        del self._continuations[child.request_id]
        child.finish_reason = reason
        request = child.request
        child.close_timeline(now)
        request.num_running -= 1
        if request.num_running == 0:
            request.metrics.finished_time = now
            del self._requests[request.request_id]
        self.metrics.on_finished(child.summary(reason, now))


class _Continuation:
    """One of the n continuations: its text pipeline and what is not handed on yet."""

    __slots__ = (
        "cumulative_logprob",
        "deferred_ids",
        "finish_reason",
        "first_token_time",
        "index",
        "is_cumulative",
        "last_token_time",
        "logprob_decoder",
        "logprobs",
        "max_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "num_tokens",
        "num_unsent_tokens",
        "pipeline",
        "queued_seconds",
        "request",
        "request_id",
        "stop_reason",
        "text",
        "timeline",
        "token_ids",
    )

    def __init__(self, request: _Request, message: AddRequest, index: int, tokenizer: Tokenizer | None) -> None:
        params = request.processed.sampling_params
        self.request, self.request_id, self.index = request, message.request_id, index
        self.max_tokens = message.max_tokens
        self.timeline = request.timeline.continuations[index]
        self.is_cumulative = params.output_kind is not RequestOutputKind.DELTA
        self.pipeline: TextPipeline | None = None
        if params.detokenize and tokenizer is not None:
            detokenizer = tokenizer.new_detokenizer(
                message.prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
            )
            self.pipeline = TextPipeline(
                detokenizer,
                params.stop or (),
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        # Without stop strings, text that is only wanted at the end is decoded at the end, in one go.
        is_deferred = params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop
        self.deferred_ids: list[int] | None = [] if is_deferred else None
        has_logprobs = params.num_logprobs is not None
        self.logprob_decoder = LogprobDecoder(tokenizer) if has_logprobs else None
        self.cumulative_logprob: float | None = 0.0 if has_logprobs else None
        self.text = ""  # of everything so far if cumulative, else of what is not handed on
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.num_tokens = self.num_unsent_tokens = 0
        self.num_cached_tokens = self.num_preemptions = 0
        self.queued_seconds: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def take_tokens(self, delta: RequestDelta) -> None:
        """Add a delta's tokens, up to the one that completes a stop string, their text and their logprobs."""
        token_ids = delta.token_ids
        self.finish_reason = cast("FinishReason | None", delta.finish_reason)
        self.stop_reason = delta.stop_reason
        if self.pipeline is not None:
            num_used = self._take_text(self.pipeline, token_ids)
            token_ids = token_ids[:num_used]
        self.token_ids += token_ids
        self.num_tokens += len(token_ids)
        self.num_unsent_tokens += len(token_ids)
        if self.logprob_decoder is not None and delta.logprobs is not None:
            for entry in delta.logprobs[: len(token_ids)]:
                self.logprobs.append(self.logprob_decoder.position(entry))
                assert self.cumulative_logprob is not None
                self.cumulative_logprob += entry.logprobs[0]

    def _take_text(self, pipeline: TextPipeline, token_ids: list[int]) -> int:
        """Returns how many of the tokens count: all, or those up to a stop string."""
        params = self.request.processed.sampling_params
        ends_with_token = self.finish_reason == "stop" and not params.include_stop_str_in_output
        text_ids = token_ids[:-1] if ends_with_token else token_ids  # the text of EOS or a stop token is left out
        if self.deferred_ids is not None:
            self.deferred_ids += text_ids
            if self.finish_reason is None:
                return len(token_ids)
            text_ids, self.deferred_ids = self.deferred_ids, []
        text, num_used, stop = pipeline.push(text_ids)
        self.text += text
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
            return num_used
        if self.finish_reason is not None:
            self.text += pipeline.finish()
        return len(token_ids)

    def output(self) -> CompletionOutput:
        """What is to be handed on: everything so far, or only what is new."""
        result = CompletionOutput(
            self.index,
            self.text,
            self.token_ids.copy() if self.is_cumulative else self.token_ids,
            self.cumulative_logprob,
            None if self.logprob_decoder is None else self.logprobs.copy() if self.is_cumulative else self.logprobs,
            self.finish_reason,
            self.stop_reason,
        )
        self.num_unsent_tokens = 0
        if not self.is_cumulative:
            self.text, self.token_ids, self.logprobs = "", [], []
        return result

    def close_timeline(self, now: float) -> None:
        """The facts of the end."""
        timeline = self.timeline
        timeline.finish_reason = self.finish_reason
        timeline.finished_seconds = now - self.request.metrics.arrival_time

    def summary(self, reason: FinishReason, now: float) -> FinishedRequest:
        """The numbers of this continuation at its end."""
        processed, arrival = self.request.processed, self.request.metrics.arrival_time
        first, last, queued = self.first_token_time, self.last_token_time, self.queued_seconds
        return FinishedRequest(
            finish_reason=reason,
            num_prompt_tokens=len(processed.prompt_token_ids),
            num_output_tokens=self.num_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            max_tokens=self.max_tokens,
            max_tokens_param=processed.sampling_params.max_tokens,
            n=processed.sampling_params.n,
            e2e_seconds=now - arrival,
            queued_seconds=queued,
            prefill_seconds=None if first is None or queued is None else max(first - arrival - queued, 0.0),
            decode_seconds=None if first is None or last is None else last - first,
            longest_num_output_tokens=self.request.longest_num_output_tokens if self.request.num_running == 0 else None,
        )


class _Request:
    """A prompt with its continuations."""

    __slots__ = (
        "continuations",
        "kind",
        "metrics",
        "num_cached_tokens",
        "num_running",
        "processed",
        "prompt_logprobs",
        "timeline",
        "tokenizer",
    )

    def __init__(
        self, processed: ProcessedRequest, tokenizer: Tokenizer | None, timelines: Timelines, now: float
    ) -> None:
        self.processed, self.tokenizer = processed, tokenizer
        self.kind = processed.sampling_params.output_kind
        self.metrics = RequestMetrics(arrival_time=processed.requests[0].arrival_time)
        self.timeline = timelines.open(
            processed.request_id, self.metrics, len(processed.prompt_token_ids), len(processed.requests), now
        )
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.continuations = [
            _Continuation(self, message, index, tokenizer) for index, message in enumerate(processed.requests)
        ]
        self.num_running = len(self.continuations)

    @property
    def request_id(self) -> str:
        return self.processed.request_id

    @property
    def longest_num_output_tokens(self) -> int:
        """Tokens of the longest continuation so far."""
        return max(child.num_tokens for child in self.continuations)

    def take_facts(self, child: _Continuation, delta: RequestDelta) -> None:
        """What a delta says about the prompt and the schedule."""
        self.metrics.num_preemptions += delta.num_preemptions - child.num_preemptions
        child.num_preemptions = child.timeline.num_preemptions = delta.num_preemptions
        child.num_cached_tokens = child.timeline.num_cached_tokens = delta.num_cached_tokens
        if child.index == 0:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.queued_seconds is not None:
            child.queued_seconds = delta.queued_seconds
            if self.metrics.first_scheduled_time is None:
                self.metrics.first_scheduled_time = self.metrics.arrival_time + delta.queued_seconds
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = prompt_logprobs(
                self.tokenizer, self.processed.prompt_token_ids, delta.prompt_logprobs
            )

    def take_output(self, child: _Continuation) -> RequestOutput | None:
        """The output to hand on after `child` changed, if it is time for one."""
        if self.kind is RequestOutputKind.FINAL_ONLY:
            return self._output(self.continuations) if self.num_running == 0 else None
        if child.finish_reason is None:
            if child.num_unsent_tokens == 0:
                return None
            interval = self.processed.sampling_params.stream_interval or 1
            is_first = child.num_unsent_tokens == child.num_tokens
            if child.num_unsent_tokens < interval and not is_first:
                return None
        output = self._output([child])
        if self.kind is RequestOutputKind.DELTA:
            self.prompt_logprobs = None  # handed on, once
        return output

    def _output(self, continuations: list[_Continuation], error: str | None = None) -> RequestOutput:
        processed = self.processed
        return RequestOutput(
            processed.request_id,
            processed.prompt,
            processed.prompt_token_ids,
            [child.output() for child in continuations],
            self.num_running == 0,
            self.prompt_logprobs,
            self.metrics,
            None,
            self.num_cached_tokens,
            error,
        )

    def failed_output(self, error: str) -> RequestOutput:
        """The last output of a request that failed: all continuations as far as they came."""
        return self._output(self.continuations, error)
