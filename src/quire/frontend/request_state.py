"""One request between the engine's deltas and its outputs: its continuations, and their text before it is handed on."""

from __future__ import annotations

from array import array
from typing import cast

import msgspec

from quire.frontend.input_processor import ProcessedRequest
from quire.frontend.logprobs import LogprobDecoder, PromptLogprobs
from quire.frontend.stats import FinishedRequest, Targets
from quire.frontend.text.pipeline import TextPipeline
from quire.frontend.timeline import Timelines
from quire.frontend.tokenizer import Tokenizer
from quire.messages import AddRequest, RequestDelta
from quire.outputs import (
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    SpecDecodeMetrics,
)
from quire.sampling_params import RequestOutputKind

# A request that loses this many engines ends with the last one. It may be the reason why they fail, and a replica that
# has failed RecoveryLimits.max_failures times is not started again.
MOST_LOSSES = 5


class Continuation:
    """One of the n continuations: its text pipeline, and its output before it is handed on."""

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
        "num_counted",
        "num_late",
        "num_preemptions",
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

    def __init__(self, request: RequestState, message: AddRequest, index: int, tokenizer: Tokenizer | None) -> None:
        params = request.processed.sampling_params
        self.request, self.request_id, self.index = request, message.request_id, index
        self.max_tokens = message.max_tokens
        self.timeline = request.timeline.continuations[index]
        self.is_cumulative = params.output_kind is not RequestOutputKind.DELTA
        self.num_counted = 0  # tokens that the metrics have counted
        self.num_late = 0  # counted tokens that missed their target
        self.num_cached_tokens = 0
        self.queued_seconds: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
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
        # Without stop strings, text that is needed only at the end is decoded at the end in one call.
        is_deferred = params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop
        self.deferred_ids: list[int] | None = [] if is_deferred else None
        has_logprobs = params.num_logprobs is not None
        self.logprob_decoder = LogprobDecoder(tokenizer) if has_logprobs else None
        self.cumulative_logprob: float | None = 0.0 if has_logprobs else None
        self.text = ""  # all text so far if cumulative, else the text that was not handed on yet
        self.token_ids = array("i")  # all so far: an engine that goes on with the request must know them
        self.logprobs: list[PositionLogprobs] = []  # all if cumulative, else those that were not handed on yet
        self.num_unsent_tokens = 0
        self.num_preemptions = 0  # how often the present engine preempted the request

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def message(self, first: AddRequest) -> AddRequest:
        """The message for a further engine, which goes on after the tokens here. `first`: the first message."""
        self.num_preemptions = 0
        return msgspec.structs.replace(first, output_token_ids=self.token_ids.tolist(), is_retry=True)

    def take_tokens(self, delta: RequestDelta) -> None:
        """Add a delta's tokens, up to the one that completes a stop string, their text and their logprobs."""
        token_ids = delta.token_ids
        self.finish_reason = cast("FinishReason | None", delta.finish_reason)
        self.stop_reason = delta.stop_reason
        if self.pipeline is not None:
            num_used = self._take_text(self.pipeline, token_ids)
            token_ids = token_ids[:num_used]
        self.token_ids.extend(token_ids)
        self.num_unsent_tokens += len(token_ids)
        if self.logprob_decoder is not None and delta.logprobs is not None:
            for entry in delta.logprobs[: len(token_ids)]:
                self.logprobs.append(self.logprob_decoder.position(entry))
                assert self.cumulative_logprob is not None
                self.cumulative_logprob += entry.logprobs[0]

    def _take_text(self, pipeline: TextPipeline, token_ids: list[int]) -> int:
        """Take the text of the tokens. Returns the number of tokens that count: all, or those up to a stop string."""
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
        """The output to hand on: everything so far, or only the new part."""
        num_unsent, self.num_unsent_tokens = self.num_unsent_tokens, 0
        result = CompletionOutput(
            self.index,
            self.text,
            (self.token_ids if self.is_cumulative else self.token_ids[len(self.token_ids) - num_unsent :]).tolist(),
            self.cumulative_logprob,
            None if self.logprob_decoder is None else self.logprobs.copy() if self.is_cumulative else self.logprobs,
            self.finish_reason,
            self.stop_reason,
            self.request.lora_request,
            spec_decode_metrics=self.request.metrics.spec_decode,
        )
        if not self.is_cumulative:
            self.text, self.logprobs = "", []
        return result

    def close_timeline(self, now: float) -> None:
        """Record the end in the timeline."""
        timeline = self.timeline
        timeline.finish_reason = self.finish_reason
        timeline.finished_seconds = now - self.request.metrics.arrival_time

    def summary(self, reason: FinishReason, now: float, targets: Targets) -> FinishedRequest:
        """The numbers of this continuation at its end."""
        processed, arrival = self.request.processed, self.request.metrics.arrival_time
        first, last, queued = self.first_token_time, self.last_token_time, self.queued_seconds
        has_met = None
        if first is not None and reason in ("stop", "length"):
            has_met = targets.are_met(first - arrival, self.num_late, self.num_counted)
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
            has_met_targets=has_met,
            longest_num_output_tokens=self.request.longest_num_output_tokens if self.request.num_running == 0 else None,
        )


class RequestState:
    """A prompt with its continuations."""

    __slots__ = (
        "continuations",
        "has_advanced",
        "is_begun",
        "is_sent",
        "is_suspect",
        "kind",
        "lora_request",
        "metrics",
        "num_cached_tokens",
        "num_losses",
        "num_running",
        "processed",
        "prompt_logprobs",
        "sent_after",
        "timeline",
        "tokenizer",
    )

    def __init__(
        self,
        processed: ProcessedRequest,
        tokenizer: Tokenizer | None,
        timelines: Timelines,
        now: float,
        drafts: SpecDecodeMetrics | None = None,
    ) -> None:
        self.processed, self.tokenizer = processed, tokenizer
        self.kind = processed.sampling_params.output_kind
        self.lora_request = None if processed.adapter is None else processed.adapter.as_request()
        self.metrics = RequestMetrics(arrival_time=processed.requests[0].arrival_time, spec_decode=drafts)
        self.timeline = timelines.open(
            processed.request_id, self.metrics, len(processed.prompt_token_ids), len(processed.requests), now
        )
        self.is_sent = True  # False: it waits for its next engine
        self.has_advanced = False  # whether its present engine has given a token of it
        self.is_begun = True  # whether its present engine computes it, as far as is known; the first one does not tell
        self.num_losses = 0  # engines that failed after they had begun it
        self.is_suspect = False  # may be the reason why they failed
        self.sent_after = 0.0  # seconds from the arrival until its present engine got it
        self.num_cached_tokens = 0
        self.prompt_logprobs: PromptLogprobs | None = None
        self.continuations = [
            Continuation(self, message, index, tokenizer) for index, message in enumerate(processed.requests)
        ]
        self.num_running = len(self.continuations)

    @property
    def request_id(self) -> str:
        return self.processed.request_id

    def lose_engine(self) -> bool:
        """Note that the engine has failed. Returns whether a further engine may go on with the request.

        A request that has lost several engines, and got no token from the last one, is a suspect: no other suspect is
        computed before it has its next token. If this costs one more engine, the request ends. An engine in whose queue
        it has only waited does not count, except for the first one, which does not say what it begins.
        """
        has_begun, self.is_sent, self.is_begun = self.is_sent and self.is_begun, False, False
        if not has_begun:
            return True
        self.num_losses += 1
        was_suspect, self.is_suspect = self.is_suspect, self.num_losses > 1 and not self.has_advanced
        return self.num_losses < MOST_LOSSES and not (was_suspect and self.is_suspect)

    def messages_again(self, now: float) -> list[AddRequest]:
        """The messages for a further engine, about the continuations that have not ended."""
        self.is_sent, self.is_begun, self.has_advanced = True, False, False
        self.sent_after = now - self.metrics.arrival_time
        both = zip(self.continuations, self.processed.requests, strict=True)
        return [child.message(first) for child, first in both if child.finish_reason is None]

    @property
    def longest_num_output_tokens(self) -> int:
        """Tokens of the longest continuation so far."""
        return max(child.num_tokens for child in self.continuations)

    def take_facts(self, child: Continuation, delta: RequestDelta) -> None:
        """Take a delta's facts about the prompt and the schedule."""
        self.metrics.num_preemptions += delta.num_preemptions - child.num_preemptions
        child.num_preemptions = child.timeline.num_preemptions = delta.num_preemptions
        if child.first_token_time is None:  # otherwise an earlier engine has sent its first token
            child.num_cached_tokens = child.timeline.num_cached_tokens = delta.num_cached_tokens
            if child.index == 0:
                self.num_cached_tokens = delta.num_cached_tokens
        if delta.drafts is not None and self.metrics.spec_decode is not None:
            self.metrics.spec_decode.add(*delta.drafts)
        if delta.queued_seconds is not None and child.queued_seconds is None:
            child.queued_seconds = self.sent_after + delta.queued_seconds
            if self.metrics.first_scheduled_time is None:
                self.metrics.first_scheduled_time = self.metrics.arrival_time + child.queued_seconds
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = PromptLogprobs(
                self.tokenizer, self.processed.prompt_token_ids, delta.prompt_logprobs
            )

    def take_output(self, child: Continuation) -> RequestOutput | None:
        """The output to hand on after a change of `child`; None: there is none yet."""
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
            self.prompt_logprobs = None  # they are handed on once
        return output

    def _output(self, continuations: list[Continuation], error: str | None = None) -> RequestOutput:
        processed = self.processed
        return RequestOutput(
            processed.request_id,
            processed.prompt,
            processed.prompt_token_ids,
            [child.output() for child in continuations],
            self.num_running == 0,
            self.prompt_logprobs,
            self.metrics,
            self.lora_request,
            self.num_cached_tokens,
            error,
        )

    def failed_output(self, error: str) -> RequestOutput:
        """The last output of a failed request: all its continuations, complete or not."""
        return self._output(self.continuations, error)
