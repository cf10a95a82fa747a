"""POST /v1/messages and POST /v1/messages/count_tokens: Anthropic's API. Its bodies are translated into chats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequestError
from quire.outputs import CompletionOutput, RequestOutput
from quire.server import chat, lora_admin
from quire.server.answer import Writer, parsed, respond
from quire.server.generation import Generation, ignored_headers
from quire.server.limits import read_json
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import JsonSchemaFormat, ResponseFormat
from quire.server.protocol.fields import REFUSED_IN_MESSAGES, BodyDecoder
from quire.server.protocol.messages import (
    AnswerBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    CountTokensRequest,
    InputJsonDelta,
    InputMessage,
    Message,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StopDelta,
    TextBlock,
    TextDelta,
    TextPart,
    ThinkingBlock,
    ThinkingDelta,
    TokenCount,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    ToolWish,
)
from quire.server.sse import named_event
from quire.server.state import ServerState, state_of
from quire.server.text.events import Content, Event, Reasoning, ToolArguments, ToolCallStart

_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "structured_outputs": "output_config",
    "thinking_token_budget": "thinking.budget_tokens",
}

_decoder = BodyDecoder(MessagesRequest, REFUSED_IN_MESSAGES)
_count_decoder = BodyDecoder(CountTokensRequest, REFUSED_IN_MESSAGES)


async def messages(request: Request) -> Response:
    """One answer, or its events as they come."""
    return await respond(request, _decode, _prepare, _NAMES)


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a request has."""
    state = state_of(request)
    body, ignored = await read_json(request, state.settings.limits, _count_decoder.decode)
    await lora_admin.resolve(state, body.model)
    state.adapter(body.model)
    prompt = await chat.render(state, _chat(body))
    token_ids = await asyncio.to_thread(state.engine.input_processor.encode, prompt, False)
    answer = TokenCount(len(token_ids))
    return Response(msgspec.json.encode(answer), headers=ignored_headers(ignored), media_type="application/json")


def _decode(data: bytes) -> tuple[ChatRequest, list[str]]:
    body, ignored = _decoder.decode(data)
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if budget is not None and body.thinking is not None and body.thinking.type == "disabled":
        ignored.append("thinking.budget_tokens")
        budget = None
    response_format = None
    if body.output_config is not None and (form := body.output_config.format) is not None:
        json_schema = JsonSchemaFormat(name="", schema=form.schema)
        response_format = ResponseFormat(type="json_schema", json_schema=json_schema)
    asked = _chat(
        body,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        cache_salt=body.cache_salt,
        response_format=response_format,
        thinking_token_budget=budget,
    )
    return asked, ignored


def _chat(body: CountTokensRequest, **fields: Any) -> ChatRequest:
    messages = [] if body.system is None else [{"role": "system", "content": _content(body.system)}]
    wish = body.tool_choice
    return ChatRequest(
        model=body.model,
        messages=[*messages, *(part for message in body.messages for part in _history(message))],
        continue_final_message=body.messages[-1].role == "assistant",
        tools=None if body.tools is None else [_function(tool) for tool in body.tools],
        tool_choice=None if wish is None else _tool_choice(wish),
        parallel_tool_calls=False if wish is not None and wish.disable_parallel_tool_use else None,
        chat_template_kwargs=None if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"},
        **fields,
    )


def _content(content: str | Sequence[TextPart | TextBlock]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [{"type": "text", "text": block.text} for block in content]


def _history(message: InputMessage) -> list[dict[str, Any]]:
    """The message as messages of a chat: each result of a tool is a message of its own, and comes first."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts, calls, thoughts = [], [], [], []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block)
            case ThinkingBlock(thinking):
                thoughts.append(thinking)
            case ToolUseBlock(call_id, name, arguments):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case ToolResultBlock(call_id, content):
                results.append({"role": "tool", "tool_call_id": call_id, "content": _content(content)})
    own: dict[str, Any] = {"role": message.role, "content": _content(texts)}
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = "".join(thoughts)
    return results if results and not (texts or calls) else [*results, own]


def _function(tool: Tool) -> dict[str, Any]:
    about = {"description": tool.description, "strict": tool.strict}
    given = {name: value for name, value in about.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, **given, "parameters": tool.input_schema}}


def _tool_choice(wish: ToolWish) -> str | dict[str, Any]:
    if wish.type == "tool":
        if wish.name is None:
            raise InvalidRequestError(
                "tool_choice of type tool has no name",
                expected='{"type": "tool", "name": ...}',
                param="tool_choice.name",
            )
        return {"type": "function", "function": {"name": wish.name}}
    return "required" if wish.type == "any" else wish.type


async def _prepare(
    state: ServerState, body: ChatRequest, ignored: list[str], request_id: str
) -> tuple[Generation, Writer]:
    if body.thinking_token_budget is not None and not chat.bounds_reasoning(state):
        # Clients of this API send a budget to every model that thinks.
        body = msgspec.structs.replace(body, thinking_token_budget=None)
        ignored.append("thinking.budget_tokens")
    asked = await chat.generation_of(state, body, ignored, request_id, "msg")
    # max_tokens is required, so clients ask for more than fits: the answer says if it ended at the context.
    return replace(asked, max_tokens_is_default=True), _MessagesWriter(state, asked)


class _MessagesWriter:
    """Turns the outputs of one request into Anthropic's answer or its events."""

    def __init__(self, state: ServerState, asked: Generation) -> None:
        self._max_model_len = state.max_model_len
        self._parser = None if asked.new_parser is None else asked.new_parser()
        usage = MessageUsage(input_tokens=0, cache_read_input_tokens=0, output_tokens=0)
        self._message = Message(id=asked.response_id, model=asked.adapter or state.model_name, content=[], usage=usage)
        self._has_begun = False
        self._open: AnswerBlock | None = None  # the last block, while it grows
        self._pieces: list[str] = []  # the pieces of its text

    def response(self, outputs: Sequence[RequestOutput], headers: dict[str, str]) -> Response:
        """The whole answer."""
        (output,) = outputs
        self._write(output)
        return Response(msgspec.json.encode(self._message), headers=headers, media_type="application/json")

    async def events(self, parts: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. The first one comes with the engine's first output."""
        async with aclosing(parts) as outputs:
            async for _, output in outputs:
                # After an output with an error the stream raises it.
                if output.error is None and (data := self._write(output)):
                    yield data

    def _write(self, output: RequestOutput) -> bytes:
        """Take over the new part of the answer, as events."""
        data, usage = b"", self._message.usage
        if not self._has_begun:
            self._has_begun = True
            usage.cache_read_input_tokens = output.num_cached_tokens
            usage.input_tokens = len(output.prompt_token_ids) - output.num_cached_tokens
            data = named_event(MessageStart(self._message)) + named_event(Ping())
        for completion in output.outputs:
            usage.output_tokens += len(completion.token_ids)
            for part in parsed(self._parser, completion):
                data += self._part(part)
            if completion.finish_reason is not None:
                data += self._ending(completion)
        return data

    def _part(self, part: Event) -> bytes:
        match part:
            case Content(text):
                return self._add(TextBlock, text, TextDelta(text))
            case Reasoning(text):
                return self._add(ThinkingBlock, text, ThinkingDelta(text))
            case ToolCallStart(_, call_id, name):
                return self._begin(ToolUseBlock(call_id, name, {}))
            case ToolArguments(_, text):
                return self._grow(text, InputJsonDelta(text))

    def _add(self, kind: type[TextBlock] | type[ThinkingBlock], text: str, delta: TextDelta | ThinkingDelta) -> bytes:
        data = b"" if isinstance(self._open, kind) else self._begin(kind(""))
        return data + self._grow(text, delta)

    def _begin(self, block: AnswerBlock) -> bytes:
        data = self._close()
        self._message.content.append(block)
        self._open = block
        return data + named_event(ContentBlockStart(len(self._message.content) - 1, block))

    def _grow(self, text: str, delta: TextDelta | ThinkingDelta | InputJsonDelta) -> bytes:
        self._pieces.append(text)
        return named_event(ContentBlockDelta(len(self._message.content) - 1, delta))

    def _close(self) -> bytes:
        text = "".join(self._pieces)
        self._pieces.clear()
        match self._open:
            case None:
                return b""
            case TextBlock():
                self._open.text = text
            case ThinkingBlock():
                self._open.thinking = text
            case ToolUseBlock():
                self._open.input = _object(text)
        self._open = None
        return named_event(ContentBlockStop(len(self._message.content) - 1))

    def _ending(self, completion: CompletionOutput) -> bytes:
        data = b"" if self._message.content else self._begin(TextBlock(""))
        data += self._close()
        stop = self._stop(completion)
        self._message.stop_reason, self._message.stop_sequence = stop.stop_reason, stop.stop_sequence
        return data + named_event(MessageDelta(stop, self._message.usage)) + named_event(MessageStop())

    def _stop(self, completion: CompletionOutput) -> StopDelta:
        if isinstance(completion.stop_reason, str):
            return StopDelta("stop_sequence", completion.stop_reason)
        usage = self._message.usage
        if completion.finish_reason == "length":
            num_tokens = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
            is_context = self._max_model_len is not None and num_tokens >= self._max_model_len
            return StopDelta("model_context_window_exceeded" if is_context else "max_tokens", None)
        has_calls = any(isinstance(block, ToolUseBlock) for block in self._message.content)
        return StopDelta("tool_use" if has_calls else "end_turn", None)


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; a call that was cut has none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
