"""The common parts of the bodies of all APIs: the sampling fields, usage, errors, model cards."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.errors import InvalidRequestError
from quire.frontend.input_processor import Truncation
from quire.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

# logprob reported in place of -inf, which JSON cannot say; vLLM's value.
MIN_LOGPROB = -9999.0

# Fields of GenerationRequest that are SamplingParams fields under the same name.
SAMPLING_FIELDS = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "logprob_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "stream_interval",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """When a streamed answer reports usage: once at the end, or in every chunk. Chunks are never padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """OpenAI's wrapper around a JSON Schema. The text always follows the schema, whatever `strict` says."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's way to ask for a form of the text, and vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    def constraint(self) -> StructuredOutputsParams | None:
        """The same constraint in SamplingParams; None: any text. Raises InvalidRequestError."""
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if self.type == "json_schema":
            if self.json_schema is None:
                raise InvalidRequestError(
                    "response_format of type json_schema has no schema",
                    expected='"json_schema": {"name": ..., "schema": {...}}',
                    param="response_format",
                )
            if self.json_schema.schema is None:
                return StructuredOutputsParams(json_object=True)
            return StructuredOutputsParams(json=self.json_schema.schema)
        if self.type == "structural_tag":
            tag = {"structures": self.structures or [], "triggers": self.triggers or []}
            tag = tag if self.format is None else {"format": self.format}
            return StructuredOutputsParams(structural_tag=msgspec.json.encode(tag).decode())
        return None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields that chat and plain completions have in common. None means the model's or the server's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_metrics: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None

    @property
    def max_tokens_name(self) -> str:
        """The field that bounds the answer."""
        return "max_tokens"

    @property
    def constraint_name(self) -> str:
        """The field that says which form the text must have."""
        return "structured_outputs"

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        """A streamed answer ends with a chunk that holds only usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_continuous_usage(self) -> bool:
        """Every chunk of a streamed answer holds usage; only with include_usage, as in vLLM."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def truncation(self) -> Truncation | None:
        """How a prompt that is too long is cut; None: the field is refused."""
        if self.truncate_prompt_tokens is None:
            return None
        return Truncation(self.truncate_prompt_tokens, self.truncation_side or "left")

    def constraint(self) -> StructuredOutputsParams | None:
        """The form that the text must have. Raises InvalidRequestError, also if it is asked for twice."""
        asked = None if self.response_format is None else self.response_format.constraint()
        if self.structured_outputs is not None and asked is not None:
            raise InvalidRequestError(
                "response_format and structured_outputs both constrain the text",
                fix="Send one of them",
                param="structured_outputs",
            )
        return self.structured_outputs or asked

    def sampling_params(
        self, defaults: dict[str, Any], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """The request over the model's defaults; InvalidRequestError for an illegal value.

        Args:
            defaults: SamplingParams fields from generation_config.json.
            max_tokens: already chosen between the fields that can hold it; None is up to the context length.
            logprobs: the number of likely tokens reported per position, None for no logprobs.
        """
        fields = dict(defaults)
        for name in SAMPLING_FIELDS:
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        fields["structured_outputs"] = self.constraint()
        kind = RequestOutputKind.DELTA if self.is_streamed else RequestOutputKind.FINAL_ONLY
        return SamplingParams.from_optional(**fields, max_tokens=max_tokens, logprobs=logprobs, output_kind=kind)


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of one HTTP request, over all its prompts and continuations."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct, kw_only=True):
    logprob: float
    rank: int | None
    decoded_token: str | None


# For each prompt position: token id (as JSON key) -> its logprob; None for the first position.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    error: ErrorDetail


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    created: int
    object: str = "model"
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    max_model_len: int | UnsetType | None = UNSET


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


def make_usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
    )
