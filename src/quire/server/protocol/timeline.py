"""Bodies of GET /v1/requests/{id}/timeline, and the metrics of an answer: times and counts, no text."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class SpeculativeDecoding(msgspec.Struct, kw_only=True):
    """What became of an answer's drafts: vLLM's names. A step is one with drafts; its last token is no draft.

    mean_acceptance_length: tokens per step. acceptance_histogram: steps by the number of drafts that held, and by draft
    length the same for each number of drafts in a step. num_spec_tokens: most drafts of a step. per_step_*: detailed.
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
    """Where an answer's time went; null where it never got there. The first five are vLLM's.

    time to first token: from the request's arrival. Queue: arrival to first scheduling. Generation: first token to last
    token, and mean_itl its mean between two tokens. tokens_per_second: all tokens from first scheduling to last token.
    speculative_decoding: with --per-request-spec-decode-metrics, for an answer with one choice.
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
