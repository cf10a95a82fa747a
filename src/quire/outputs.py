"""The results of generation: vLLM's RequestOutput, CompletionOutput and Logprob, with the same names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.lora.request import LoRARequest

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
class SpecDecodeMetrics:
    """The fate of the drafts of one continuation.

    Args:
        num_spec_tokens: the largest length of a draft.
        is_detailed: keep two numbers per step too.
    """

    num_spec_tokens: int
    is_detailed: bool = False
    by_draft_length: dict[int, list[int]] = field(default_factory=dict)  # [n][i]: drafts of n tokens, i accepted
    per_step_drafted: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Count one step with drafts."""
        counts = self.by_draft_length.setdefault(num_drafted, [0] * (num_drafted + 1))
        counts[num_accepted] += 1
        if self.is_detailed:
            self.per_step_drafted.append(num_drafted)
            self.per_step_accepted.append(num_accepted)

    def to_dict(self) -> dict[str, Any]:
        """vLLM's `metrics.speculative_decoding`."""
        histogram = [0] * (self.num_spec_tokens + 1)
        for counts in self.by_draft_length.values():
            for num_accepted, count in enumerate(counts):
                histogram[num_accepted] += count
        num_steps = sum(histogram)
        num_accepted_tokens = sum(i * count for i, count in enumerate(histogram))
        num_tokens = sum(length * sum(counts) for length, counts in self.by_draft_length.items())
        found: dict[str, Any] = {
            "mean_acceptance_length": 1 + num_accepted_tokens / max(num_steps, 1),
            "draft_acceptance_rate": num_accepted_tokens / max(num_tokens, 1),
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": {
                str(n): self.by_draft_length[n] for n in sorted(self.by_draft_length)
            },
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": num_accepted_tokens,
            "num_draft_tokens": num_tokens,
            "num_spec_tokens": self.num_spec_tokens,
        }
        if self.is_detailed:
            found |= {"per_step_accepted": self.per_step_accepted, "per_step_drafted": self.per_step_drafted}
        return found


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds on the monotonic clock of the front end (durations, not dates)."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    spec_decode: SpecDecodeMetrics | None = None  # set if there is one continuation and the counts are asked for


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
    lora_request: LoRARequest | None = None
    spec_decode_metrics: SpecDecodeMetrics | None = None  # with per_request_spec_decode_metrics, for n = 1

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
    lora_request: LoRARequest | None = None
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
