"""POST /v1/responses and the stored responses: OpenAI's newer API. Its bodies are translated into chats."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequestError
from quire.server import chat, generation, lora_admin
from quire.server.answer import answer_now, respond_by
from quire.server.generation import Generation
from quire.server.limits import read_json
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.fields import REFUSED_IN_RESPONSES, BodyDecoder
from quire.server.protocol.responses import (
    SHARED_FIELDS,
    DeletedResponse,
    FunctionTool,
    InputTokens,
    InputTokensRequest,
    NamedFunction,
    ResponsesChat,
    ResponsesRequest,
)
from quire.server.response_items import chat_messages
from quire.server.response_store import MAX_SEQUENCE_NUMBER
from quire.server.response_writer import ResponseWriter, written
from quire.server.sse import EventStream
from quire.server.state import ServerState, new_request_id, state_of
from quire.server.tool_choice import ToolChoice

_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text",
    "structured_outputs": "text",
}

_decoder = BodyDecoder(ResponsesRequest, REFUSED_IN_RESPONSES)
_count_decoder = BodyDecoder(InputTokensRequest, REFUSED_IN_RESPONSES)


async def create(request: Request) -> Response:
    """One answer, its events as they come, or the promise of one in the background."""
    return await respond_by(_answer, request, _decode, _prepare, _NAMES)


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a request has."""
    state = state_of(request)
    body, ignored = await read_json(request, state.settings.limits, _count_decoder.decode)
    await lora_admin.resolve(state, body.model)
    state.adapter(body.model)
    asked = ChatRequest(**_chat_fields(body))
    await ToolChoice.read(asked, state.settings.server, ignored)
    _read_conversation(state, body, asked)
    prompt = await chat.render(state, asked)
    token_ids = await asyncio.to_thread(state.engine.input_processor.encode, prompt, False)
    answer = msgspec.json.encode(InputTokens(len(token_ids)))
    return Response(answer, headers=generation.ignored_headers(ignored), media_type="application/json")


async def stored(request: Request) -> Response:
    """One route for both methods, so that the answer to a wrong method names both."""
    return await (_delete if request.method == "DELETE" else _retrieve)(request)


async def _delete(request: Request) -> Response:
    """Forget a stored response. One in the background ends."""
    response_id = request.path_params["response_id"]
    await state_of(request).responses.delete(response_id)
    return Response(msgspec.json.encode(DeletedResponse(response_id)), media_type="application/json")


async def _retrieve(request: Request) -> Response:
    """The present state of a stored response; with ?stream=true the events of a response in the background, from the
    first on.
    """
    stored = state_of(request).responses.get(request.path_params["response_id"])
    wishes = request.query_params.getlist("stream") or ["false"]
    if wishes not in (["true"], ["false"]):
        raise InvalidRequestError("stream is true or false", value=", ".join(wishes), param="stream")
    if wishes == ["false"]:
        return written(stored.answer)
    if not stored.is_in_background:
        raise InvalidRequestError("Only responses in the background can be followed", param="stream")
    after = request.query_params.get("starting_after")
    digits = len(str(MAX_SEQUENCE_NUMBER))
    if after is not None and not (after.isascii() and after.isdigit() and len(after) <= digits):
        raise InvalidRequestError("This is no sequence number", value=after, param="starting_after")
    return EventStream(b"", stored.follow(0 if after is None else int(after) + 1), {})


async def cancel(request: Request) -> Response:
    """End a response in the background. A response that has finished does not change."""
    stored = state_of(request).responses.get(request.path_params["response_id"])
    if not stored.is_in_background:
        raise InvalidRequestError("Only responses in the background can be cancelled", param="response_id")
    await stored.cancel()
    return written(stored.answer)


def _decode(data: bytes) -> tuple[ResponsesChat, list[str]]:
    body, ignored = _decoder.decode(data)
    asked = ResponsesChat(
        asked=body,
        max_tokens=body.max_output_tokens,
        stream=bool(body.stream or body.background),
        logprobs=bool(body.top_logprobs or "message.output_text.logprobs" in (body.include or ())),
        **_chat_fields(body),
        **{name: getattr(body, name) for name in SHARED_FIELDS},
    )
    return asked, ignored


def _chat_fields(body: InputTokensRequest) -> dict[str, Any]:
    """The fields of a chat with the same prompt."""
    choice = body.tool_choice
    form = None if body.text is None else body.text.format
    return {
        "model": body.model,
        "messages": [{"role": "user", "content": body.input}]
        if isinstance(body.input, str)
        else chat_messages(body.input),
        "response_format": None if form is None else form.response_format(),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "tools": None if body.tools is None else [_function(tool) for tool in body.tools],
        "tool_choice": _function(choice) if isinstance(choice, NamedFunction) else choice,
        "parallel_tool_calls": body.parallel_tool_calls,
    }


def _function(tool: FunctionTool | NamedFunction) -> dict[str, Any]:
    """The same in a chat, which has the fields one level deeper."""
    fields = msgspec.to_builtins(tool)
    return {"type": fields.pop("type"), "function": fields}


def _read_conversation(state: ServerState, request: InputTokensRequest, asked: ChatRequest) -> list[dict[str, Any]]:
    """Give the chat the messages before it and its instructions; answers with all without the instructions."""
    if request.previous_response_id is not None:
        asked.messages = [*state.responses.conversation(request.previous_response_id), *asked.messages]
    conversation = asked.messages
    if request.instructions is not None:
        asked.messages = [{"role": "system", "content": request.instructions}, *conversation]
    return conversation


async def _prepare(
    state: ServerState, body: ResponsesChat, ignored: list[str], request_id: str
) -> tuple[Generation, ResponseWriter]:
    request, has_store = body.asked, state.settings.stores_responses
    if request.background and (request.store is False or not has_store):
        raise InvalidRequestError(
            "A response in the background has to be stored",
            fix="Set store to true" if has_store else "Leave background out: this server stores no responses",
            param="background",
        )
    if request.store and not has_store:
        ignored.append("store")
    if request.reasoning is not None and request.reasoning.summary is not None:
        ignored.append("reasoning.summary")
    conversation = _read_conversation(state, request, body)
    asked = await chat.generation_of(state, body, ignored, request_id, "resp")
    asked = replace(asked, response_id=f"resp_{new_request_id()}")  # nobody can guess it
    return asked, ResponseWriter(state, body, asked, list(conversation))


async def _answer(
    state: ServerState, body: ResponsesChat, asked: Generation, writer: ResponseWriter, headers: dict[str, str]
) -> Response:
    if not body.asked.background:
        return await answer_now(state, body, asked, writer, headers)
    stored = writer.run(await generation.start(state, asked))
    if body.asked.stream:
        return EventStream(b"", stored.follow(), headers)
    return written(stored.answer, headers)
