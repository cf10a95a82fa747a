"""The results of generation: vLLM's RequestOutput, CompletionOutput and Logprob, with the same names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """Log probability (natural log) of one token at one position; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# token id -> Logprob; the chosen token is always present and comes first.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds on the monotonic clock of the front end (durations, not dates)."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt; `index` counts the n continuations of the request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lora_request: object | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All continuations of one prompt so far. `prompt_logprobs[0]` is None: the first token has no prediction."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    lora_request: object | None = None
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam: `tokens` holds prompt and continuation; `cum_logprob` sums the continuation's log probabilities.

    `logprobs` has a position per token of the continuation, with the most likely tokens and the chosen one.
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best `beam_width` sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)
