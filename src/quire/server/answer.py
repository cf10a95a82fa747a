"""The common part of all routes that generate: it takes the body, checks it, and writes the answer, whole or as
events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequestError
from quire.outputs import CompletionOutput, RequestOutput
from quire.server import beam_search, generation, lora_admin
from quire.server.generation import Generation
from quire.server.limits import read_json
from quire.server.protocol.common import GenerationRequest
from quire.server.sse import EventStream, run_until_disconnect
from quire.server.state import ServerState, request_id_of, state_of
from quire.server.text.events import Content, Event
from quire.server.text.parser import AnswerParser

RANK_HEADER = "X-data-parallel-rank"
MAX_RANK_DIGITS = 9

B = TypeVar("B", bound=GenerationRequest)
W = TypeVar("W")


class Writer(Protocol):
    """Turns the outputs of one request into the shape of its API."""

    def response(self, outputs: Sequence[RequestOutput], headers: dict[str, str]) -> Response:
        """The whole answer, from the final output of every prompt."""
        ...

    def events(self, parts: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, from (index of the prompt, output)."""
        ...


def parsed(parser: AnswerParser | None, completion: CompletionOutput) -> list[Event]:
    """The parts of a continuation's new text; without a parser all of it is content."""
    if parser is None:
        return [Content(completion.text)] if completion.text else []
    events = parser.feed(completion.text)
    return events if completion.finish_reason is None else events + parser.finish()


async def answer_now(
    state: ServerState, body: GenerationRequest, asked: Generation, writer: Writer, headers: dict[str, str]
) -> Response:
    """The answer: as a whole at the end, or as a stream of events."""
    if body.use_beam_search:
        if body.is_streamed:
            return await EventStream.start(writer.events(beam_search.stream(state, body, asked)), headers)
        outputs = await beam_search.run(state, body, asked)
    else:
        streams = await generation.start(state, asked)
        if body.is_streamed:
            return await EventStream.start(writer.events(generation.merged(streams)), headers)
        outputs = await generation.collect(streams)
    return await generation.write(lambda: writer.response(outputs, headers), outputs)


async def respond(
    request: Request,
    decode: Callable[[bytes], tuple[B, list[str]]],
    prepare: Callable[[ServerState, B, list[str], str], Awaitable[tuple[Generation, Writer]]],
    names: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    """Answer one request, unless its client leaves before the answer begins.

    Args:
        decode: the body, and the names of the fields that were accepted without effect. Raises QuireErrors.
        prepare: makes the requests for the engine and the writer of the answer. It gets the state, the body, the names
            of the fields without effect, to which it may add, and the id of the HTTP request. Raises QuireErrors.
        names: the API's names of fields with another name in `B`, for errors.
    """
    return await respond_by(answer_now, request, decode, prepare, names)


def asked_rank(request: Request) -> int | None:
    """The replica that vLLM's header asks for. Raises InvalidRequestError."""
    text = request.headers.get(RANK_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_RANK_DIGITS):
        raise InvalidRequestError(
            f"{RANK_HEADER} is no index of a replica",
            value=text[:64],
            expected="a whole number from 0",
            fix="Leave it out: the replica with the least work is chosen",
            param="data_parallel_rank",
        )
    return int(text)


async def respond_by(
    write: Callable[[ServerState, B, Generation, W, dict[str, str]], Awaitable[Response]],
    request: Request,
    decode: Callable[[bytes], tuple[B, list[str]]],
    prepare: Callable[[ServerState, B, list[str], str], Awaitable[tuple[Generation, W]]],
    names: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    """Like `respond`, with a `write` that makes the answer from the result of `prepare`. Its headers come last."""
    state = state_of(request)
    body, ignored = await read_json(request, state.settings.limits, decode)

    async def answer() -> Response:
        try:
            await lora_admin.resolve(state, body.model)
            generation.check(state, body, ignored)
            asked, writer = await prepare(state, body, ignored, request_id_of(request.scope))
            if (rank := asked_rank(request)) is not None:
                asked = replace(asked, data_parallel_rank=rank)
            return await write(state, body, asked, writer, generation.ignored_headers(ignored))
        except InvalidRequestError as error:
            own_names = {"max_tokens": body.max_tokens_name, "structured_outputs": body.constraint_name}
            for name, given in {**own_names, **names}.items():
                error.rename(name, given)
            raise

    return await run_until_disconnect(answer(), request.receive)
