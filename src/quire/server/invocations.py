"""POST /invocations: the one route of SageMaker's endpoints, for chats and plain completions."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequestError
from quire.server import chat, completions
from quire.server.answer import Writer, respond
from quire.server.generation import Generation
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.state import ServerState


async def invocations(request: Request) -> Response:
    """As /v1/chat/completions for a body with messages, as /v1/completions for one with a prompt."""
    return await respond(request, _decode, _prepare)


def _decode(data: bytes) -> tuple[ChatRequest | CompletionRequest, list[str]]:
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        names = {name for name, value in fields.items() if bytes(value) != b"null"}
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return chat.decoder.decode(data)  # the decoder's error says what is wrong
    if "messages" in names:
        return chat.decoder.decode(data)
    if "prompt" in names:
        return completions.decoder.decode(data)
    raise InvalidRequestError("The body has no messages and no prompt", fix="Send one of them", param="messages")


async def _prepare(
    state: ServerState, body: ChatRequest | CompletionRequest, ignored: list[str], request_id: str
) -> tuple[Generation, Writer]:
    if isinstance(body, ChatRequest):
        return await chat.prepare(state, body, ignored, request_id)
    return await completions.prepare(state, body, ignored, request_id)
