"""Writes a response of /v1/responses: as a whole, as events, or in the background."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import count
from typing import Any

import msgspec
from starlette.responses import Response

from quire.errors import QuireError
from quire.frontend.stream import RequestStream
from quire.logs import get_logger
from quire.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from quire.server import generation
from quire.server.answer import parsed
from quire.server.generation import Generation
from quire.server.logprobs import LogprobWriter
from quire.server.protocol.chat import TokenLogprob
from quire.server.protocol.responses import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    FunctionCallItem,
    IncompleteDetails,
    InputItem,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    OutputTokensDetails,
    Reasoning,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponseQueued,
    ResponsesChat,
    ResponseUsage,
    TextConfig,
    TextFormat,
)
from quire.server.response_items import chat_messages
from quire.server.response_store import ResponseStore, StoredResponse
from quire.server.sse import named_event
from quire.server.state import ServerState, new_request_id
from quire.server.text.events import Content, Event, ToolArguments, ToolCallStart
from quire.server.text.events import Reasoning as ReasoningPart
from quire.server.text.reasoning_tokens import ReasoningTokens
from quire.server.text.token_parser import TokenParser

logger = get_logger(__name__)


def written(answer: ResponseObject, headers: dict[str, str] | None = None) -> Response:
    """A response as it is now."""
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
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            reasoning=request.reasoning or Reasoning(),
            store=is_stored,
            temperature=asked.params.temperature,
            text=request.text or TextConfig(TextFormat("text")),
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_logprobs=request.top_logprobs or 0,
            top_p=asked.params.top_p,
        )
        self._parser = None if asked.new_parser is None else asked.new_parser()
        # With it each part of the answer has the logprobs of its own tokens.
        self._token_parser: TokenParser | None = None
        self._reasoning_tokens: ReasoningTokens | None = None
        if self._parser is not None and state.tokenizer is not None:
            if body.logprobs:
                self._token_parser = TokenParser(self._parser, state.left_out(asked.params))
            reasoning, (prompt,) = state.settings.server.reasoning_parser, asked.prompts
            assert isinstance(prompt, str)
            self._reasoning_tokens = ReasoningTokens.of(reasoning, prompt, state.tokenizer.token_to_id)
        self._open: OutputItem | None = None  # the last item, while it grows
        self._pieces: list[str] = []  # the pieces of its text
        self._part_logprobs: list[TokenLogprob] = []  # the logprobs of its text, if it is a message
        self._numbers = count()
        self._has_begun = False
        self._stored = StoredResponse(self._answer, conversation)

    def response(self, outputs: Sequence[RequestOutput], headers: dict[str, str]) -> Response:
        """The whole answer."""
        (output,) = outputs
        self._write(output)
        return written(self._answer, headers)

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
        self._answer.status = "queued"
        self._stored.add_events(self._event(ResponseCreated, self._answer) + self._event(ResponseQueued, self._answer))
        self._stored.run(self._run(streams))
        self._keep()
        return self._stored

    async def _run(self, streams: Sequence[RequestStream]) -> None:
        try:
            async with aclosing(self._events(generation.merged(streams))) as events:
                async for data in events:
                    self._stored.add_events(data)
                    if self._store is not None:
                        self._store.grow(self._stored, len(data))
        except QuireError as error:
            self._stored.add_events(self._failure(error.message))
        except Exception:
            logger.exception("response %s failed", self._answer.id)
            self._stored.add_events(self._failure("Internal error. The server's log has it under the response's id."))
        finally:
            if self._answer.status in ("queued", "in_progress"):
                self._stored.add_events(self._close("incomplete"))
                self._answer.status = "cancelled"
            self._keep()

    async def _events(self, parts: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        async with aclosing(parts) as outputs:
            async for _, output in outputs:
                # After an output with an error the stream raises it.
                if output.error is None and (data := await generation.write(partial(self._write, output), [output])):
                    yield data

    def _opening(self) -> bytes:
        """The events of the first output. A client already knows of an answer in the background."""
        data = b"" if self._answer.status == "queued" else self._event(ResponseCreated, self._answer)
        self._has_begun, self._answer.status = True, "in_progress"
        return data + self._event(ResponseInProgress, self._answer)

    def _write(self, output: RequestOutput) -> bytes:
        """Take over the new part of the answer, as events."""
        data = b"" if self._has_begun else self._opening()
        if self._answer.usage is None:
            details = InputTokensDetails(output.num_cached_tokens)
            self._answer.usage = ResponseUsage(input_tokens=len(output.prompt_token_ids), input_tokens_details=details)
        for completion in output.outputs:
            self._answer.usage.output_tokens += len(completion.token_ids)
            for part, positions in self._parts(completion):
                data += self._part(part, self._written_logprobs(positions))
            self._count_reasoning(completion.token_ids, self._answer.usage)
            if completion.finish_reason is not None:
                data += self._ending(completion.finish_reason, self._answer.usage)
        return data

    def _count_reasoning(self, token_ids: Sequence[int], usage: ResponseUsage) -> None:
        if self._reasoning_tokens is None:
            return
        self._reasoning_tokens.add(token_ids)
        if any(isinstance(item, ReasoningItem) for item in self._answer.output):  # else its tags are content
            usage.output_tokens_details = OutputTokensDetails(self._reasoning_tokens.num_tokens)

    def _parts(self, completion: CompletionOutput) -> list[tuple[Event, Sequence[PositionLogprobs]]]:
        """The new parts of the answer. Text comes with the logprobs of its tokens, if they were asked for."""
        if self._token_parser is not None:
            return self._token_parser.feed(completion)
        if self._logprobs is None:
            return [(part, ()) for part in parsed(self._parser, completion)]
        has_news = completion.text or completion.logprobs
        return [(Content(completion.text), completion.logprobs or ())] if has_news else []

    def _written_logprobs(self, positions: Sequence[PositionLogprobs]) -> list[TokenLogprob]:
        return [] if self._logprobs is None else self._logprobs.chat(positions).content

    def _part(self, part: Event, logprobs: list[TokenLogprob]) -> bytes:
        data = b""
        match part:
            case Content(text):
                if not isinstance(self._open, OutputMessage):
                    data = self._begin(OutputMessage(f"msg_{new_request_id()}", []))
                self._pieces.append(text)
                self._part_logprobs += logprobs
                return data + self._content_event(OutputTextDelta, text, logprobs)
            case ReasoningPart(text):
                if not isinstance(self._open, ReasoningItem):
                    data = self._begin(ReasoningItem(f"rs_{new_request_id()}", []))
                self._pieces.append(text)
                return data + self._content_event(ReasoningTextDelta, text)
            case ToolCallStart(_, call_id, name):
                return self._begin(FunctionCallItem(f"fc_{new_request_id()}", call_id, name))
            case ToolArguments(_, text):
                self._pieces.append(text)
                return self._item_event(ArgumentsDelta, text)

    def _begin(self, item: OutputItem) -> bytes:
        data = self._close("completed")
        self._answer.output.append(item)
        self._open = item
        data += self._event(OutputItemAdded, len(self._answer.output) - 1, item)
        part: OutputText | ReasoningText
        match item:
            case OutputMessage():
                part = OutputText("", [])
                self._part_logprobs = part.logprobs
                data += self._content_event(ContentPartAdded, part)
                item.content.append(part)
            case ReasoningItem():
                part = ReasoningText("")
                data += self._content_event(ContentPartAdded, part)
                item.content.append(part)
        return data

    def _close(self, status: ItemStatus) -> bytes:
        """The item that is open ends."""
        item, text = self._open, "".join(self._pieces)
        self._pieces.clear()
        match item:
            case None:
                return b""
            case OutputMessage(content=[part]):
                part.text = text
                data = self._content_event(OutputTextDone, text, part.logprobs) + self._content_event(
                    ContentPartDone, part
                )
            case ReasoningItem(content=[part]):
                part.text = text
                data = self._content_event(ReasoningTextDone, text) + self._content_event(ContentPartDone, part)
            case FunctionCallItem(name=name):
                item.arguments = text
                data = self._item_event(ArgumentsDone, name, text)
        item.status, self._open = status, None
        return data + self._event(OutputItemDone, len(self._answer.output) - 1, item)

    def _ending(self, finish_reason: str, usage: ResponseUsage) -> bytes:
        usage.total_tokens = usage.input_tokens + usage.output_tokens
        is_cut = finish_reason == "length"
        data = b"" if self._answer.output else self._begin(OutputMessage(f"msg_{new_request_id()}", []))
        data += self._close("incomplete" if is_cut else "completed")
        self._answer.status = "incomplete" if is_cut else "completed"
        if is_cut:
            self._answer.incomplete_details = IncompleteDetails()
        else:
            self._answer.completed_at = int(time.time())
        items = msgspec.convert(msgspec.to_builtins(self._answer.output), list[InputItem])
        self._stored.conversation += chat_messages(items)
        self._keep()
        return data + self._event(ResponseIncomplete if is_cut else ResponseCompleted, self._answer)

    def _failure(self, message: str) -> bytes:
        data = self._close("incomplete")
        self._answer.status, self._answer.error = "failed", ResponseFailure(message)
        self._keep()
        return data + self._event(ResponseFailed, self._answer)

    def _keep(self) -> None:
        if self._store is not None:
            self._store.keep(self._stored)

    def _content_event(self, kind: Callable[..., msgspec.Struct], *fields: object) -> bytes:
        return self._item_event(kind, 0, *fields)

    def _item_event(self, kind: Callable[..., msgspec.Struct], *fields: object) -> bytes:
        assert self._open is not None
        return self._event(kind, self._open.id, len(self._answer.output) - 1, *fields)

    def _event(self, kind: Callable[..., msgspec.Struct], *fields: object) -> bytes:
        return named_event(kind(next(self._numbers), *fields))
