"""Bodies of POST /v1/chat/completions: OpenAI's shape with vLLM's extra fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.protocol.common import GenerationRequest, PromptLogprobs, Usage
from quire.server.protocol.timeline import RequestTimings

MAX_MESSAGES = 4096
MAX_CHATS = 1024
MAX_TOOLS = 128
MAX_DOCUMENTS = 1024


class ChatRequest(GenerationRequest, kw_only=True):
    # Messages and tools are the template's business: the front end checks that they are messages of text.
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    documents: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_DOCUMENTS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None

    @property
    def max_tokens_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def constraint_name(self) -> str:
        if self.tool_choice in (None, "auto"):  # a structural tag makes calls fit the schemas of strict tools
            is_of_tools = self.structured_outputs is not None and self.structured_outputs.structural_tag is not None
            return "tools" if self.tools and is_of_tools else super().constraint_name
        return super().constraint_name if self.tool_choice == "none" else "tools"

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template. reasoning_effort is one and decides enable_thinking, as in vLLM."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("enable_thinking", self.reasoning_effort != "none")
            kwargs["reasoning_effort"] = self.reasoning_effort
        return kwargs


# Fields for features that an answer to several chats does not have.
NOT_IN_BATCHES = ("stream", "use_beam_search", "return_token_ids")


class BatchChatRequest(ChatRequest, kw_only=True):
    """Several chats, with the same fields beside the messages."""

    messages: Annotated[  # type: ignore[assignment]
        list[Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]],
        msgspec.Meta(min_length=1, max_length=MAX_CHATS),
    ]


class RenderedChat(msgspec.Struct, kw_only=True):
    """The prompt of a chat, which POST /v1/completions takes as `prompt`, as text or as tokens."""

    model: str
    prompt: str
    token_ids: list[int]


class TopLogprob(msgspec.Struct, kw_only=True, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob, kw_only=True, gc=False):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET  # later pieces of a streamed call have no name
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AnswerMessage(msgspec.Struct, kw_only=True):
    """Clients read the keys that are always there. A text model never fills the keys from `refusal` to `function_call`.

    The reasoning has both names that clients know.
    """

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    routed_experts: None = None


class ChatResponse(msgspec.Struct, kw_only=True):
    """The whole answer, with every key of vLLM's: null if the request did not ask for it or it does not exist here."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    service_tier: None = None
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestTimings | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_text: None = None
    kv_transfer_params: None = None


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """A call begins with its id, type and name; the pieces of its arguments follow."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """An event of a streamed answer. As in vLLM, the first one of a choice has the keys of the prompt."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: RequestTimings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_text: UnsetType | None = UNSET
