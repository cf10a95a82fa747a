"""Bodies of GET /v1/requests/{id}/timeline, and the metrics of an answer: times and counts, no text."""

from __future__ import annotations

from typing import Literal

import msgspec


class RequestTimings(msgspec.Struct, kw_only=True):
    """Where an answer's time went; null where it never got there. The first five are vLLM's.

    time to first token: from the request's arrival. Queue: arrival to first scheduling. Generation: first token to last
    token, and mean_itl its mean between two tokens. tokens_per_second: all tokens from first scheduling to last token.
    """

    time_to_first_token_ms: float | None
    queue_time_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    prefill_time_ms: float | None
    cached_tokens: int
    preemptions: int


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
