"""Chat messages in the form of templates: plain JSON, content as a string or text parts, parsed tool arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequestError, UnsupportedFieldError

MAX_DEPTH = 64  # the most levels of JSON in messages, tools and template arguments
TEXT_PART_TYPES = ("text", "input_text", "output_text")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # synonyms; each template reads another


def plain(value: Any, param: str, depth: int = 0) -> Any:
    """A copy with JSON types only, because a template must not reach methods of other types.

    Raises:
        InvalidRequestError: another type, a non-finite number, or more than MAX_DEPTH levels.
    """
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"{param} is nested too deeply", expected=f"at most {MAX_DEPTH} levels", param=param)
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int(value)
        case float() if math.isfinite(value):
            return float(value)
        case Mapping():
            return {_key(key, param): plain(item, param, depth + 1) for key, item in value.items()}
        case list() | tuple():
            return [plain(item, param, depth + 1) for item in value]
    raise InvalidRequestError(
        f"{param} contains a value of type {type(value).__name__}",
        expected="JSON: finite numbers, strings, lists, objects",
        param=param,
    )


def _key(key: Any, param: str) -> str:
    if not isinstance(key, str):
        raise InvalidRequestError(
            f"{param} contains a key of type {type(key).__name__}", expected="strings", param=param
        )
    return str.__str__(key)


def normalise_messages(
    messages: Sequence[Mapping[str, Any]], *, content_as_parts: bool, keep_strings: bool = True
) -> list[dict[str, Any]]:
    """A fresh list of messages that any template can read.

    Args:
        messages: `{"role": ..., "content": ...}` and other keys for the template. Content is a string or a list of text
            parts. In an assistant message it may be None or missing and becomes "".
        content_as_parts: the template reads lists of parts; otherwise parts are joined by newlines.
        keep_strings: strings are not turned into parts, even with `content_as_parts`.

    Raises:
        InvalidRequestError: malformed messages; `param` is the path. UnsupportedFieldError: a part is not text.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError(
            "messages is empty or not a list", expected="a list of at least one message", param="messages"
        )
    return [
        _normalise_message(message, f"messages[{index}]", content_as_parts, keep_strings)
        for index, message in enumerate(messages)
    ]


def _normalise_message(message: Any, param: str, content_as_parts: bool, keep_strings: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{param} is not an object", expected='{"role": ..., "content": ...}', param=param)
    clean = {key: value for key, value in plain(message, param).items() if value is not None}
    role = clean.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(
            f"{param} has no role", expected="a string such as user, assistant or system", param=f"{param}.role"
        )
    clean["content"] = _normalise_content(
        clean.get("content"), role, f"{param}.content", content_as_parts, keep_strings
    )
    if "tool_calls" in clean:
        clean["tool_calls"] = _normalise_tool_calls(clean["tool_calls"], f"{param}.tool_calls")
    reasoning = next((clean[name] for name in REASONING_FIELDS if name in clean), None)
    if reasoning is not None:
        clean = {"thinking": reasoning} | clean | {"reasoning_content": reasoning}
    return clean


def _normalise_content(
    content: Any, role: str, param: str, as_parts: bool, keep_strings: bool
) -> str | list[dict[str, Any]]:
    if content is None:
        if role != "assistant":
            raise InvalidRequestError(f"{param} is missing", expected="a string or a list of text parts", param=param)
        content = ""
    if isinstance(content, str):
        return content if keep_strings or not as_parts else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{param} has the wrong type", expected="a string or a list of text parts", param=param
        )
    texts = [_part_text(part, f"{param}[{index}]") for index, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)


def _part_text(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequestError(
            f"{param} is not a content part", expected='{"type": "text", "text": ...}', param=param
        )
    kind = part.get("type", "text")
    if kind not in TEXT_PART_TYPES:
        raise UnsupportedFieldError(
            f"{param} is not text; this model reads text only",
            value=kind,
            expected="type text",
            fix="Remove the part",
            param=f"{param}.type",
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(
            f"{param} has no text", expected='{"type": "text", "text": ...}', param=f"{param}.text"
        )
    text: str = part["text"]
    return text


def _normalise_tool_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    """Tool calls with arguments as objects: clients send a JSON string, and templates write it with tojson."""
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{param} is not a list", param=param)
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidRequestError(
                f"{param}[{index}] is not a tool call",
                expected='{"function": {"name": ..., "arguments": ...}}',
                param=f"{param}[{index}]",
            )
        path = f"{param}[{index}].function.arguments"
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                fix = "Send the arguments as the model wrote them"
                raise InvalidRequestError(f"{path} is not JSON: {error}", fix=fix, param=path) from error
        function["arguments"] = plain(arguments, path)
    return calls
