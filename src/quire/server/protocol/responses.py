"""Bodies of the routes below /v1/responses: OpenAI's shapes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.server.protocol.chat import MAX_MESSAGES, MAX_TOOLS, ChatRequest, TokenLogprob
from quire.server.protocol.common import JsonSchemaFormat, ResponseFormat

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputText(msgspec.Struct):
    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str


class InputItem(msgspec.Struct):
    """A message, a call of a tool, its result, or reasoning, from a client or from an earlier answer."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | UnsetType = UNSET
    content: str | list[InputText] | UnsetType | None = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    output: str | list[InputText] | UnsetType = UNSET


# What an item must have, by its type.
ITEM_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class FunctionTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct):
    type: Literal["function"]
    name: str


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
    """The amount of reasoning. There is no summary: all reasoning comes as text."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(msgspec.Struct):
    include_obfuscation: bool | None = None


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """The sources of a response's prompt, and the form of the response."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    """`include`: reasoning always comes as text, so asking for it encrypted has no effect."""

    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = None
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


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    logprobs: list[TokenLogprob]
    annotations: list[None] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    content: list[ReasoningText]
    status: ItemStatus = "in_progress"
    summary: list[None] = []


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


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


class InputTokens(msgspec.Struct, tag_field="object", tag="response.input_tokens"):
    input_tokens: int


class DeletedResponse(msgspec.Struct):
    """A stored response that is forgotten."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ResponseObject(msgspec.Struct, kw_only=True):
    """The answer in its present state."""

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
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: Literal["none", "auto", "required"] | NamedFunction
    tools: list[FunctionTool]
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


class ResponseQueued(_ResponseEvent, tag="response.queued"):
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
    item: OutputItem


class OutputItemAdded(_ItemEvent, tag="response.output_item.added"):
    pass


class OutputItemDone(_ItemEvent, tag="response.output_item.done"):
    pass


class _ContentEvent(_Event):
    item_id: str
    output_index: int
    content_index: int


class ContentPartAdded(_ContentEvent, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class ContentPartDone(_ContentEvent, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class ReasoningTextDelta(_ContentEvent, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(_ContentEvent, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_Event, tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(_Event, tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str


class OutputTextDelta(_ContentEvent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_ContentEvent, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


ResponseEvent = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | ContentPartDone
    | OutputItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)
