"""Bodies of POST /tokenize and POST /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from quire.server.protocol.chat import MAX_DOCUMENTS, MAX_MESSAGES, MAX_TOOLS

MAX_TOKENS = 1_048_576
# Fields that say nothing about a prompt.
OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools", "documents")


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A prompt, or messages as of a chat: exactly one of them. The fields after messages belong to it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    documents: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_DOCUMENTS)] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """`token_strs` is the vocabulary's own spelling of each token, if it was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS)]


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """The text, special tokens included."""

    prompt: str
