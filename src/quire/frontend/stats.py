"""The front end's counts, and the hooks with which a metrics registry gets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from quire.messages import AdapterState, EngineReady
from quire.outputs import FinishReason
from quire.schedule import StepRecord

if TYPE_CHECKING:
    from quire.frontend.input_processor import ProcessedRequest

# The reasons to refuse a well-formed request. The set is closed, because it becomes a metric's label.
RejectionReason = Literal["queue_full", "ttft_target"]
# The reasons to replace an engine: it ended or reported a failure, sent no beat, did not end a step, or did not start.
FailureReason = Literal["crash", "silent", "stuck", "start"]
# The reasons why a request ends with its engine: it has cost several engines, or no other one started.
UnsavedReason = Literal["retried", "gave_up"]


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets for the times of a request, in seconds; 0: no target."""

    ttft: float = 0.0
    itl: float = 0.0
    attainment: float = 0.99  # share of the times that must reach the targets

    def are_met(self, ttft: float, num_late: int, num_tokens: int) -> bool | None:
        """Whether a continuation met the targets; None: there are no targets.

        Args:
            num_late: the number of its tokens with a gap of more than `itl` before them. One is always allowed.
        """
        if not self.ttft and not self.itl:
            return None
        return (not self.ttft or ttft <= self.ttft) and num_late <= 1 + (1 - self.attainment) * num_tokens


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One continuation at its end. Times are seconds, measured by the front end; None: it never got there.

    queued + prefill + decode = e2e; inference = prefill + decode; decode starts at the first token.
    """

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    max_tokens: int  # the resolved value
    max_tokens_param: int | None  # the request's value
    n: int  # continuations of the same prompt
    e2e_seconds: float
    queued_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    has_met_targets: bool | None = None  # None: there are no targets, or it did not end by itself
    longest_num_output_tokens: int | None = None  # the longest of all n; only the last one that ends has it

    @property
    def inference_seconds(self) -> float | None:
        if self.prefill_seconds is None or self.decode_seconds is None:
            return None
        return self.prefill_seconds + self.decode_seconds

    @property
    def seconds_per_output_token(self) -> float | None:
        """The mean over the tokens after the first."""
        if self.decode_seconds is None or self.num_output_tokens < 2:
            return None
        return self.decode_seconds / (self.num_output_tokens - 1)


class EngineMetrics(Protocol):
    """Called on the event loop for every request and step. Implementations must be fast and must not raise."""

    def on_ready(self, ready: EngineReady) -> None:
        """The first engine, or a new one after a failure, takes requests."""
        ...

    def on_targets(self, targets: Targets) -> None:
        """The targets from now on."""
        ...

    def on_request_arrived(self, request: ProcessedRequest) -> None:
        """A request was accepted and sent to the engine."""
        ...

    def on_moved(self, count: int) -> None:
        """The engine got `count` continuations of another engine, or lost as many if the number is negative."""
        ...

    def on_first_token(self, seconds: float, num_tokens: int, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A continuation has its first tokens, `seconds` after the request's arrival (TTFT).

        Args:
            num_tokens: tokens that came together.
            num_prompt_tokens: the prompt tokens of the request, for its first continuation with a token; 0
                for the other continuations.
            num_cached_tokens: the cached ones of num_prompt_tokens.
        """
        ...

    def on_tokens(self, num_tokens: int, seconds: float) -> None:
        """A continuation has further tokens, `seconds` after its last ones (ITL)."""
        ...

    def on_finished(self, finished: FinishedRequest) -> None:
        """A continuation ended by itself, by an error or by the caller (abort)."""
        ...

    def on_step(self, record: StepRecord) -> None:
        """The engine did a step."""
        ...

    def on_rejected(self, reason: RejectionReason) -> None:
        """A request was refused because there is no room, before or after it was sent to the engine."""
        ...

    def on_restart(self, reason: FailureReason) -> None:
        """The engine failed, its lost requests have ended, and a new one starts."""
        ...

    def on_retry(self) -> None:
        """A request of a failed engine is sent to another one."""
        ...

    def on_unsaved(self, reason: UnsavedReason) -> None:
        """A request ended because its engine failed."""
        ...

    def on_adapter_read(self, state: AdapterState) -> None:
        """The engine has read an adapter, or failed to."""
        ...


class NoMetrics:
    """EngineMetrics that keeps nothing."""

    def on_ready(self, ready: EngineReady) -> None:
        return None

    def on_targets(self, targets: Targets) -> None:
        return None

    def on_request_arrived(self, request: ProcessedRequest) -> None:
        return None

    def on_moved(self, count: int) -> None:
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

    def on_adapter_read(self, state: AdapterState) -> None:
        return None
