"""POST /v1/responses, and what was stored of it: OpenAI's newer API. Its bodies are translated into chats."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequestError, QuireError
from quire.frontend.stream import RequestStream
from quire.logs import get_logger
from quire.outputs import RequestOutput
from quire.server import chat, generation
from quire.server.answer import answer_now, respond_by
from quire.server.generation import Generation
from quire.server.logprobs import LogprobWriter
from quire.server.protocol.fields import REFUSED_IN_RESPONSES, BodyDecoder
from quire.server.protocol.responses import (
    SHARED_FIELDS,
    ContentPartAdded,
    ContentPartDone,
    IncompleteDetails,
    InputTokensDetails,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    Reasoning,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponsesChat,
    ResponsesRequest,
    ResponseUsage,
    TextConfig,
    TextFormat,
)
from quire.server.response_store import MAX_SEQUENCE_NUMBER, ResponseStore, StoredResponse
from quire.server.sse import EventStream, named_event
from quire.server.state import ServerState, new_request_id, state_of

logger = get_logger(__name__)

_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text",
    "structured_outputs": "text",
}

_decoder = BodyDecoder(ResponsesRequest, REFUSED_IN_RESPONSES)


async def create(request: Request) -> Response:
    """One answer, its events as they come, or the promise of one in the background."""
    return await respond_by(_answer, request, _decode, _prepare, _NAMES)


async def retrieve(request: Request) -> Response:
    """A stored response as it is now; with ?stream=true the events of one in the background, from the first on."""
    stored = state_of(request).responses.get(request.path_params["response_id"])
    if request.query_params.get("stream") != "true":
        return _written(stored.answer)
    if not stored.is_in_background:
        raise InvalidRequestError("Only responses in the background can be followed", param="stream")
    after = request.query_params.get("starting_after")
    if after is not None and not (after.isascii() and after.isdigit() and int(after[:20]) <= MAX_SEQUENCE_NUMBER):
        raise InvalidRequestError("This is no sequence number", value=after, param="starting_after")
    return EventStream(b"", stored.follow(0 if after is None else int(after) + 1), {})


async def cancel(request: Request) -> Response:
    """End a response in the background. One that has finished stays as it is."""
    stored = state_of(request).responses.get(request.path_params["response_id"])
    if not stored.is_in_background:
        raise InvalidRequestError("Only responses in the background can be cancelled", param="response_id")
    await stored.cancel()
    return _written(stored.answer)


def _decode(data: bytes) -> tuple[ResponsesChat, list[str]]:
    body, ignored = _decoder.decode(data)
    items = body.input if isinstance(body.input, list) else [{"role": "user", "content": body.input}]
    asked = ResponsesChat(
        asked=body,
        messages=[_message(item) for item in msgspec.to_builtins(items)],
        max_tokens=body.max_output_tokens,
        stream=bool(body.stream or body.background),
        logprobs=bool(body.top_logprobs or "message.output_text.logprobs" in (body.include or ())),
        response_format=None if body.text is None or body.text.format is None else body.text.format.response_format(),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        **{name: getattr(body, name) for name in SHARED_FIELDS},
    )
    return asked, ignored


def _message(item: dict[str, Any]) -> dict[str, Any]:
    """The item as a message of a chat. Templates know no developers."""
    return {"role": item["role"].replace("developer", "system"), "content": item["content"]}


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
    if request.previous_response_id is not None:
        body.messages = [*state.responses.conversation(request.previous_response_id), *body.messages]
    conversation = body.messages
    if request.instructions is not None:
        body.messages = [{"role": "system", "content": request.instructions}, *conversation]
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
    return _written(stored.answer, headers)


def _written(answer: ResponseObject, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


class ResponseWriter:
    """Turns the outputs of one request into OpenAI's response or its events, and stores it.

    Args:
        conversation: the messages of the chat without instructions, to which the answer is added.
    """

    def __init__(
        self, state: ServerState, body: ResponsesChat, asked: Generation, conversation: list[dict[str, Any]]
    ) -> None:
        request = body.asked
        is_stored = state.settings.stores_responses and request.store is not False
        self._store: ResponseStore | None = state.responses if is_stored else None
        self._logprobs: LogprobWriter | None = None
        if body.logprobs:
            self._logprobs = LogprobWriter(state.tokenizer, as_token_ids=False, max_top=body.top_logprobs or 0)
        self._answer = ResponseObject(
            id=asked.response_id,
            created_at=int(time.time()),
            status="in_progress",
            background=bool(request.background),
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=asked.adapter or state.model_name,
            previous_response_id=request.previous_response_id,
            reasoning=request.reasoning or Reasoning(),
            store=is_stored,
            temperature=asked.params.temperature,
            text=request.text or TextConfig(TextFormat("text")),
            top_logprobs=request.top_logprobs or 0,
            top_p=asked.params.top_p,
        )
        self._message = OutputMessage(f"msg_{new_request_id()}", "in_progress", [])
        self._part = OutputText("", [])
        self._texts: list[str] = []
        self._numbers = count()
        self._has_begun = False
        self._stored = StoredResponse(self._answer, conversation)

    def response(self, outputs: Sequence[RequestOutput], headers: dict[str, str]) -> Response:
        """The whole answer."""
        (output,) = outputs
        self._write(output)
        return _written(self._answer, headers)

    async def events(self, parts: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. The first one comes with the engine's first output."""
        try:
            async with aclosing(self._events(parts)) as events:
                async for data in events:
                    yield data
        except QuireError as error:
            if not self._has_begun:
                raise
            yield self._failure(error.message)

    def run(self, streams: Sequence[RequestStream]) -> StoredResponse:
        """Make the answer in the background. It is stored at once."""
        self._stored.add_events(self._opening())
        self._stored.run(self._run(streams))
        self._keep()
        return self._stored

    async def _run(self, streams: Sequence[RequestStream]) -> None:
        try:
            async with aclosing(self._events(generation.merged(streams))) as events:
                async for data in events:
                    self._stored.add_events(data)
        except QuireError as error:
            self._stored.add_events(self._failure(error.message))
        except Exception:
            logger.exception("response %s failed", self._answer.id)
            self._stored.add_events(self._failure("Internal error. The server's log has it under the response's id."))
        finally:
            if self._answer.status == "in_progress":
                self._answer.status = "cancelled"
            self._keep()

    async def _events(self, parts: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        async with aclosing(parts) as outputs:
            async for _, output in outputs:
                # After an output with an error the stream raises it.
                if output.error is None and (data := await generation.write(partial(self._write, output), [output])):
                    yield data

    def _opening(self) -> bytes:
        self._has_begun = True
        return self._event(ResponseCreated, self._answer) + self._event(ResponseInProgress, self._answer)

    def _write(self, output: RequestOutput) -> bytes:
        """Take over what is new, as events."""
        data = b"" if self._has_begun else self._opening()
        if self._answer.usage is None:
            self._answer.usage = ResponseUsage(
                input_tokens=len(output.prompt_token_ids),
                input_tokens_details=InputTokensDetails(output.num_cached_tokens),
            )
            data += self._event(OutputItemAdded, 0, self._message)
            data += self._content_event(ContentPartAdded, self._part)
            self._message.content.append(self._part)
            self._answer.output.append(self._message)
        for completion in output.outputs:
            self._answer.usage.output_tokens += len(completion.token_ids)
            logprobs = self._logprobs.chat(completion.logprobs or ()).content if self._logprobs is not None else []
            if completion.text or logprobs:
                self._texts.append(completion.text)
                self._part.logprobs += logprobs
                data += self._content_event(OutputTextDelta, completion.text, logprobs)
            if completion.finish_reason is not None:
                data += self._ending(completion.finish_reason, self._answer.usage)
        return data

    def _ending(self, finish_reason: str, usage: ResponseUsage) -> bytes:
        usage.total_tokens = usage.input_tokens + usage.output_tokens
        is_cut = finish_reason == "length"
        self._answer.status = self._message.status = "incomplete" if is_cut else "completed"
        if is_cut:
            self._answer.incomplete_details = IncompleteDetails()
        else:
            self._answer.completed_at = int(time.time())
        self._stored.conversation.append({"role": "assistant", "content": "".join(self._texts)})
        self._keep()
        return (
            self._content_event(OutputTextDone, self._part.text, self._part.logprobs)
            + self._content_event(ContentPartDone, self._part)
            + self._event(OutputItemDone, 0, self._message)
            + self._event(ResponseIncomplete if is_cut else ResponseCompleted, self._answer)
        )

    def _failure(self, message: str) -> bytes:
        self._answer.status, self._answer.error = "failed", ResponseFailure(message)
        self._message.status = "incomplete"
        self._keep()
        return self._event(ResponseFailed, self._answer)

    def _keep(self) -> None:
        self._part.text = "".join(self._texts)
        if self._store is not None:
            self._store.keep(self._stored)

    def _content_event(self, kind: Callable[..., msgspec.Struct], *fields: object) -> bytes:
        return self._event(kind, self._message.id, 0, 0, *fields)

    def _event(self, kind: Callable[..., msgspec.Struct], *fields: object) -> bytes:
        return named_event(kind(next(self._numbers), *fields))
