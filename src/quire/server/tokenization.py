"""POST /tokenize, POST /detokenize, GET /tokenizer_info: the model's tokenizer and chat template, without the model."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequestError, UnsupportedFieldError
from quire.frontend.async_engine import INLINE_PROMPT_CHARS
from quire.frontend.render_process import Render
from quire.frontend.tokenizer import Tokenizer
from quire.server.generation import ignored_headers
from quire.server.limits import read_json
from quire.server.protocol.fields import REFUSED_IN_DETOKENIZE, REFUSED_IN_TOKENIZE, BodyDecoder
from quire.server.protocol.tokenize import (
    OF_MESSAGES,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.server.state import ServerState, state_of

_tokenize_decoder = BodyDecoder(TokenizeRequest, REFUSED_IN_TOKENIZE)
_detokenize_decoder = BodyDecoder(DetokenizeRequest, REFUSED_IN_DETOKENIZE)


async def tokenize(request: Request) -> Response:
    """The token ids a prompt or a chat would have. Works before the engine is ready."""
    state = state_of(request)
    body, ignored = await read_json(request, state.settings.limits, _tokenize_decoder.decode)
    state.adapter(body.model)
    _check(body)
    text = body.prompt if body.prompt is not None else await _render(state, body)
    adds_special_tokens = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
    tokens, token_strs = await asyncio.to_thread(_encode, state, text, adds_special_tokens, body.return_token_strs)
    limits = state.engine.input_processor.limits
    answer = TokenizeResponse(
        count=len(tokens),
        max_model_len=state.max_model_len or limits.max_model_len,
        tokens=tokens,
        token_strs=token_strs,
    )
    return Response(msgspec.json.encode(answer), headers=ignored_headers(ignored), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """The text of token ids. Works before the engine is ready."""
    state = state_of(request)
    body, ignored = await read_json(request, state.settings.limits, _detokenize_decoder.decode)
    state.adapter(body.model)
    decode = partial(_decode, state, body.tokens)
    text = decode() if len(body.tokens) <= INLINE_PROMPT_CHARS else await asyncio.to_thread(decode)
    answer = DetokenizeResponse(prompt=text)
    return Response(msgspec.json.encode(answer), headers=ignored_headers(ignored), media_type="application/json")


async def tokenizer_info(request: Request) -> Response:
    """The content of tokenizer_config.json, without the names of files, and the chat template in use."""
    state = state_of(request)
    tokenizer = _tokenizer(state)
    info = {name: value for name, value in tokenizer.config.items() if not name.endswith(("_file", "_path"))}
    info.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    asked = state.settings.chat_template or "default"
    if (template := tokenizer.chat_templates.get(asked, state.settings.chat_template)) is not None:
        info["chat_template"] = template
    # Not msgspec: model_max_length is often 10^30, the word of transformers for no limit.
    return Response(json.dumps(info), media_type="application/json")


def _decode(state: ServerState, tokens: list[int]) -> str:
    vocabulary = _tokenizer(state)
    high = state.engine.input_processor.limits.vocab_size - 1
    if tokens and (min(tokens) < 0 or max(tokens) > high):
        raise InvalidRequestError(
            "tokens contains an id outside the vocabulary", expected=f"integers in [0, {high}]", param="tokens"
        )
    return vocabulary.decode(tokens, skip_special_tokens=False)


def _check(body: TokenizeRequest) -> None:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError(
            "The body needs exactly one of prompt and messages", fix="Send one of them", param="prompt"
        )
    if body.messages is None:
        for name in OF_MESSAGES:
            if getattr(body, name) not in (None, False, [], {}):
                raise UnsupportedFieldError(
                    f"{name} is only for messages", fix=f"Send messages, or remove {name}", param=name
                )


async def _render(state: ServerState, body: TokenizeRequest) -> str:
    assert body.messages is not None
    continues = bool(body.continue_final_message)
    return await state.renderer.render(
        Render(
            body.messages,
            tools=body.tools or None,
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            documents=body.documents,
            kwargs=state.template_kwargs(body.chat_template_kwargs),
        )
    )


def _encode(
    state: ServerState, text: str, add_special_tokens: bool, with_strings: bool | None
) -> tuple[list[int], list[str] | None]:
    """Token ids and, if asked for, the vocabulary's spelling of each."""
    tokens = state.engine.input_processor.encode(text, add_special_tokens)
    if not with_strings:
        return tokens, None
    vocabulary = _tokenizer(state)
    return tokens, [vocabulary.id_to_token(token_id) or "" for token_id in tokens]


def _tokenizer(state: ServerState) -> Tokenizer:
    if state.tokenizer is None:
        raise InvalidRequestError(
            "This model runs without a tokenizer", fix="Start the server without --skip-tokenizer-init"
        )
    return state.tokenizer
