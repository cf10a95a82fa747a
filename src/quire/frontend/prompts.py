"""The shapes of a prompt, as in vLLM: text, token ids, a dictionary with one of them, or a list of these."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

from quire.errors import InvalidRequestError, UnsupportedFieldError

MAX_CACHE_SALT_CHARS = 256


class TextPrompt(TypedDict):
    """A prompt as text. `cache_salt`: only requests with the same salt share blocks of the prefix cache."""

    prompt: str
    cache_salt: NotRequired[str | None]


class TokensPrompt(TypedDict):
    """A prompt as token ids. `prompt` is only its text in the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt

_KNOWN_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_SHAPES = 'a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}'


def split_prompts(prompts: Any) -> list[PromptType]:
    """One prompt or a list of prompts as a list of prompts. A list of integers is one prompt.

    Raises:
        InvalidRequestError: an empty list, or another type.
    """
    if isinstance(prompts, (str, Mapping)):
        return [cast("PromptType", prompts)]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidRequestError(
            f"The prompt has the wrong type, {type(prompts).__name__}",
            expected=f"{_SHAPES}, or a list of these",
            param="prompt",
        )
    if not prompts:
        raise InvalidRequestError("The list of prompts is empty", expected="at least one prompt", param="prompt")
    if all(_is_token_id(item) for item in prompts):
        return [prompts]
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, (str, Mapping, list, tuple)):
            raise InvalidRequestError(
                f"Prompt {index} has the wrong type, {type(prompt).__name__}",
                expected=_SHAPES,
                param=f"prompt[{index}]",
            )
    return list(prompts)


def read_prompt(prompt: PromptType) -> tuple[str | None, list[int] | None, str | None]:
    """Text, token ids (a new list) and cache salt of one prompt. Text or token ids or both are set.

    Raises:
        InvalidRequestError: text and ids are missing or of a wrong type. UnsupportedFieldError: images and other parts.
    """
    if isinstance(prompt, str):
        return prompt, None, None
    if not isinstance(prompt, Mapping):
        return None, plain_token_ids(prompt), None
    for key, value in prompt.items():
        if key not in _KNOWN_KEYS and value is not None:
            raise UnsupportedFieldError(
                "Unknown key in a prompt", value=key, expected=", ".join(_KNOWN_KEYS), param="prompt"
            )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(
            f"prompt has the wrong type, {type(text).__name__}", expected="a string", param="prompt"
        )
    if text is None and ids is None:
        raise InvalidRequestError(
            "A prompt dictionary has no prompt and no prompt_token_ids", expected=_SHAPES, param="prompt"
        )
    return text, None if ids is None else plain_token_ids(ids), check_cache_salt(prompt.get("cache_salt"))


def plain_token_ids(ids: Any) -> list[int]:
    """A list of Python ints from any sequence of integers. Raises InvalidRequestError."""
    if isinstance(ids, Sequence) and not isinstance(ids, (str, bytes)):
        if set(map(type, ids)) <= {int}:
            return list(ids)
        if all(_is_token_id(item) for item in ids):
            return [operator.index(item) for item in ids]
    raise InvalidRequestError(
        "prompt_token_ids is not a list of integers", expected="a list of token ids", param="prompt_token_ids"
    )


def _is_token_id(item: Any) -> bool:
    if isinstance(item, int):
        return not isinstance(item, bool)
    try:
        operator.index(item)
    except TypeError:  # an array of several numbers has __index__ too
        return False
    return True


def check_cache_salt(salt: Any) -> str | None:
    """The salt. Raises InvalidRequestError if it is no usable string."""
    if salt is None:
        return None
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS or not is_unicode(salt):
        raise InvalidRequestError(
            "cache_salt is not usable",
            expected=f"a string of 1 to {MAX_CACHE_SALT_CHARS} characters",
            fix="Leave it out to share the cache",
            param="cache_salt",
        )
    return salt


def is_unicode(text: str) -> bool:
    """False for lone surrogates: JSON can contain them, but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
