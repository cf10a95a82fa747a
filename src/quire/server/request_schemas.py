"""The rules of a request body beyond its types, as JSON schema: each field's bounds, and the rules between fields.

The types come from the structs of the bodies; these rules are checked after decoding. Rules that depend on more (the
number of tokens of a prompt, the chat template) are not here. A test sends bodies that the schemas accept and refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.field_checks import ABOVE_ZERO
from quire.frontend.chat_messages import TEXT_PART_TYPES
from quire.frontend.chat_template import RESERVED_KWARGS
from quire.frontend.input_processor import MAX_PRIORITY, ModelLimits
from quire.frontend.live_limits import LiveLimit
from quire.frontend.prompts import MAX_CACHE_SALT_CHARS
from quire.option import LEAST_SECONDS, MOST_SECONDS
from quire.sampling_params import (
    CONSTRAINTS,
    FLOAT_RANGES,
    INT_RANGES,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_VOCAB_SIZE,
    STRING_LIMITS,
    TOKEN_ID_LIMITS,
)
from quire.server.generation import NOT_WITH_BEAMS
from quire.server.limits import Limits
from quire.server.protocol.chat import (
    MAX_CHATS,
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_TOOLS,
    NOT_IN_BATCHES,
    BatchChatRequest,
    ChatRequest,
)
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.fields import (
    IGNORED_FIELDS,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_DETOKENIZE,
    REFUSED_IN_MESSAGES,
    REFUSED_IN_RESPONSES,
    REFUSED_IN_TOKENIZE,
    Refusal,
)
from quire.server.protocol.messages import CountTokensRequest, MessagesRequest
from quire.server.protocol.responses import ITEM_FIELDS, InputTokensRequest, ResponsesRequest
from quire.server.protocol.tokenize import MAX_TOKENS, OF_MESSAGES, DetokenizeRequest, TokenizeRequest
from quire.server.state import SANE_ID

Schema = dict[str, Any]

_REFUSED: dict[type[msgspec.Struct], Mapping[str, Refusal]] = {
    ChatRequest: REFUSED_IN_CHAT,
    BatchChatRequest: REFUSED_IN_CHAT,
    CompletionRequest: REFUSED_IN_COMPLETIONS,
    CountTokensRequest: REFUSED_IN_MESSAGES,
    MessagesRequest: REFUSED_IN_MESSAGES,
    InputTokensRequest: REFUSED_IN_RESPONSES,
    ResponsesRequest: REFUSED_IN_RESPONSES,
    TokenizeRequest: REFUSED_IN_TOKENIZE,
    DetokenizeRequest: REFUSED_IN_DETOKENIZE,
}
_DURATION = "^(?=.*[1-9])[0-9]{1,5}([.][0-9]{1,3})?(ms|s)?$"  # of the accepted texts, those without an exponent
_NULL: Schema = {"type": "null"}
_TRUE: Schema = {"const": True}
_EMPTY: Schema = {"enum": [None, False, [], {}]}
_NOT_TRUE: Schema = {"enum": [None, False]}


@dataclass(frozen=True)
class SchemaBounds:
    """Facts that the schemas depend on.

    Args:
        has_start_token: the tokenizer begins every text with a token of its own, so that an empty prompt has one too.
        has_infill: the model has tokens for filling in the middle.
        calls_tools: tool_choice may be auto.
        bounds_reasoning: thinking_token_budget may be a number of tokens.
    """

    model: ModelLimits
    request: Limits = Limits()
    has_start_token: bool = False
    has_infill: bool = False
    calls_tools: bool = False
    bounds_reasoning: bool = False


def refine(components: dict[str, Schema], bounds: SchemaBounds) -> None:
    """Complete the schemas of the request bodies, which hold only types so far, in place."""
    fields: dict[type[msgspec.Struct], dict[str, Schema]] = {
        ChatRequest: {**_generation_fields(bounds), **_chat_fields(bounds)},
        BatchChatRequest: {**_generation_fields(bounds), **_chat_fields(bounds), **_batch_fields()},
        CompletionRequest: {**_generation_fields(bounds), **_completion_fields(bounds)},
        CountTokensRequest: {},
        MessagesRequest: _messages_fields(bounds),
        InputTokensRequest: {},
        ResponsesRequest: _responses_fields(bounds),
        TokenizeRequest: _template_fields(),
        DetokenizeRequest: {"tokens": _token_ids(bounds, MAX_TOKENS)},
    }
    rules = {
        ChatRequest: [*_generation_rules(bounds), *_CHAT_RULES, _tools_rule(bounds), _CONTINUES_OR_BEGINS],
        BatchChatRequest: [*_generation_rules(bounds), *_CHAT_RULES, _tools_rule(bounds), _CONTINUES_OR_BEGINS],
        CompletionRequest: [*_generation_rules(bounds), *_COMPLETION_RULES, _INFILL],
        CountTokensRequest: [],
        MessagesRequest: [_tool_blocks_rule(bounds)],
        InputTokensRequest: [_flat_tools_rule(bounds)],
        ResponsesRequest: [_BACKGROUND_IS_STORED, _flat_tools_rule(bounds)],
        TokenizeRequest: [_ONE_OF_TWO, _CONTINUES_OR_BEGINS],
        DetokenizeRequest: [],
    }
    for kind, refused in _REFUSED.items():
        schema = components[kind.__name__]
        properties = schema["properties"]
        for name, field in fields[kind].items():
            properties[name] = field if name in schema["required"] else {"anyOf": [field, _NULL], "default": None}
        for name, refusal in refused.items():
            properties[name] = {"enum": [None, *refusal.neutral], "description": f"Not supported. {refusal.fix}"}
        for name in sorted(IGNORED_FIELDS - properties.keys()):
            properties[name] = {"description": "Accepted without effect, and named in x-quire-ignored-fields"}
        schema["additionalProperties"] = False
        if rules[kind]:
            schema["allOf"] = rules[kind]
    components["InputItem"]["anyOf"] = [
        {
            "properties": {"type": {"const": kind}, **{name: {"not": _NULL} for name in names}},
            "required": [*names, *(["type"] if kind != "message" else [])],
        }
        for kind, names in ITEM_FIELDS.items()
    ]
    constraint = components["StructuredOutputsParams"]
    constraint["properties"] |= {name: {"anyOf": [field, _NULL]} for name, field in _constraint_fields().items()}
    constraint["allOf"] = _CONSTRAINT_RULES
    components["ResponseFormat"]["allOf"] = [_FORMAT_HAS_SCHEMA]
    components["ToolWish"]["allOf"] = [_TOOL_HAS_NAME]


def config_body(limits: Mapping[str, LiveLimit]) -> Schema:
    """Of POST /v1/config: the limits that this server may move, within their bounds."""
    fields: dict[str, Schema] = {}
    for name, limit in limits.items():
        if limit.maximum is None:
            seconds = _number(max(limit.minimum, LEAST_SECONDS), MOST_SECONDS)
            fields[name] = {"anyOf": [seconds, {"type": "string", "pattern": _DURATION}, _NULL]}
        else:
            bound = _number if name == "slo_attainment" else _integer
            fields[name] = bound(limit.minimum, limit.maximum)
    return {"type": "object", "properties": fields, "minProperties": 1, "additionalProperties": False}


def _integer(low: float, high: float | None = None) -> Schema:
    return {"type": "integer", "minimum": low, **({} if high is None else {"maximum": high})}


def _number(low: float, high: float) -> Schema:
    lowest = {"exclusiveMinimum": 0} if low == ABOVE_ZERO else {"minimum": low}
    return {"type": "number", **lowest, "maximum": high}


def _list(items: Schema, most: int | None = None, least: int = 0) -> Schema:
    return {
        "type": "array",
        "items": items,
        **({"minItems": least} if least else {}),
        **({} if most is None else {"maxItems": most}),
    }


def _token_ids(bounds: SchemaBounds, most: int | None = None, least: int = 0) -> Schema:
    return _list(_integer(0, bounds.model.vocab_size - 1), most, least)


def _num_logprobs(bounds: SchemaBounds) -> Schema:
    most, vocab_size = bounds.model.max_logprobs, bounds.model.vocab_size
    if most == -1:
        return _integer(-1, MAX_VOCAB_SIZE)
    return _integer(-1 if vocab_size <= most else 0, most)


def _generation_fields(bounds: SchemaBounds) -> dict[str, Schema]:
    """Fields that chat and plain completions have in common."""
    # Of strings the limit is one of bytes, which a schema cannot say.
    strings = {
        name: _list({"type": "string", "minLength": 1, "maxLength": longest}, most)
        for name, (most, longest) in STRING_LIMITS.items()
    }
    word = {**strings["bad_words"]["items"], "pattern": r"\S"}
    one_stop = strings["stop"]["items"]
    return {
        **{name: _integer(low, high) for name, (low, high) in INT_RANGES.items()},
        **{name: _number(low, high) for name, (low, high) in FLOAT_RANGES.items()},
        **{
            name: _token_ids(bounds, most, least=int(name == "allowed_token_ids"))
            for name, most in TOKEN_ID_LIMITS.items()
        },
        "stop": {"anyOf": [one_stop, strings["stop"]]},
        "bad_words": {**strings["bad_words"], "items": word},
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": f"^({decimals_below(bounds.model.vocab_size)})$"},
            "additionalProperties": _number(-100, 100),
            "maxProperties": MAX_LOGIT_BIAS,
        },
        "prompt_logprobs": _num_logprobs(bounds),
        "length_penalty": _number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        "priority": _integer(-MAX_PRIORITY, MAX_PRIORITY),
        "cache_salt": {"type": "string", "minLength": 1, "maxLength": MAX_CACHE_SALT_CHARS},
        "request_id": {"type": "string", "pattern": f"^{SANE_ID.pattern}$"},
        "truncate_prompt_tokens": {**_integer(-1), "not": {"const": 0}},
    }


def _constraint_fields() -> dict[str, Schema]:
    """Fields of structured_outputs. Of strings the limit is one of bytes, which a schema cannot say."""
    text = {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_BYTES}
    tags = _list({"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_BYTES}, MAX_STOP_STRINGS)
    return {
        **dict.fromkeys(("regex", "grammar", "structural_tag", "whitespace_pattern"), text),
        **dict.fromkeys(("reasoning_start", "reasoning_end", "answer_start"), tags),
        "choice": _list(text, MAX_CHOICES, least=1),
    }


def _completion_fields(bounds: SchemaBounds) -> dict[str, Schema]:
    text = {"type": "string", "minLength": int(not bounds.has_start_token)}
    ids = _token_ids(bounds, least=1)
    return {
        "prompt": {"anyOf": [text, ids, _list({"anyOf": [text, ids]}, bounds.request.max_prompts, 1)]},
        "suffix": {"type": "string"} if bounds.has_infill else {"const": ""},
        "max_tokens": _integer(0, INT_RANGES["max_tokens"][1]),
        "logprobs": _num_logprobs(bounds),
    }


def _chat_fields(bounds: SchemaBounds) -> dict[str, Schema]:
    return {
        **_template_fields(),
        "max_completion_tokens": _integer(*INT_RANGES["max_tokens"]),
        "top_logprobs": _num_logprobs(bounds),
        "thinking_token_budget": _integer(
            *INT_RANGES["thinking_token_budget"] if bounds.bounds_reasoning else (-1, -1)
        ),
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED_TOOL]},
    }


def _batch_fields() -> dict[str, Schema]:
    chats = _list(_template_fields()["messages"], MAX_CHATS, 1)
    return {"messages": chats, "prompt_logprobs": _NULL, **{name: {"const": False} for name in NOT_IN_BATCHES}}


def _messages_fields(bounds: SchemaBounds) -> dict[str, Schema]:
    shared = _generation_fields(bounds)
    names = ("max_tokens", "temperature", "top_p", "top_k", "cache_salt")
    return {**{name: shared[name] for name in names}, "stop_sequences": shared["stop"]["anyOf"][1]}


def _responses_fields(bounds: SchemaBounds) -> dict[str, Schema]:
    shared = {
        **_generation_fields(bounds),
        **_chat_fields(bounds),
        "max_output_tokens": _integer(*INT_RANGES["max_tokens"]),
    }
    own = ("messages", "tools", "tool_choice", "parallel_tool_calls")
    return {name: shared[name] for name in ResponsesRequest.__struct_fields__ if name in shared and name not in own}


def _template_fields() -> dict[str, Schema]:
    """What goes to the chat template."""
    part = {
        "type": "object",
        "properties": {"type": {"enum": list(TEXT_PART_TYPES)}, "text": {"type": "string"}},
        "required": ["text"],
    }
    content = {"anyOf": [{"type": "string"}, _list({"anyOf": [{"type": "string"}, part]})]}
    call = {"type": "object", "properties": {"function": {"type": "object"}}}
    message = {
        "type": "object",
        "properties": {
            "role": {"type": "string", "minLength": 1},
            "content": {"anyOf": [content, _NULL]},
            "tool_calls": {"anyOf": [_list(call), _NULL]},
        },
        "required": ["role"],
        "anyOf": [
            {"properties": {"content": content}, "required": ["content"]},
            {"properties": {"role": {"const": "assistant"}}},
        ],
    }
    reserved = [{"enum": sorted(RESERVED_KWARGS)}, {"pattern": "^_"}, {"pattern": "_token$"}]
    return {
        "messages": _list(message, MAX_MESSAGES, 1),
        "tools": _list({"type": "object"}, MAX_TOOLS),
        "documents": _list({"type": "object"}, MAX_DOCUMENTS),
        "chat_template_kwargs": {"type": "object", "propertyNames": {"not": {"anyOf": reserved}}},
    }


def _rule(description: str, *cases: dict[str, Schema]) -> Schema:
    """At least one of the cases: schemas of fields. A case with a field that must be there may not accept null."""
    return {"description": description, "anyOf": [_case(case) for case in cases]}


def _case(fields: dict[str, Schema]) -> Schema:
    """A field that is left out counts as null."""
    required = [name for name, schema in fields.items() if not _accepts_null(schema)]
    return {"properties": fields, **({"required": required} if required else {})}


def _accepts_null(schema: Schema) -> bool:
    if "enum" in schema:
        return None in schema["enum"]
    if "anyOf" in schema:
        return any(map(_accepts_null, schema["anyOf"]))
    return schema == _NULL or "not" in schema or schema.keys() <= {"maximum"}


def _one_of(names: Iterable[str]) -> Schema:
    """Exactly one of the constraints; json_object: false asks for none."""
    no = {name: _NOT_TRUE if name == "json_object" else _NULL for name in names}
    yes = {name: _TRUE if name == "json_object" else {"not": _NULL} for name in no}
    return {
        "description": f"Exactly one of {', '.join(no)}",
        "anyOf": [{"properties": {**no, name: yes[name]}, "required": [name]} for name in no],
    }


_CONSTRAINT_RULES = [
    _one_of(CONSTRAINTS),
    _rule(
        "reasoning_start and answer_start need reasoning_end",
        {"reasoning_start": {"enum": [None, []]}, "answer_start": {"enum": [None, []]}},
        {"reasoning_end": {"type": "array", "minItems": 1}},
    ),
]
_FORMAT_HAS_SCHEMA = _rule(
    "type json_schema needs json_schema",
    {"type": {"enum": ["text", "json_object", "structural_tag"]}},
    {"json_schema": {"type": "object"}},
)
_TOOL_HAS_NAME = _rule(
    "type tool needs name", {"type": {"enum": ["auto", "any", "none"]}}, {"name": {"type": "string"}}
)


def _generation_rules(bounds: SchemaBounds) -> Iterable[Schema]:
    any_text: Schema = {"anyOf": [_NULL, {"properties": {"type": {"const": "text"}}}]}
    yield _rule(
        "response_format and structured_outputs exclude each other",
        {"structured_outputs": _NULL},
        {"response_format": any_text},
    )
    yield _rule("stream_options needs stream", {"stream_options": _NULL}, {"stream": _TRUE})
    yield _rule(
        "truncation_side needs truncate_prompt_tokens",
        {"truncation_side": _NULL},
        {"truncate_prompt_tokens": {"type": "integer"}},
    )
    neutral: dict[str, Schema] = {name: {"enum": [None, *values]} for name, values in NOT_WITH_BEAMS.items()}
    if bounds.model.max_logprobs >= 0:
        neutral["n"] = {"maximum": bounds.model.max_logprobs // 2}
    yield _rule(
        "Fields that beam search does not follow, and its own without it",
        {"use_beam_search": _NOT_TRUE, "length_penalty": {"enum": [None, 1]}},
        {"use_beam_search": _TRUE, "prompt_logprobs": _NULL, "response_format": any_text, **neutral},
    )


_CONTINUES_OR_BEGINS = _rule(
    "continue_final_message and add_generation_prompt exclude each other",
    {"continue_final_message": _NOT_TRUE},
    {"add_generation_prompt": _NOT_TRUE},
)
_BACKGROUND_IS_STORED = _rule(
    "A response in the background is stored", {"background": _NOT_TRUE}, {"store": {"enum": [None, True]}}
)
_CHAT_RULES = (
    _rule("top_logprobs needs logprobs", {"top_logprobs": {"enum": [None, 0]}}, {"logprobs": _TRUE}),
    _rule("logprob_token_ids needs logprobs", {"logprob_token_ids": {"enum": [None, []]}}, {"logprobs": _TRUE}),
    _rule(
        "thinking_token_budget does not work with beam search",
        {"thinking_token_budget": {"enum": [None, -1]}},
        {"use_beam_search": _NOT_TRUE},
    ),
)
_FUNCTION: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": {"anyOf": [{"type": "object"}, _NULL]}},
    "required": ["name"],
}
_TOOL: Schema = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["function"],
}
_NAMED_TOOL: Schema = {
    "type": "object",
    "properties": {"function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
    "required": ["function"],
}


def _tools_rule(bounds: SchemaBounds) -> Schema:
    functions = _list(_TOOL, least=1)
    automatic = [{"tools": functions, "tool_choice": {"enum": [None, "auto"]}}] if bounds.calls_tools else []
    return _rule(
        "Tools that may be called are functions",
        {"tools": {"enum": [None, []]}, "tool_choice": {"enum": [None, "none", "auto"]}},
        {"tool_choice": {"const": "none"}},
        {"tools": functions, "tool_choice": {"const": "required"}},
        {"tools": functions, "tool_choice": _NAMED_TOOL},
        *automatic,
    )


def _tool_blocks_rule(bounds: SchemaBounds) -> Schema:
    def wish(*kinds: str, **properties: Schema) -> Schema:
        return {"properties": {"type": {"enum": list(kinds)}, **properties}, "required": ["type", *properties]}

    tools: Schema = {"type": "array", "minItems": 1}
    automatic = {"tools": tools, "tool_choice": {"anyOf": [_NULL, wish("auto")]}}
    return _rule(
        "Tools that may be called",
        {"tools": {"enum": [None, []]}, "tool_choice": {"anyOf": [_NULL, wish("auto", "none")]}},
        {"tool_choice": wish("none")},
        {"tools": tools, "tool_choice": wish("any")},
        {"tools": tools, "tool_choice": wish("tool", name={"type": "string"})},
        *([automatic] if bounds.calls_tools else []),
    )


def _flat_tools_rule(bounds: SchemaBounds) -> Schema:
    tools: Schema = {"type": "array", "minItems": 1}
    automatic: dict[str, Schema] = {"tools": tools, "tool_choice": {"enum": [None, "auto"]}}
    return _rule(
        "Tools that may be called",
        {"tools": {"enum": [None, []]}, "tool_choice": {"enum": [None, "none", "auto"]}},
        {"tool_choice": {"const": "none"}},
        {"tools": tools, "tool_choice": {"const": "required"}},
        {"tools": tools, "tool_choice": {"type": "object"}},
        *([automatic] if bounds.calls_tools else []),
    )


_COMPLETION_RULES = (
    _rule("max_tokens 0 needs echo", {"max_tokens": {"not": {"const": 0}}}, {"echo": _TRUE}),
    _rule(
        "Beam search knows no logprobs of the prompt",
        {"use_beam_search": _NOT_TRUE},
        {"echo": _NOT_TRUE},
        {"logprobs": _NULL},
    ),
)
_INFILL = _rule(
    "suffix needs a prompt of text, and no echo",
    {"suffix": {"enum": [None, ""]}},
    {"prompt": {"anyOf": [{"type": "string"}, _list({"type": "string"})]}, "echo": _NOT_TRUE},
)
_ONE_OF_TWO = _rule(
    "Exactly one of prompt and messages; the fields that belong to messages come with them only",
    {"prompt": {"type": "string"}, "messages": _NULL, **dict.fromkeys(OF_MESSAGES, _EMPTY)},
    {"messages": {"type": "array"}, "prompt": _NULL},
)


def decimals_below(limit: int) -> str:
    """A regular expression for 0 to limit - 1, as they are written without leading zeros."""
    last = str(limit - 1)
    patterns = ["0"] if limit > 0 else []
    if len(last) > 1:
        patterns.append("[1-9]" + (f"[0-9]{{0,{len(last) - 2}}}" if len(last) > 2 else ""))
    for place, digit in enumerate(last):
        least, most = int(place == 0), int(digit) - (place < len(last) - 1)
        if least <= most:
            rest = len(last) - place - 1
            patterns.append(last[:place] + f"[{least}-{most}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join(patterns)
