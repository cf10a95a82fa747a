"""Bodies of the routes below /v1/responses: OpenAI's shapes, for answers of text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.server.protocol.chat import MAX_MESSAGES, ChatRequest, TokenLogprob
from quire.server.protocol.common import JsonSchemaFormat, ResponseFormat

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputText(msgspec.Struct):
    type: Literal["input_text", "output_text"]
    text: str


class InputItem(msgspec.Struct):
    """A message, of a client or of an earlier answer."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]
    type: Literal["message"] = "message"


class TextFormat(msgspec.Struct, omit_defaults=True):
    """As the chat's response_format, with the schema's fields beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def response_format(self) -> ResponseFormat:
        json_schema = None
        if self.type == "json_schema":
            json_schema = JsonSchemaFormat(name=self.name or "", schema=self.schema)
        return ResponseFormat(type=self.type, json_schema=json_schema)


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponseStreamOptions(msgspec.Struct):
    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """`include`: of the two things, reasoning is never there, so nothing comes of it."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


# Fields of ResponsesRequest that are ChatRequest fields under the same name.
SHARED_FIELDS = (
    "model",
    "top_logprobs",
    "temperature",
    "top_p",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "priority",
    "cache_salt",
)


class ResponsesChat(ChatRequest, kw_only=True):
    """The chat that a body asks for, with the body."""

    asked: ResponsesRequest


class OutputText(msgspec.Struct):
    text: str
    logprobs: list[TokenLogprob]
    annotations: list[None] = []
    type: Literal["output_text"] = "output_text"


class OutputMessage(msgspec.Struct):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int = 0


class ResponseFailure(msgspec.Struct):
    message: str
    code: Literal["server_error"] = "server_error"


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(msgspec.Struct, kw_only=True):
    """The answer, whatever has become of it so far."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: Metadata
    model: str
    output: list[OutputMessage] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None
    reasoning: Reasoning
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: Literal["auto"] = "auto"
    tools: list[None] = []
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class _Event(msgspec.Struct, tag_field="type"):
    sequence_number: int


class _ResponseEvent(_Event):
    response: ResponseObject


class ResponseCreated(_ResponseEvent, tag="response.created"):
    pass


class ResponseInProgress(_ResponseEvent, tag="response.in_progress"):
    pass


class ResponseCompleted(_ResponseEvent, tag="response.completed"):
    pass


class ResponseIncomplete(_ResponseEvent, tag="response.incomplete"):
    pass


class ResponseFailed(_ResponseEvent, tag="response.failed"):
    pass


class _ItemEvent(_Event):
    output_index: int
    item: OutputMessage


class OutputItemAdded(_ItemEvent, tag="response.output_item.added"):
    pass


class OutputItemDone(_ItemEvent, tag="response.output_item.done"):
    pass


class _ContentEvent(_Event):
    item_id: str
    output_index: int
    content_index: int


class ContentPartAdded(_ContentEvent, tag="response.content_part.added"):
    part: OutputText


class ContentPartDone(_ContentEvent, tag="response.content_part.done"):
    part: OutputText


class OutputTextDelta(_ContentEvent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_ContentEvent, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | ContentPartDone
    | OutputItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)
