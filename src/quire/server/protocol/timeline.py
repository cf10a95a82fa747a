"""Bodies of GET /v1/requests/{id}/timeline, and the metrics of an answer: times and counts, no text."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class SpeculativeDecoding(msgspec.Struct, kw_only=True):
    """The results of an answer's drafts, with vLLM's names. Only steps with drafts count. Their last token is no draft.

    mean_acceptance_length: tokens per step. acceptance_histogram: the number of steps by accepted drafts; there is also
    one for each number of drafts in a step. num_spec_tokens: the most drafts of a step. per_step_*: a number per step.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET


class RequestTimings(msgspec.Struct, kw_only=True):
    """The times of an answer. A time is null if the answer has not come so far. The first five fields are vLLM's.

    The time to first token counts from the arrival of the request. Queue is the time from arrival to the first
    scheduling. Generation is the time from the first to the last token, and mean_itl is its mean between two tokens.
    tokens_per_second counts all tokens from the first scheduling to the last token. speculative_decoding comes with
    --per-request-spec-decode-metrics, for an answer with one choice.
    """

    time_to_first_token_ms: float | None
    queue_time_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    prefill_time_ms: float | None
    cached_tokens: int
    preemptions: int
    speculative_decoding: SpeculativeDecoding | None = None


class TokenChunk(msgspec.Struct, kw_only=True):
    seconds: float
    tokens: int


class ContinuationTimes(msgspec.Struct, kw_only=True):
    """One of the n continuations; chunks are when its tokens left the engine."""

    index: int
    tokens: int
    cached_tokens: int
    preemptions: int
    finish_reason: str | None
    finished_seconds: float | None
    chunks: list[TokenChunk]


class PromptTimes(msgspec.Struct, kw_only=True):
    """One prompt of the request. All seconds count from `arrived_at`, a Unix time; null: not yet, or never."""

    index: int
    arrived_at: float
    prompt_tokens: int
    queued_seconds: float
    scheduled_seconds: float | None
    first_token_seconds: float | None
    last_token_seconds: float | None
    finished_seconds: float | None
    cached_tokens: int
    preemptions: int
    continuations: list[ContinuationTimes]


class TimelineResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["request.timeline"] = "request.timeline"
    status: Literal["waiting", "running", "finished"]
    prompts: list[PromptTimes]
