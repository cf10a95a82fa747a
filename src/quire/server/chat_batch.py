"""POST /v1/chat/completions/batch: several chats in one body, answered together, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import UnsupportedFieldError
from quire.outputs import RequestOutput
from quire.server import chat, generation
from quire.server.answer import respond_by
from quire.server.chat import ChatWriter
from quire.server.generation import Generation
from quire.server.protocol.chat import NOT_IN_BATCHES, BatchChatRequest
from quire.server.protocol.common import make_usage
from quire.server.protocol.fields import REFUSED_IN_CHAT, BodyDecoder
from quire.server.state import ServerState
from quire.server.timeline import timings

_decoder = BodyDecoder(BatchChatRequest, REFUSED_IN_CHAT)


async def batch(request: Request) -> Response:
    """One answer with the choices of every chat, in their order."""
    return await respond_by(_answer, request, _decoder.decode, _prepare)


async def _prepare(
    state: ServerState, body: BatchChatRequest, ignored: list[str], request_id: str
) -> tuple[Generation, _BatchWriter]:
    for name in (*NOT_IN_BATCHES, "prompt_logprobs"):
        if (value := getattr(body, name)) is not None and value is not False:
            raise UnsupportedFieldError(
                f"{name} cannot be used with several chats", fix="Send each to /v1/chat/completions", param=name
            )
    parts: list[tuple[Generation, ChatWriter]] = []
    for messages in body.messages:
        one = msgspec.structs.replace(body, messages=messages)
        parts.append(await chat.prepare(state, one, ignored if not parts else [], request_id))
    return parts[0][0], _BatchWriter(parts)


async def _answer(
    state: ServerState, body: BatchChatRequest, asked: Generation, writer: _BatchWriter, headers: dict[str, str]
) -> Response:
    chats = [replace(each, data_parallel_rank=asked.data_parallel_rank) for each in writer.chats]
    outputs = await generation.collect(await generation.start(state, *chats))
    return await generation.write(lambda: writer.response(outputs, headers), outputs)


class _BatchWriter:
    """Puts the answers of several chats into one.

    Attributes:
        chats: the engine requests of each. Its prompt decides on its grammar and its budget for thinking.
    """

    def __init__(self, parts: Sequence[tuple[Generation, ChatWriter]]) -> None:
        self.chats = [asked for asked, _ in parts]
        self._writers = [writer for _, writer in parts]

    def response(self, outputs: Sequence[RequestOutput], headers: dict[str, str]) -> Response:
        """The whole answer: choice i of chat k has the index k * n + i."""
        answers = [writer.answer(output) for writer, output in zip(self._writers, outputs, strict=True)]
        num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
        whole = answers[0]
        whole.choices = [choice for answer in answers for choice in answer.choices]
        for index, choice in enumerate(whole.choices):
            choice.index = index
        whole.usage = make_usage(
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(answer.usage.completion_tokens for answer in answers),
            num_cached_tokens,
        )
        if whole.metrics is not None:
            metrics = [output.metrics for output in outputs if output.metrics is not None]
            whole.metrics = timings(metrics, whole.usage.completion_tokens, num_cached_tokens)
        return Response(msgspec.json.encode(whole), headers=headers, media_type="application/json")
