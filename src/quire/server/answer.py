"""What the routes that generate have in common: from the body to the checks to the answer, whole or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequestError
from quire.outputs import RequestOutput
from quire.server import beam_search, generation, lora_admin
from quire.server.generation import Generation
from quire.server.limits import read_json
from quire.server.protocol.common import GenerationRequest
from quire.server.protocol.fields import BodyDecoder
from quire.server.sse import EventStream, run_until_disconnect
from quire.server.state import ServerState, request_id_of, state_of

B = TypeVar("B", bound=GenerationRequest)


class Writer(Protocol):
    """Turns the outputs of one request into the shape of its API."""

    def response(self, outputs: Sequence[RequestOutput], headers: dict[str, str]) -> Response:
        """The whole answer, from the final output of every prompt."""
        ...

    def events(self, parts: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, from (index of the prompt, output)."""
        ...


async def respond(
    request: Request,
    decoder: BodyDecoder[B],
    prepare: Callable[[ServerState, B, list[str], str], Awaitable[tuple[Generation, Writer]]],
) -> Response:
    """Answer one request, unless its client leaves before the answer begins.

    Args:
        prepare: what is asked of the engine and who writes the answer, by the state, the body, the names of the fields
            without effect, which it may add to, and the id of the HTTP request. Raises QuireErrors.
    """
    state = state_of(request)
    body, ignored = await read_json(request, state.settings.limits, decoder.decode)

    async def answer() -> Response:
        try:
            await lora_admin.resolve(state, body.model)
            generation.check(state, body, ignored)
            asked, writer = await prepare(state, body, ignored, request_id_of(request.scope))
            return await _answer(state, body, asked, writer, generation.ignored_headers(ignored))
        except InvalidRequestError as error:
            error.rename("max_tokens", body.max_tokens_name)
            error.rename("structured_outputs", body.constraint_name)
            raise

    return await run_until_disconnect(answer(), request.receive)


async def _answer(
    state: ServerState, body: GenerationRequest, asked: Generation, writer: Writer, headers: dict[str, str]
) -> Response:
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
