"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import UnsupportedFieldError
from quire.frontend.async_engine import INLINE_PROMPT_CHARS
from quire.frontend.infill import infill_prompt
from quire.frontend.prompts import PromptType, split_prompts
from quire.outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from quire.sampling_params import check_num_logprobs
from quire.server import generation
from quire.server.answer import Writer, respond
from quire.server.generation import Generation
from quire.server.logprobs import LogprobWriter, prompt_logprobs
from quire.server.protocol.common import PromptLogprobs, Usage, make_usage
from quire.server.protocol.completions import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from quire.server.protocol.fields import REFUSED_IN_COMPLETIONS, BodyDecoder
from quire.server.sse import DONE, event
from quire.server.state import SYSTEM_FINGERPRINT, ServerState
from quire.server.timeline import timings

DEFAULT_MAX_TOKENS = 16  # OpenAI's

C = TypeVar("C", bound=CompletionChunkChoice)

decoder = BodyDecoder(CompletionRequest, REFUSED_IN_COMPLETIONS)


async def completions(request: Request) -> Response:
    """The continuations of one or several prompts, or a stream of their events."""
    return await respond(request, decoder.decode, prepare)


async def prepare(
    state: ServerState, body: CompletionRequest, ignored: list[str], request_id: str
) -> tuple[Generation, Writer]:
    """The engine requests of a body, and the writer of its answer: see `answer.respond`."""
    prompts = split_prompts(body.prompt) if len(body.prompt) <= INLINE_PROMPT_CHARS else await _split_long(body.prompt)
    if body.suffix:
        prompts = await asyncio.to_thread(_infill_prompts, state, body, prompts, body.suffix)
    asked = await generation.made(partial(_generation, state, body, prompts, request_id), body)
    return asked, _CompletionWriter(state, body, asked)


async def _split_long(prompt: str | list[Any]) -> list[PromptType]:
    """Split prompts in a thread, because a list may have millions of items, and would hold up all streams."""
    return await asyncio.to_thread(split_prompts, prompt)


def _infill_prompts(
    state: ServerState, body: CompletionRequest, prompts: list[PromptType], suffix: str
) -> list[PromptType]:
    if (form := state.infill_format) is None:
        raise UnsupportedFieldError(
            "This model has no tokens for filling in the middle", fix="Remove suffix", param="suffix"
        )
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts) or body.echo:
        raise UnsupportedFieldError(
            "suffix works only with prompts of text, without echo",
            fix="Send the prompt as text, without echo",
            param="suffix",
        )
    encode = state.engine.input_processor.encode
    return [infill_prompt(encode, form, text, suffix) for text in texts]


def _generation(state: ServerState, body: CompletionRequest, prompts: list[PromptType], request_id: str) -> Generation:
    defaults = dict(state.settings.default_sampling_params)
    default_max_tokens = defaults.pop("max_tokens", DEFAULT_MAX_TOKENS)
    limits = state.engine.input_processor.limits
    check_num_logprobs("logprobs", body.logprobs, limits.vocab_size, limits.max_logprobs)
    # With echo and no tokens the prompt is computed by a step that samples one, which is dropped.
    asked = 1 if _is_echo_only(body) else body.max_tokens
    max_tokens, is_chosen = generation.choose_max_tokens(state, asked, default_max_tokens)
    num_logprobs = None if body.logprob_token_ids else body.logprobs  # exactly these are reported
    params = body.sampling_params(defaults, max_tokens=max_tokens, logprobs=num_logprobs)
    if body.echo and params.prompt_logprobs is None and body.logprobs is not None:
        params.prompt_logprobs = body.logprobs
        params.skip_reading_prefix_cache = True
    return generation.of_body(
        state,
        body,
        request_id,
        "cmpl",
        prompts,
        params,
        add_special_tokens=body.add_special_tokens is not False,
        max_tokens_is_default=not is_chosen,
    )


def _is_echo_only(body: CompletionRequest) -> bool:
    """max_tokens 0 with echo asks for the prompt and its logprobs only."""
    return body.max_tokens == 0 and bool(body.echo)


class _CompletionWriter:
    """Turns the outputs of one request into OpenAI's answer or its chunks."""

    def __init__(self, state: ServerState, body: CompletionRequest, asked: Generation) -> None:
        self._state, self._body = state, body
        self._id = asked.response_id
        self._model = asked.adapter or state.model_name
        self._created = int(time.time())
        self._n = asked.params.n
        self._is_echo_only = _is_echo_only(body)
        self._logprobs: LogprobWriter | None = None
        if asked.params.num_logprobs is not None:
            max_top = -1 if body.logprob_token_ids else body.logprobs or 0
            self._logprobs = LogprobWriter(
                state.tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids), max_top=max_top
            )
        self._left_out = state.left_out(asked.params)
        # By prompt, for choices that begin later.
        self._prompt_logprobs: dict[int, Sequence[PositionLogprobs | None]] = {}
        self._written: dict[int, PromptLogprobs] = {}
        self._echoed: dict[int, CompletionLogprobs] = {}
        self._offsets: dict[int, int] = {}  # characters written so far, for each choice that has begun

    def response(self, outputs: Sequence[RequestOutput], headers: dict[str, str]) -> Response:
        """The whole answer."""
        choices = [
            self._choice(CompletionChoice, prompt_index, output, completion)
            for prompt_index, output in enumerate(outputs)
            for completion in output.outputs
        ]
        num_tokens = sum(self._num_tokens(completion) for output in outputs for completion in output.outputs)
        num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
        answer = CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=choices,
            usage=make_usage(sum(len(output.prompt_token_ids) for output in outputs), num_tokens, num_cached_tokens),
        )
        if self._body.return_metrics:
            parts = [output.metrics for output in outputs if output.metrics is not None]
            answer.metrics = timings(parts, num_tokens, num_cached_tokens)
        return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")

    async def events(self, parts: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. The first one comes with the engine's first output."""
        num_prompt_tokens: dict[int, int] = {}
        num_cached_tokens: dict[int, int] = {}
        metrics: dict[int, RequestMetrics] = {}
        num_tokens = 0

        def usage() -> Usage:
            return make_usage(sum(num_prompt_tokens.values()), num_tokens, sum(num_cached_tokens.values()))

        def write(prompt_index: int, output: RequestOutput) -> bytes:
            nonlocal num_tokens
            data = b""
            for completion in output.outputs:
                num_tokens += self._num_tokens(completion)
                if self._shows(prompt_index, completion):
                    chunk = self._chunk([self._choice(CompletionChunkChoice, prompt_index, output, completion)])
                    if self._body.includes_usage:
                        chunk.usage = usage() if self._body.includes_continuous_usage else None
                    data += event(chunk)
            return data

        async with aclosing(parts) as outputs:
            async for prompt_index, output in outputs:
                if output.error is not None:
                    continue  # the stream raises it next
                if prompt_index not in num_prompt_tokens:
                    num_prompt_tokens[prompt_index] = len(output.prompt_token_ids)
                    num_cached_tokens[prompt_index] = output.num_cached_tokens
                    if output.metrics is not None:
                        metrics[prompt_index] = output.metrics
                if data := await generation.write(partial(write, prompt_index, output), [output]):
                    yield data
        data = DONE
        if self._body.includes_usage or self._body.return_metrics:
            last = self._chunk([])
            if self._body.includes_usage:
                last.usage = usage()
            if self._body.return_metrics:
                last.metrics = timings(metrics.values(), num_tokens, sum(num_cached_tokens.values()))
            data = event(last) + DONE
        yield data

    def _shows(self, prompt_index: int, completion: CompletionOutput) -> bool:
        """Whether there is anything to write. Half a character or a possible stop string is held back.

        But the first event of a continuation comes with its first token, as in vLLM, because clients measure its time.
        """
        is_first = prompt_index * self._n + completion.index not in self._offsets
        return bool(
            is_first or completion.text or completion.finish_reason or self._logprobs or self._body.return_token_ids
        )

    def _num_tokens(self, completion: CompletionOutput) -> int:
        return 0 if self._is_echo_only else len(completion.token_ids)

    def _choice(self, kind: type[C], prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> C:
        """The new part of a continuation. If the request asked for the prompt, the first part begins with it."""
        index = prompt_index * self._n + completion.index
        is_first = index not in self._offsets
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        offset = self._offsets.setdefault(index, 0)
        token_ids = list(completion.token_ids)
        text, logprobs = completion.text, completion.logprobs
        if self._is_echo_only:
            text, token_ids, logprobs = "", [], None
        parts: list[CompletionLogprobs] = []
        if is_first and self._body.echo:
            prompt = self._prompt_text(output)
            text = prompt + text
            if self._logprobs is not None and (positions := self._prompt_logprobs.get(prompt_index)) is not None:
                if prompt_index not in self._echoed:
                    self._echoed[prompt_index], _ = self._logprobs.completion(output.prompt_token_ids, positions, 0)
                parts.append(self._echoed[prompt_index])
            offset += len(prompt)
        if self._logprobs is not None and logprobs is not None:
            part, offset = self._logprobs.completion(token_ids, logprobs, offset, self._left_out)
            parts.append(part)
        self._offsets[index] = offset
        choice = kind(
            index=index,
            text=text,
            logprobs=_joined(parts),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = token_ids
        if is_first:
            self._add_prompt(choice, prompt_index, output)
        return choice

    def _add_prompt(self, choice: CompletionChunkChoice, prompt_index: int, output: RequestOutput) -> None:
        if self._body.return_token_ids:
            choice.prompt_token_ids = output.prompt_token_ids
        if self._body.prompt_logprobs is not None and prompt_index in self._prompt_logprobs:
            if prompt_index not in self._written:
                self._written[prompt_index] = prompt_logprobs(self._prompt_logprobs[prompt_index])
            choice.prompt_logprobs = self._written[prompt_index]

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._state.tokenizer is None:
            return output.prompt or ""
        return self._state.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _chunk(self, choices: list[CompletionChunkChoice]) -> CompletionChunk:
        return CompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=choices,
        )


def _joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return CompletionLogprobs(
        text_offset=list(chain.from_iterable(part.text_offset for part in parts)),
        token_logprobs=list(chain.from_iterable(part.token_logprobs for part in parts)),
        tokens=list(chain.from_iterable(part.tokens for part in parts)),
        top_logprobs=list(chain.from_iterable(part.top_logprobs for part in parts)),
    )
