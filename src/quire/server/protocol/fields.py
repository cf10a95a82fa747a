"""The body fields that are refused, with their replacement, and the fields that are accepted and named in a header.

A field that would change the generated text and has no effect here must never be dropped: the client would take
unconstrained text for a constrained one. So every other name is refused as unknown.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import msgspec

from quire.errors import InvalidRequestError, UnsupportedFieldError

T = TypeVar("T", bound=msgspec.Struct)

# Accepted, without effect on the generated text, and named in the answer's header.
IGNORED_FIELDS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "session_id",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",
        "cache_control",
        "inference_geo",
    )
)

_GUIDED = 'vLLM replaced it by structured_outputs: {"json": ...}, "regex", "choice" or "grammar"'
_TEXT_ONLY = "This server reads and writes text only: remove the field"
_FUNCTIONS = "OpenAI replaced it: use tools and tool_choice"
_TOOLS = "Use POST /v1/chat/completions: tools are not supported here yet"


@dataclass(frozen=True)
class Refusal:
    """The advice for a refused field. `neutral`: accepted values that ask for nothing; null always is."""

    fix: str
    neutral: tuple[Any, ...] = ()


_REFUSED_EVERYWHERE: dict[str, Refusal] = {
    "guided_json": Refusal(_GUIDED),
    "guided_regex": Refusal(_GUIDED),
    "guided_choice": Refusal(_GUIDED),
    "guided_grammar": Refusal(_GUIDED),
    "guided_decoding_backend": Refusal(_GUIDED),
    "guided_whitespace_pattern": Refusal(_GUIDED),
    "grammar": Refusal('Use "structured_outputs": {"grammar": ...}'),
    "json_schema": Refusal('Use "structured_outputs": {"json": ...}, or response_format'),
    "early_stopping": Refusal("Beam search always runs until max_tokens: remove the field", (False,)),
    "logits_processors": Refusal("Use logit_bias, allowed_token_ids or bad_words"),
    "repetition_detection": Refusal("Use repetition_penalty or frequency_penalty"),
    "watermarking": Refusal("Watermarks are not supported: remove the field"),
    "guide": Refusal("Remove the field"),
    "best_of": Refusal("Use n, and choose among the answers by their logprobs", (1,)),
    "kv_transfer_params": Refusal("KV transfer is not supported yet: remove the field"),
    "vllm_xargs": Refusal("Put what you need into fields of their own"),
    "return_prompt_text": Refusal("Use echo, or return_token_ids", (False,)),
    "prompt_embeds": Refusal("Send text or token ids"),
    "max_new_tokens": Refusal("Use max_tokens"),
    "num_predict": Refusal("Use max_tokens"),
    "n_predict": Refusal("Use max_tokens"),
    "repeat_penalty": Refusal("Use repetition_penalty"),
    "typical_p": Refusal("Use top_p or min_p", (1, 1.0)),
    "do_sample": Refusal("Use temperature; 0 is greedy"),
}
REFUSED_IN_CHAT: dict[str, Refusal] = {
    **_REFUSED_EVERYWHERE,
    "functions": Refusal(_FUNCTIONS, ([],)),
    "function_call": Refusal(_FUNCTIONS, ("none", "auto")),
    "modalities": Refusal(_TEXT_ONLY, (["text"],)),
    "audio": Refusal(_TEXT_ONLY),
    "mm_processor_kwargs": Refusal(_TEXT_ONLY, ({},)),
    "media_io_kwargs": Refusal(_TEXT_ONLY, ({},)),
    "web_search_options": Refusal("There is no web search: remove the field"),
    "enable_thinking": Refusal('Use "chat_template_kwargs": {"enable_thinking": ...}'),
    "verbosity": Refusal("Say it in the system message"),
    "chat_template": Refusal("Templates in requests are not accepted: start the server with --chat-template"),
    "prompt": Refusal("Use messages, or POST /v1/completions"),
    "suffix": Refusal("Put the text into a message"),
}
REFUSED_IN_COMPLETIONS: dict[str, Refusal] = {
    **_REFUSED_EVERYWHERE,
    "messages": Refusal("Use prompt, or POST /v1/chat/completions"),
    "max_completion_tokens": Refusal("Use max_tokens"),
    "top_logprobs": Refusal("Use logprobs with a number"),
    "tools": Refusal("Use POST /v1/chat/completions", ([],)),
    "chat_template_kwargs": Refusal("Use POST /v1/chat/completions", ({},)),
    "reasoning_effort": Refusal("Use POST /v1/chat/completions"),
    "include_reasoning": Refusal("Use POST /v1/chat/completions", (True, False)),
    "thinking_token_budget": Refusal("Use POST /v1/chat/completions", (-1,)),
    "parallel_tool_calls": Refusal("Use POST /v1/chat/completions", (True, False)),
}
REFUSED_IN_MESSAGES: dict[str, Refusal] = {
    "container": Refusal("There are no containers: remove the field"),
    "context_management": Refusal("Send the messages that shall be read"),
    "mcp_servers": Refusal(_TOOLS, ([],)),
    "prompt": Refusal("Use messages"),
    "stop": Refusal("Use stop_sequences"),
    "n": Refusal("Send several requests", (1,)),
    "max_completion_tokens": Refusal("Use max_tokens"),
}
REFUSED_IN_RESPONSES: dict[str, Refusal] = {
    "max_tool_calls": Refusal("Set parallel_tool_calls to false, or count the calls yourself"),
    "conversation": Refusal("Use previous_response_id"),
    "prompt": Refusal("Put the text into input"),
    "context_management": Refusal("Send the messages that shall be read"),
    "moderation": Refusal("There is no moderation: remove the field"),
    "messages": Refusal("Use input, or POST /v1/chat/completions"),
    "max_tokens": Refusal("Use max_output_tokens"),
    "max_completion_tokens": Refusal("Use max_output_tokens"),
    "response_format": Refusal("Use text.format", ({"type": "text"},)),
    "n": Refusal("Send several requests", (1,)),
}
_TEMPLATE = Refusal("Templates in requests are not accepted: start the server with --chat-template")
REFUSED_IN_TOKENIZE: dict[str, Refusal] = {
    "chat_template": _TEMPLATE,
    "mm_processor_kwargs": Refusal(_TEXT_ONLY, ({},)),
    "media_io_kwargs": Refusal(_TEXT_ONLY, ({},)),
    "text": Refusal("Use prompt"),
    "content": Refusal("Use prompt"),
    "tokens": Refusal("Use POST /detokenize"),
}
REFUSED_IN_DETOKENIZE: dict[str, Refusal] = {
    "prompt": Refusal("Use POST /tokenize"),
    "token_ids": Refusal("Use tokens"),
}
# A neutral value is never longer than this, so a longer one need not be decoded.
_MAX_NEUTRAL_BYTES = 64
_WIDEST_INTEGER = 2**64  # no field takes a larger integer
_MAX_TYPE_ERROR_CHARS = 200
# The escape of half of a character: a first half without a second one behind it, or a second half without a first one.
_HALF_PAIR = re.compile(rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F])", re.DOTALL)


class BodyDecoder(Generic[T]):
    """Decodes one API's JSON body: every field is known, named as ignored, or refused."""

    def __init__(self, request_type: type[T], refused: dict[str, Refusal]) -> None:
        self._known = frozenset(request_type.__struct_fields__)
        self._refused = refused
        self._type, self._typed = request_type, msgspec.json.Decoder(request_type)
        fields = zip(request_type.__struct_fields__, request_type.__struct_encode_fields__, strict=True)
        types = get_type_hints(request_type)
        self._with_integers = [sent for name, sent in fields if _has_integers(types[name])]
        self._names = msgspec.json.Decoder(dict[str, msgspec.Raw])

    def decode(self, body: bytes) -> tuple[T, list[str]]:
        """The request, and the names of the fields that were accepted without effect.

        Raises:
            InvalidRequestError: malformed JSON or a value of the wrong type, naming the field in `param`.
            UnsupportedFieldError: a field that is refused or unknown, with its replacement.
        """
        try:
            ignored = [name for name, raw in self._names.decode(body).items() if self._is_ignored(name, raw)]
            return self._decode_typed(body), ignored
        except msgspec.ValidationError as error:
            raise _wrong_type(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if _HALF_PAIR.search(body.replace(rb"\\", b"--")):  # msgspec's error names the end of the body, or nothing
                raise InvalidRequestError(
                    "A string in the body has half of a surrogate pair, which is no character",
                    expected="whole characters, such as \\ud83d\\ude00",
                    fix="Do not cut texts between the two halves",
                ) from None
            detail = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            raise InvalidRequestError(
                f"The body is not valid JSON: {detail}", expected="one JSON object in UTF-8"
            ) from None

    def _decode_typed(self, body: bytes) -> T:
        try:
            return self._typed.decode(body)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            try:
                fields = msgspec.json.decode(body)
            except msgspec.MsgspecError:  # the body has a value that fits no field; the first error names a field
                raise error from None
        for name in self._with_integers:
            if name in fields:
                fields[name] = with_integers(fields[name])
        return msgspec.convert(fields, self._type)

    def _is_ignored(self, name: str, raw: msgspec.Raw) -> bool:
        """Whether the field is accepted without effect; False for a known one. Raises for the others."""
        if name in self._known:
            return False
        if name in IGNORED_FIELDS:
            return True
        refusal = self._refused.get(name)
        if refusal is None:
            raise self._unknown_field(name)
        text = bytes(raw)
        if len(text) <= _MAX_NEUTRAL_BYTES:
            value = msgspec.json.decode(text)
            # JSON's true is not 1, but 1.0 is.
            if value is None or any(
                value == item and isinstance(value, bool) == isinstance(item, bool) for item in refusal.neutral
            ):
                return True
        raise UnsupportedFieldError(f"{name} is not supported", fix=refusal.fix, param=name)

    def _unknown_field(self, name: str) -> UnsupportedFieldError:
        shown = name[:64]
        near = difflib.get_close_matches(shown, sorted(self._known), n=1)
        fix = f"Did you mean {near[0]}?" if near else "Remove it"
        return UnsupportedFieldError(f"Unknown field {shown!r}", fix=fix, param=shown)


def _has_integers(kind: Any) -> bool:
    """Whether a type is an integer, or has some within."""
    parts = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        parts = tuple(get_type_hints(kind).values())
    return kind is int or any(map(_has_integers, parts))


def with_integers(value: Any) -> Any:
    """The same JSON with 1.0 and 1e3 as integers, which they are in JSON Schema too."""
    if isinstance(value, list):
        return [with_integers(each) for each in value]
    if isinstance(value, dict):
        return {name: with_integers(each) for name, each in value.items()}
    is_integer = isinstance(value, float) and value.is_integer() and abs(value) <= _WIDEST_INTEGER
    return int(value) if is_integer else value


def _wrong_type(message: str) -> InvalidRequestError:
    """msgspec's "Expected `int`, got `str` - at `$.a.b[0]`" with the place as `param`."""
    what, _, place = message.partition(" - at `")
    param = place.rstrip("`").removeprefix("$").removeprefix(".") or None
    what = what.replace("`", "")
    if len(what) > _MAX_TYPE_ERROR_CHARS:  # the text has the whole value of an enumeration, which may be long
        what = what[:_MAX_TYPE_ERROR_CHARS] + "..."
    return InvalidRequestError(f"{param}: {what}" if param else f"The body has a wrong shape: {what}", param=param)
