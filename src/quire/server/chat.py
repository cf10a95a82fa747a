"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequestError, UnsupportedFieldError
from quire.formats.answer_formats import HARMONY_REASONING
from quire.frontend.render_process import Render
from quire.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.sampling_params import check_num_logprobs
from quire.server import generation, lora_admin
from quire.server.answer import asked_rank, parsed, respond
from quire.server.generation import Generation
from quire.server.limits import read_json
from quire.server.logprobs import LogprobWriter, prompt_logprobs
from quire.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatRequest,
    ChatResponse,
    Delta,
    FunctionCall,
    RenderedChat,
    ToolCall,
    ToolCallDelta,
)
from quire.server.protocol.common import make_usage
from quire.server.protocol.fields import REFUSED_IN_CHAT, BodyDecoder
from quire.server.sse import DONE, event
from quire.server.state import SYSTEM_FINGERPRINT, ServerState, state_of
from quire.server.text import harmony
from quire.server.text.events import Content, Event, Reasoning, ToolArguments, ToolCallStart
from quire.server.text.reasoning import REASONING_FORMATS
from quire.server.timeline import timings
from quire.server.tool_choice import ToolChoice

decoder = BodyDecoder(ChatRequest, REFUSED_IN_CHAT)


async def chat_completions(request: Request) -> Response:
    """One answer, or a stream of its events."""
    return await respond(request, decoder.decode, prepare)


async def render_chat(request: Request) -> Response:
    """The prompt of a chat, without an answer."""
    state = state_of(request)
    body, ignored = await read_json(request, state.settings.limits, decoder.decode)
    await lora_admin.resolve(state, body.model)
    model = state.adapter(body.model) or state.model_name
    generation.check_body(state, body, ignored)
    if (rank := asked_rank(request)) is not None:
        state.engine.check_rank(rank)
    asked = await generation_of(state, body, ignored, "render", "chatcmpl")
    processed = await generation.process(state, asked)
    rendered = RenderedChat(model=model, prompt=processed.prompt or "", token_ids=processed.prompt_token_ids)
    headers = generation.ignored_headers(ignored)
    return Response(msgspec.json.encode(rendered), headers=headers, media_type="application/json")


async def prepare(
    state: ServerState, body: ChatRequest, ignored: list[str], request_id: str
) -> tuple[Generation, ChatWriter]:
    """The engine requests of a chat, and the writer of its answer: see `answer.respond`."""
    asked = await generation_of(state, body, ignored, request_id, "chatcmpl")
    return asked, ChatWriter(state, body, asked)


async def generation_of(
    state: ServerState, body: ChatRequest, ignored: list[str], request_id: str, prefix: str
) -> Generation:
    """The engine requests of a chat. It adds the names of fields without effect to `ignored`.

    Args:
        prefix: the prefix of the answer's id.
    """
    tools = await ToolChoice.read(body, state.settings.server, ignored)
    if body.reasoning_effort is not None and not state.has_reasoning_effort:
        ignored.append("reasoning_effort")
    prompt = await render(state, body)
    constraint = body.constraint()  # even if tools have a constraint, errors in this one are reported
    if (constraint := tools.constraint or constraint) is not None:
        constraint = tools.behind_reasoning(constraint, state.settings.server, prompt)
        body.structured_outputs, body.response_format = constraint, None
    new_parser = tools.new_parser(state.settings.server, prompt)
    if new_parser is not None and state.has_special_tags:
        body.skip_special_tokens = False
    asked = await generation.made(partial(_generation, state, body, prompt, request_id, prefix), body)
    return replace(asked, new_parser=new_parser)


async def render(state: ServerState, body: ChatRequest) -> str:
    """The prompt of a chat."""
    continues = bool(body.continue_final_message)
    hides_tools = body.tool_choice == "none" and state.settings.server.exclude_tools_when_tool_choice_none
    adds_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return await state.renderer.render(
        Render(
            body.messages,
            tools=None if hides_tools else body.tools or None,
            add_generation_prompt=adds_prompt,
            continue_final_message=continues,
            documents=body.documents,
            kwargs=state.template_kwargs(body.template_kwargs),
        )
    )


def _generation(state: ServerState, body: ChatRequest, prompt: str, request_id: str, prefix: str) -> Generation:
    defaults = dict(state.settings.default_sampling_params)
    default_max_tokens = defaults.pop("max_tokens", None)
    asked = getattr(body, body.max_tokens_name)
    max_tokens, is_chosen = generation.choose_max_tokens(state, asked, default_max_tokens)
    if body.thinking_token_budget not in (None, -1):
        defaults |= _thinking_budget(state, body, prompt)
    params = body.sampling_params(defaults, max_tokens=max_tokens, logprobs=_num_logprobs(state, body))
    return generation.of_body(
        state,
        body,
        request_id,
        prefix,
        [prompt],
        params,
        add_special_tokens=bool(body.add_special_tokens),
        max_tokens_is_default=not is_chosen,
    )


def bounds_reasoning(state: ServerState) -> bool:
    """Whether a request may have a thinking_token_budget: the end of the reasoning must be known and be a token."""
    name = state.settings.server.reasoning_parser
    if name is None or state.tokenizer is None:
        return False
    ends = harmony.REASONING_TOKENS if name == HARMONY_REASONING else REASONING_FORMATS[name].closing.names
    return all(state.tokenizer.token_to_id(tag) is not None for tag in ends)


def _thinking_budget(state: ServerState, body: ChatRequest, prompt: str) -> dict[str, Any]:
    """The SamplingParams fields of the budget. There are none if the prompt has closed the reasoning already.

    Raises UnsupportedFieldError if the model's reasoning has no budget.
    """
    name = state.settings.server.reasoning_parser
    if name is None or state.tokenizer is None:
        raise UnsupportedFieldError(
            "This server does not know how its model writes reasoning",
            fix="Remove thinking_token_budget, or start the server with --reasoning-parser",
            param="thinking_token_budget",
        )
    if name == HARMONY_REASONING:
        is_open, tags = (False if harmony.has_begun(prompt) else None), [*harmony.REASONING_TOKENS]
    else:
        reasoning = REASONING_FORMATS[name]
        is_open = reasoning.is_open(prompt)
        tags = [*reasoning.closing.names, *(() if is_open else reasoning.opening.names)]
    token_ids = [token_id for tag in tags if (token_id := state.tokenizer.token_to_id(tag)) is not None]
    if len(token_ids) < len(tags):
        raise UnsupportedFieldError(
            "The tags of this model's reasoning are not tokens, so the tokens of its reasoning cannot be limited",
            fix="Remove thinking_token_budget, and bound the answer with max_completion_tokens",
            param="thinking_token_budget",
        )
    if body.use_beam_search:
        raise UnsupportedFieldError(
            "thinking_token_budget does not work with beam search, which keeps the most probable sequences",
            fix="Remove thinking_token_budget or use_beam_search",
            param="thinking_token_budget",
        )
    if is_open is False:
        return {}
    return {"thinking_token_budget": body.thinking_token_budget, "thinking_token_ids": token_ids}


def _num_logprobs(state: ServerState, body: ChatRequest) -> int | None:
    limits = state.engine.input_processor.limits
    check_num_logprobs("top_logprobs", body.top_logprobs, limits.vocab_size, limits.max_logprobs)
    if body.logprobs:
        if body.logprob_token_ids:
            return None  # exactly these are reported
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs", fix="Set logprobs to true", param="top_logprobs")
    if body.logprob_token_ids:
        raise InvalidRequestError(
            "logprob_token_ids needs logprobs", fix="Set logprobs to true", param="logprob_token_ids"
        )
    return None


class ChatWriter:
    """Turns the outputs of one request into OpenAI's answer or its chunks."""

    def __init__(self, state: ServerState, body: ChatRequest, asked: Generation) -> None:
        self._body = body
        self._id = asked.response_id
        self._created = int(time.time())
        self._model = asked.adapter or state.model_name
        self._role = state.settings.server.response_role
        self._n = asked.params.n
        self._prefix = _echoed_text(body, self._role)
        new_parser = asked.new_parser
        self._parsers = None if new_parser is None else [new_parser() for _ in range(self._n)]
        self._logprobs: LogprobWriter | None = None
        if body.logprobs:
            max_top = -1 if body.logprob_token_ids else body.top_logprobs or 0
            self._logprobs = LogprobWriter(
                state.tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids), max_top=max_top
            )

    def response(self, outputs: Sequence[RequestOutput], headers: dict[str, str]) -> Response:
        """The whole answer."""
        (output,) = outputs
        return Response(msgspec.json.encode(self.answer(output)), headers=headers, media_type="application/json")

    def answer(self, output: RequestOutput) -> ChatResponse:
        """The whole answer, from the final output."""
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        answer = ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=make_usage(len(output.prompt_token_ids), num_tokens, output.num_cached_tokens),
        )
        if self._body.return_metrics and output.metrics is not None:
            answer.metrics = timings([output.metrics], num_tokens, output.num_cached_tokens)
        self._add_prompt(answer, output)
        return answer

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        logprobs = completion.logprobs
        message, reason = self._message(completion)
        return ChatChoice(
            index=completion.index,
            message=message,
            logprobs=self._logprobs.chat(logprobs) if self._logprobs is not None and logprobs is not None else None,
            finish_reason=reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._body.return_token_ids else None,
        )

    def _message(self, completion: CompletionOutput) -> tuple[AnswerMessage, str | None]:
        """The message, and the reason of its end."""
        content, reasoning, calls = [self._prefix], [], []
        events, reason = self._parsed(completion)
        for part in events:
            match part:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    reasoning.append(text)
                case ToolCallStart(_, call_id, name):
                    calls.append(ToolCall(id=call_id, function=FunctionCall(name=name, arguments="")))
                case ToolArguments(index, text):
                    calls[index].function.arguments += text
        text = "".join(content)
        message = AnswerMessage(role=self._role, content=None if not text and (calls or reasoning) else text)
        if calls:
            message.tool_calls = calls
        if reasoning:
            message.reasoning = message.reasoning_content = "".join(reasoning)
        return message, reason

    def _parsed(self, completion: CompletionOutput) -> tuple[list[Event], str | None]:
        """The new part of a continuation, and the reason of its end."""
        reason: str | None = completion.finish_reason
        parser = None if self._parsers is None else self._parsers[completion.index]
        events = parsed(parser, completion)
        if parser is not None and reason is not None:
            reason = parser.finish_reason(reason)
        if self._body.include_reasoning is False:
            events = [part for part in events if not isinstance(part, Reasoning)]
        return events, reason

    def _add_prompt(self, answer: ChatResponse | ChatChunk, output: RequestOutput) -> None:
        if self._body.return_token_ids:
            answer.prompt_token_ids = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)

    async def events(self, parts: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. The first one comes with the engine's first output."""
        num_prompt_tokens = num_tokens = num_cached_tokens = 0
        is_first = True
        metrics: RequestMetrics | None = None

        def write(output: RequestOutput) -> bytes:
            nonlocal num_tokens
            data = self._opening(output, num_prompt_tokens, num_cached_tokens) if is_first else b""
            for completion in output.outputs:
                num_tokens += len(completion.token_ids)
                for choice in self._deltas(completion):
                    data += event(self._chunk([choice], num_prompt_tokens, num_tokens, num_cached_tokens))
            return data

        async with aclosing(parts) as outputs:
            async for _, output in outputs:
                if output.error is not None:
                    continue  # the stream raises it next
                metrics = output.metrics
                if is_first:
                    num_prompt_tokens, num_cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
                data = await generation.write(partial(write, output), [output])
                is_first = False
                if data:
                    yield data
        data = DONE
        if self._body.includes_usage or self._body.return_metrics:
            last = self._chunk([], num_prompt_tokens, num_tokens, num_cached_tokens)
            if self._body.includes_usage:
                last.usage = make_usage(num_prompt_tokens, num_tokens, num_cached_tokens)
            if self._body.return_metrics and metrics is not None:
                last.metrics = timings([metrics], num_tokens, num_cached_tokens)
            data = event(last) + DONE
        yield data

    def _opening(self, output: RequestOutput, num_prompt_tokens: int, num_cached_tokens: int) -> bytes:
        """The role of every choice, and the text it continues."""
        data = b""
        for index in range(self._n):
            choice = ChatChunkChoice(index=index, delta=Delta(role=self._role, content=self._prefix))
            chunk = self._chunk([choice], num_prompt_tokens, 0, num_cached_tokens)
            chunk.prompt_token_ids = chunk.prompt_text = None
            if index == 0:
                self._add_prompt(chunk, output)
            data += event(chunk)
        return data

    def _deltas(self, completion: CompletionOutput) -> list[ChatChunkChoice]:
        """The new part of a continuation; none if no text is final yet (half a character, a possible stop string)."""
        events, reason = self._parsed(completion)
        choices = [ChatChunkChoice(index=completion.index, delta=_delta(part)) for part in events]
        if not choices and (reason or self._logprobs or self._body.return_token_ids):
            choices.append(ChatChunkChoice(index=completion.index, delta=Delta()))
        if not choices:
            return []
        if reason is not None:
            choices[-1].finish_reason, choices[-1].stop_reason = reason, completion.stop_reason
        if self._logprobs is not None and completion.logprobs:
            choices[0].logprobs = self._logprobs.chat(completion.logprobs)
        if self._body.return_token_ids:
            choices[0].token_ids = completion.token_ids
        return choices

    def _chunk(self, choices: list[ChatChunkChoice], num_prompt: int, num_tokens: int, num_cached: int) -> ChatChunk:
        chunk = ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=choices,
        )
        if self._body.includes_continuous_usage:
            chunk.usage = make_usage(num_prompt, num_tokens, num_cached)
        elif self._body.includes_usage:
            chunk.usage = None
        return chunk


def _delta(part: Event) -> Delta:
    """A part of the answer as OpenAI streams it."""
    match part:
        case Content(text):
            return Delta(content=text)
        case Reasoning(text):
            return Delta(reasoning=text, reasoning_content=text)
        case ToolCallStart(index, call_id, name):
            function = FunctionCall(name=name, arguments="")
            return Delta(tool_calls=[ToolCallDelta(index=index, id=call_id, type="function", function=function)])
        case ToolArguments(index, text):
            return Delta(tool_calls=[ToolCallDelta(index=index, function=FunctionCall(arguments=text))])


def _echoed_text(body: ChatRequest, role: str) -> str:
    """With `echo`, the last message if the answer's role wrote it: the answer then begins with it."""
    last = body.messages[-1]
    content = last.get("content")
    return content if body.echo and last.get("role") == role and isinstance(content, str) else ""
