"""What the front end counts, and the hooks that a metrics registry implements to hear of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from quire.messages import EngineReady
from quire.outputs import FinishReason
from quire.schedule import StepRecord

if TYPE_CHECKING:
    from quire.frontend.input_processor import ProcessedRequest

# Why a request that is well-formed was not taken: a closed set, since it becomes a metric's label.
RejectionReason = Literal["queue_full", "ttft_target"]
# Why an engine was replaced: it ended by itself or said so, gave no sign of life, did not end a step, did not start.
FailureReason = Literal["crash", "silent", "stuck", "start"]
# Why a request ended with its engine: its output had begun to leave, it was with its second engine, or no other came.
UnsavedReason = Literal["streaming", "retried", "gave_up"]


@dataclass(frozen=True, slots=True)
class Targets:
    """For the times of a request, in seconds; 0: none."""

    ttft: float = 0.0
    itl: float = 0.0
    attainment: float = 0.99  # share of the times that have to reach them

    def are_met(self, ttft: float, num_late: int, num_tokens: int) -> bool | None:
        """Whether a continuation met them; None: there are none.

        Args:
            num_late: of its tokens, how many came later than `itl` after the one before. One may in any case.
        """
        if not self.ttft and not self.itl:
            return None
        return (not self.ttft or ttft <= self.ttft) and num_late <= 1 + (1 - self.attainment) * num_tokens


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One continuation at its end. Times are durations in seconds as the front end sees them; None: it never got there.

    queued + prefill + decode = e2e; inference = prefill + decode; decode starts at the first token.
    """

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    max_tokens: int  # as resolved
    max_tokens_param: int | None  # as asked for
    n: int  # continuations of the same prompt
    e2e_seconds: float
    queued_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    has_met_targets: bool | None = None  # None: there are none, or it did not end by itself
    longest_num_output_tokens: int | None = None  # of the n continuations, with the last of them to end

    @property
    def inference_seconds(self) -> float | None:
        if self.prefill_seconds is None or self.decode_seconds is None:
            return None
        return self.prefill_seconds + self.decode_seconds

    @property
    def seconds_per_output_token(self) -> float | None:
        """Mean over the tokens after the first one."""
        if self.decode_seconds is None or self.num_output_tokens < 2:
            return None
        return self.decode_seconds / (self.num_output_tokens - 1)


class EngineMetrics(Protocol):
    """Called on the event loop for every request and step: implementations must be quick and must not raise."""

    def on_ready(self, ready: EngineReady) -> None:
        """The engine, the first one or the one after a failure, takes requests."""
        ...

    def on_request_arrived(self, request: ProcessedRequest) -> None:
        """Accepted and sent to the engine."""
        ...

    def on_first_token(self, seconds: float, num_tokens: int, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Of a continuation, since the request's arrival (TTFT).

        Args:
            num_tokens: that came at once.
            num_prompt_tokens: of the request, with its first continuation's first token; 0 for the other continuations.
            num_cached_tokens: how many of num_prompt_tokens were cached.
        """
        ...

    def on_tokens(self, num_tokens: int, seconds: float) -> None:
        """Further tokens of a continuation, since its last ones (ITL)."""
        ...

    def on_finished(self, finished: FinishedRequest) -> None:
        """A continuation ended, by itself, by an error or by the caller (abort)."""
        ...

    def on_step(self, record: StepRecord) -> None:
        """The engine did a step."""
        ...

    def on_rejected(self, reason: RejectionReason) -> None:
        """A request was refused for want of room or readiness, before or after it was sent to the engine."""
        ...

    def on_restart(self, reason: FailureReason) -> None:
        """The engine failed, the requests that end with it have ended, and it is started again."""
        ...

    def on_retry(self) -> None:
        """A request that was with an engine that failed is sent to the next one."""
        ...

    def on_unsaved(self, reason: UnsavedReason) -> None:
        """A request ended because its engine failed."""
        ...


class NoMetrics:
    """EngineMetrics that keeps nothing."""

    def on_ready(self, ready: EngineReady) -> None:
        return None

    def on_request_arrived(self, request: ProcessedRequest) -> None:
        return None

    def on_first_token(self, seconds: float, num_tokens: int, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        return None

    def on_tokens(self, num_tokens: int, seconds: float) -> None:
        return None

    def on_finished(self, finished: FinishedRequest) -> None:
        return None

    def on_step(self, record: StepRecord) -> None:
        return None

    def on_rejected(self, reason: RejectionReason) -> None:
        return None

    def on_restart(self, reason: FailureReason) -> None:
        return None

    def on_retry(self) -> None:
        return None

    def on_unsaved(self, reason: UnsavedReason) -> None:
        return None
