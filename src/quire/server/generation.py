"""Turns one HTTP request into engine requests, one per prompt. They start together, are read as one stream, and end
together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from quire.errors import InvalidRequestError, NotReadyError, UnsupportedFieldError
from quire.frontend.async_engine import has_many_ids
from quire.frontend.input_processor import ProcessedRequest, Truncation
from quire.frontend.prompts import PromptType
from quire.frontend.stream import RequestStream
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.server.limits import body_time
from quire.server.protocol.common import GenerationRequest, StreamOptions
from quire.server.state import ServerState, sane_request_id, trace_headers
from quire.server.text.parser import AnswerParser

T = TypeVar("T")

INLINE_LOGPROBS = 2560  # about 2 ms of formatting
PROMPT_LOGPROBS = 20  # of a position of a prompt, at most by default; to count them would decode them


@dataclass(frozen=True)
class Generation:
    """The engine requests of a route.

    Args:
        max_tokens_is_default: whether the client did not choose max_tokens. Then it is lowered if it does not fit.
        request_id: the id of the HTTP request, under which its timeline is found; None: it has no timeline.
        adapter: the name of the adapter; None: the base model.
        new_parser: makes the parser of a continuation's text; None: all text is content.
        data_parallel_rank: the index of the replica that must compute it; None: the replica with the least work.
    """

    response_id: str
    prompts: Sequence[PromptType]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    add_special_tokens: bool
    max_tokens_is_default: bool
    truncation: Truncation | None = None
    request_id: str | None = None
    adapter: str | None = None
    new_parser: Callable[[], AnswerParser] | None = None
    data_parallel_rank: int | None = None


async def start(state: ServerState, *generations: Generation) -> list[RequestStream]:
    """Send every prompt of one HTTP request, in order. If one is refused, none is left running.

    Args:
        generations: they have the same response id and the same request id.
    """
    check_fan_out(state, *generations)
    first = generations[0]
    parts = [] if first.request_id is None else state.recent.add(first.response_id, first.request_id)
    streams: list[RequestStream] = []
    try:
        for generation, prompt in ((each, prompt) for each in generations for prompt in each.prompts):
            engine_id = state.engine_request_id(first.response_id)
            parts.append(engine_id)
            stream = await state.engine.add_request(
                prompt,
                generation.params,
                engine_id,
                adapter=generation.adapter,
                data_parallel_rank=generation.data_parallel_rank,
                came_time=None if streams else body_time.get(),
                priority=generation.priority,
                cache_salt=generation.cache_salt,
                add_special_tokens=generation.add_special_tokens,
                clamp_max_tokens=generation.max_tokens_is_default,
                truncation=generation.truncation,
                trace_headers=trace_headers.get(),
            )
            streams.append(stream)
            await asyncio.sleep(0)  # the streams of others go on between two prompts
    except BaseException:  # after any end, the streams have no reader
        _close(streams)
        raise
    return streams


async def process(state: ServerState, asked: Generation) -> ProcessedRequest:
    """Check the only prompt of a generation, without sending it. Raises the errors of `start` about the request."""
    check_fan_out(state, asked)
    return await state.engine.process(
        asked.prompts[0],
        asked.params,
        asked.response_id,
        time.monotonic(),
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        add_special_tokens=asked.add_special_tokens,
        clamp_max_tokens=asked.max_tokens_is_default,
        truncation=asked.truncation,
    )


def check_fan_out(state: ServerState, *generations: Generation) -> None:
    """Refuse more prompts, or prompts times n, than one request may have."""
    num_prompts = sum(len(generation.prompts) for generation in generations)
    num_sequences = sum(len(generation.prompts) * generation.params.n for generation in generations)
    limits = state.settings.limits
    if num_prompts > limits.max_prompts or num_sequences > limits.max_sequences:
        raise InvalidRequestError(
            "The request asks for too many continuations",
            value=num_sequences,
            expected=f"at most {limits.max_prompts} prompts, and {limits.max_sequences} prompts times n",
            fix="Split it into several requests",
            param="prompt" if num_prompts > 1 else "n",
        )


async def write(make: Callable[[], T], outputs: Sequence[RequestOutput]) -> T:
    """The result of `make` for the outputs. If many logprobs must be written, it runs in a thread."""
    completions = chain.from_iterable(output.outputs for output in outputs)
    num_logprobs = sum(len(position) for completion in completions for position in completion.logprobs or ())
    num_logprobs += sum(PROMPT_LOGPROBS * len(output.prompt_logprobs or ()) for output in outputs)
    return make() if num_logprobs <= INLINE_LOGPROBS else await asyncio.to_thread(make)


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (index of the prompt, output) as outputs come. The first error ends all requests.

    If the generator is closed, running requests are aborted.
    """
    if len(streams) == 1:
        async with streams[0] as stream:
            async for output in stream:
                yield 0, output
        return
    # The queue has one place. While the reader is busy, outputs wait in their streams, and are merged there.
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(1)

    async def pump(index: int, stream: RequestStream) -> None:
        try:
            async for output in stream:
                await queue.put((index, output))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    num_running = len(tasks)
    try:
        while num_running:
            index, item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        _close(streams)
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """The final output of every prompt, for requests with FINAL_ONLY outputs."""
    finals: list[RequestOutput | None] = [None] * len(streams)
    async with aclosing(merged(streams)) as outputs:
        async for index, output in outputs:
            finals[index] = output
    complete = [output for output in finals if output is not None]
    if len(complete) < len(finals):
        raise NotReadyError("The request was ended by the server before it was answered", fix="Send it again")
    return complete


def _close(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        stream.close()


def _response_id(prefix: str, body: GenerationRequest, header_id: str) -> str:
    """The id of the answer: the body's request_id, or the id of the HTTP request."""
    if body.request_id is not None and sane_request_id(body.request_id) is None:
        raise InvalidRequestError(
            "request_id is not usable", expected="1 to 128 letters, digits and . _ : -", param="request_id"
        )
    return f"{prefix}-{body.request_id or header_id}"


def check(state: ServerState, body: GenerationRequest, ignored: list[str]) -> None:
    """Check what all generating routes check, and call `check_body`."""
    state.check_accepting()
    check_body(state, body, ignored)


def check_body(state: ServerState, body: GenerationRequest, ignored: list[str]) -> None:
    """Refuse fields that exclude each other, and fill in the server's defaults. Adds fields without effect."""
    state.adapter(body.model)
    _check_stream_options(body, ignored)
    _apply_defaults(state, body)
    _check_truncation(body)
    _check_beam_search(body)
    if body.priority and not state.settings.has_priorities:
        ignored.append("priority")


async def made(make: Callable[[], Generation], body: GenerationRequest) -> Generation:
    """The result of `make`, which checks the fields of the body. If it has many token ids, it runs in a thread."""
    return await asyncio.to_thread(make) if has_many_ids(body.allowed_token_ids) else make()


def of_body(
    state: ServerState,
    body: GenerationRequest,
    request_id: str,
    prefix: str,
    prompts: Sequence[PromptType],
    params: SamplingParams,
    *,
    add_special_tokens: bool,
    max_tokens_is_default: bool,
) -> Generation:
    """The engine requests of a body, with its route's choices.

    Args:
        request_id: the id of the HTTP request.
        prefix: the prefix of the answer's id.
    """
    return Generation(
        response_id=_response_id(prefix, body, request_id),
        prompts=prompts,
        params=params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        add_special_tokens=add_special_tokens,
        truncation=body.truncation,
        request_id=request_id,
        adapter=state.adapter(body.model),
        max_tokens_is_default=max_tokens_is_default,
    )


def _check_stream_options(body: GenerationRequest, ignored: list[str]) -> None:
    if body.stream_options is None:
        return
    if body.stream_options.include_obfuscation:
        ignored.append("stream_options.include_obfuscation")
    if not body.is_streamed:
        raise InvalidRequestError(
            "stream_options is only for streamed answers",
            fix="Set stream to true, or remove it",
            param="stream_options",
        )


def _apply_defaults(state: ServerState, body: GenerationRequest) -> None:
    """Fill in the operator's defaults. The default for usage overrides the request, as in vLLM. The other defaults hold
    if the request leaves the field out.
    """
    if body.return_tokens_as_token_ids is None:
        body.return_tokens_as_token_ids = state.settings.server.return_tokens_as_token_ids
    if state.settings.server.enable_force_include_usage and body.is_streamed:
        body.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    if state.settings.reports_metrics and body.return_metrics is None and not body.use_beam_search:
        # Only clients that asked for it get a chunk without choices.
        body.return_metrics = body.includes_usage or not body.is_streamed


def choose_max_tokens(state: ServerState, asked: int | None, default: int | None) -> tuple[int | None, bool]:
    """The number of tokens to generate (None: up to the context length), and whether the client chose it.

    A default is cut to the length that fits; a client's choice that does not fit is refused.
    """
    chosen, cap = default if asked is None else asked, state.settings.max_tokens_cap
    if cap is not None and (chosen is None or chosen > cap):
        return cap, False
    return chosen, asked is not None


def _check_truncation(body: GenerationRequest) -> None:
    if body.truncation_side is not None and body.truncate_prompt_tokens is None:
        raise InvalidRequestError(
            "truncation_side needs truncate_prompt_tokens",
            fix="Set truncate_prompt_tokens (-1: to what fits), or remove it",
            param="truncation_side",
        )


_NOTHING: tuple[object, ...] = (False, [], {}, 0)
# Fields that beam search cannot follow, each with its neutral value.
NOT_WITH_BEAMS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("logprob_token_ids", "stop", "stop_token_ids", "logit_bias", "allowed_token_ids"), _NOTHING),
    **dict.fromkeys(("bad_words", "min_tokens", "return_metrics", "min_p"), _NOTHING),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _NOTHING),
    "repetition_penalty": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "structured_outputs": (),
}


def _check_beam_search(body: GenerationRequest) -> None:
    """Refuse fields that beam search excludes, and its own field without it."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            raise UnsupportedFieldError(
                "length_penalty is only for beam search",
                fix="Set use_beam_search to true, or remove it",
                param="length_penalty",
            )
        return
    values = {name: getattr(body, name) for name in NOT_WITH_BEAMS}
    refused = [name for name, value in values.items() if value is not None and value not in NOT_WITH_BEAMS[name]]
    if body.response_format is not None and body.response_format.type != "text":
        refused.append("response_format")
    for name in refused:
        raise UnsupportedFieldError(
            f"{name} does not work with beam search, which keeps the most probable sequences",
            fix=f"Remove {name} or use_beam_search",
            param=name,
        )


def ignored_headers(names: Sequence[str]) -> dict[str, str]:
    """The header that names the fields accepted without effect."""
    return {"x-quire-ignored-fields": ", ".join(names)} if names else {}
