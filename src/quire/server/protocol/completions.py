"""Bodies of POST /v1/completions: OpenAI's shape with vLLM's extra fields."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.protocol.common import GenerationRequest, PromptLogprobs, Usage
from quire.server.protocol.timeline import RequestTimings


class CompletionRequest(GenerationRequest, kw_only=True):
    # A string, its token ids, or a list of either; the mixed list is refused after decoding, which the type cannot say.
    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    logprobs: int | None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Aligned lists, one entry per token; text_offset counts characters from the start of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class CompletionChunk(msgspec.Struct, kw_only=True):
    """An event of a streamed answer, with usage only if the request asked for it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: RequestTimings | UnsetType = UNSET


class CompletionChoice(CompletionChunkChoice, kw_only=True):
    prompt_logprobs: PromptLogprobs | None = None
    routed_experts: None = None


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The whole answer, with every key of vLLM's: null if the request did not ask for it or it does not exist here."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    service_tier: None = None
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: RequestTimings | None = None
    kv_transfer_params: None = None
