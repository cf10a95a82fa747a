"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequestError, UnsupportedFieldError
from quire.frontend.render_process import Render
from quire.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.sampling_params import check_num_logprobs
from quire.server import generation
from quire.server.answer import respond
from quire.server.generation import Generation
from quire.server.logprobs import LogprobWriter, prompt_logprobs
from quire.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatRequest,
    ChatResponse,
    Delta,
)
from quire.server.protocol.common import make_usage
from quire.server.protocol.fields import REFUSED_IN_CHAT, BodyDecoder
from quire.server.sse import DONE, event
from quire.server.state import SYSTEM_FINGERPRINT, ServerState
from quire.server.timeline import timings

decoder = BodyDecoder(ChatRequest, REFUSED_IN_CHAT)


async def chat_completions(request: Request) -> Response:
    """One answer, or its events as they come."""
    return await respond(request, decoder.decode, prepare)


async def prepare(
    state: ServerState, body: ChatRequest, ignored: list[str], request_id: str
) -> tuple[Generation, ChatWriter]:
    """What a chat asks of the engine, and who writes the answer; as `answer.respond` says."""
    asked = await generation_of(state, body, ignored, request_id, "chatcmpl")
    return asked, ChatWriter(state, body, asked)


async def generation_of(
    state: ServerState, body: ChatRequest, ignored: list[str], request_id: str, prefix: str
) -> Generation:
    """What a chat asks of the engine. `prefix`: of the answer's id. Adds the names of fields without effect."""
    ignored += _check_tools(body)
    if body.reasoning_effort is not None and not state.has_reasoning_effort:
        ignored.append("reasoning_effort")
    return _generation(state, body, await render(state, body), request_id, prefix)


def _check_tools(body: ChatRequest) -> list[str]:
    """Refuse tools the model may call; those it may only look at are the template's business. Gives ignored fields."""
    if body.tools and body.tool_choice != "none":
        raise UnsupportedFieldError(
            "Calling tools is not supported yet",
            fix='Remove tools, or set tool_choice to "none" to only show them to the model',
            param="tools",
        )
    if body.tool_choice is not None and not body.tools:
        if body.tool_choice not in ("none", "auto"):
            raise UnsupportedFieldError(
                "tool_choice names a tool, but there are no tools", fix="Remove tool_choice", param="tool_choice"
            )
        return ["tool_choice"]
    return []


async def render(state: ServerState, body: ChatRequest) -> str:
    """The prompt of a chat."""
    continues = bool(body.continue_final_message)
    adds_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return await state.renderer.render(
        Render(
            body.messages,
            tools=body.tools or None,
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
        self._role = state.settings.response_role
        self._n = asked.params.n
        self._prefix = _echoed_text(body, self._role)
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
        return ChatChoice(
            index=completion.index,
            message=AnswerMessage(role=self._role, content=self._prefix + completion.text),
            logprobs=self._logprobs.chat(logprobs) if self._logprobs is not None and logprobs is not None else None,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._body.return_token_ids else None,
        )

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
                if (choice := self._delta(completion)) is not None:
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

    def _delta(self, completion: CompletionOutput) -> ChatChunkChoice | None:
        """What is new in a continuation; None if nothing of it shows (half a character, a possible stop string)."""
        if not (completion.text or completion.finish_reason or self._logprobs or self._body.return_token_ids):
            return None
        choice = ChatChunkChoice(
            index=completion.index, delta=Delta(content=completion.text) if completion.text else Delta()
        )
        if completion.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = completion.finish_reason, completion.stop_reason
        if self._logprobs is not None and completion.logprobs:
            choice.logprobs = self._logprobs.chat(completion.logprobs)
        if self._body.return_token_ids:
            choice.token_ids = completion.token_ids
        return choice

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


def _echoed_text(body: ChatRequest, role: str) -> str:
    """With `echo`, the last message if the answer's role wrote it: the answer then begins with it."""
    last = body.messages[-1]
    content = last.get("content")
    return content if body.echo and last.get("role") == role and isinstance(content, str) else ""
