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

from quire.outputs import CompletionOutput, RequestOutput
from quire.server import chat, lora_admin
from quire.server.answer import Writer, respond
from quire.server.generation import Generation, ignored_headers
from quire.server.limits import read_json
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import JsonSchemaFormat, ResponseFormat
from quire.server.protocol.fields import REFUSED_IN_MESSAGES, BodyDecoder
from quire.server.protocol.messages import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    CountTokensRequest,
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
    TokenCount,
)
from quire.server.sse import named_event
from quire.server.state import ServerState, state_of

_NAMES = {"stop": "stop_sequences", "response_format": "output_config", "structured_outputs": "output_config"}

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
    )
    return asked, ignored


def _chat(body: CountTokensRequest, **fields: Any) -> ChatRequest:
    history = [] if body.system is None else [{"role": "system", "content": msgspec.to_builtins(body.system)}]
    return ChatRequest(
        model=body.model,
        messages=history + msgspec.to_builtins(body.messages),
        continue_final_message=body.messages[-1].role == "assistant",
        **fields,
    )


async def _prepare(
    state: ServerState, body: ChatRequest, ignored: list[str], request_id: str
) -> tuple[Generation, Writer]:
    asked = await chat.generation_of(state, body, ignored, request_id, "msg")
    # max_tokens is required, so clients ask for more than there may be: the answer says if it ended at the context.
    return replace(asked, max_tokens_is_default=True), _MessagesWriter(state, asked)


class _MessagesWriter:
    """Turns the outputs of one request into Anthropic's answer or its events."""

    def __init__(self, state: ServerState, asked: Generation) -> None:
        self._state = state
        self._id = asked.response_id
        self._model = asked.adapter or state.model_name

    def response(self, outputs: Sequence[RequestOutput], headers: dict[str, str]) -> Response:
        """The whole answer."""
        (output,) = outputs
        (completion,) = output.outputs
        num_tokens = len(completion.token_ids)
        answer = self._message(output, num_tokens)
        answer.content = [TextBlock(completion.text)]
        stop = self._stop(completion, len(output.prompt_token_ids) + num_tokens)
        answer.stop_reason, answer.stop_sequence = stop.stop_reason, stop.stop_sequence
        return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")

    async def events(self, parts: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. The first one comes with the engine's first output."""
        message: Message | None = None
        num_prompt_tokens = 0
        async with aclosing(parts) as outputs:
            async for _, output in outputs:
                if output.error is not None:
                    continue  # the stream raises it next
                data = b""
                if message is None:
                    message, num_prompt_tokens = self._message(output, 0), len(output.prompt_token_ids)
                    data += named_event(MessageStart(message))
                    data += named_event(ContentBlockStart(0, TextBlock(""))) + named_event(Ping())
                for completion in output.outputs:
                    message.usage.output_tokens += len(completion.token_ids)
                    if completion.text:
                        data += named_event(ContentBlockDelta(0, TextDelta(completion.text)))
                    if completion.finish_reason is not None:
                        stop = self._stop(completion, num_prompt_tokens + message.usage.output_tokens)
                        data += named_event(ContentBlockStop(0))
                        data += named_event(MessageDelta(stop, message.usage)) + named_event(MessageStop())
                if data:
                    yield data

    def _message(self, output: RequestOutput, num_tokens: int) -> Message:
        num_cached_tokens = output.num_cached_tokens
        usage = MessageUsage(
            input_tokens=len(output.prompt_token_ids) - num_cached_tokens,
            cache_read_input_tokens=num_cached_tokens,
            output_tokens=num_tokens,
        )
        return Message(id=self._id, model=self._model, content=[], usage=usage)

    def _stop(self, completion: CompletionOutput, num_tokens: int) -> StopDelta:
        """Why an answer ended after `num_tokens` with its prompt."""
        if isinstance(completion.stop_reason, str):
            return StopDelta("stop_sequence", completion.stop_reason)
        if completion.finish_reason == "length":
            is_context = num_tokens >= (self._state.max_model_len or num_tokens + 1)
            return StopDelta("model_context_window_exceeded" if is_context else "max_tokens", None)
        return StopDelta("end_turn", None)
