"""Calls that must follow their schemas (`strict`): structural tags for a grammar, in the formats of `tools`.

The text is free until a call begins. From there on it is a call of one of the tools. The arguments of strict tools
follow their schemas, and other tools' arguments have the form of arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from quire.errors import UnsupportedFieldError
from quire.formats.answer_formats import HARMONY_TOOLS
from quire.grammar.excluded_text import without_text
from quire.grammar.schema_tree import FOR_PEOPLE, escaped, reference_of, referred, subschemas
from quire.server.text.harmony import NEXT_MESSAGE, header
from quire.server.text.tagged_calls import json_types, resolved

Form = dict[str, Any]
Schema = Mapping[str, Any]
# Name -> schema of the arguments; None: a tool that is not strict.
Tools = Mapping[str, Schema | None]
# Name, schema and whether it is required, of each argument.
Arguments = list[tuple[str, Any, bool]]

MAX_ARGUMENTS = 400  # the most arguments of a tool: with 500 arguments that may be left out, the parser would stop
MAX_ARGUMENT_BYTES = 1 << 18  # the most bytes of a request's arguments, in formats that write arguments one by one

_ANY_TEXT: Form = {"type": "any_text"}
_FOR_PEOPLE = {"$id", "$schema", *FOR_PEOPLE}
_OF_OBJECTS = {"$defs", "additionalProperties", "definitions", "properties", "required", "type", *_FOR_PEOPLE}
_OF_TEXTS = {"format", "maxLength", "minLength", "type", *_FOR_PEOPLE}
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"  # the days that every month has
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS_OF_TEXTS = {
    "": "",
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "time": _TIME,
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}
_NAME = re.compile(r"[\w.:/-]+")
_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_PYTHON_NAME = re.compile(r"[\w.-]+")


def strict_tag(form: str, tools: Tools) -> Form:
    """The structural tag of answers with calls. Raises UnsupportedFieldError for schemas that the format cannot
    enforce.

    Args:
        form: the name of the format.
    """
    try:
        return {"format": _FORMATS[form](tools)}
    except RecursionError:
        raise _refuse(", ".join(tools), "an argument refers to itself in its own place, or too deep") from None


def harmony_calls(tools: Tools) -> Form:
    """The structural tag of one call in harmony, behind any reasoning."""
    analysis = _tag(header("analysis"), _ANY_TEXT, NEXT_MESSAGE)
    return {"format": _sequence({"type": "star", "content": analysis}, _harmony_call(tools))}


def _tag(begin: str, content: Form, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def _or(*elements: Form) -> Form:
    return {"type": "or", "elements": list(elements)}


def _const(text: str) -> Form:
    return {"type": "const_string", "value": text}


def _regex(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def _json(schema: Schema | None) -> Form:
    return {"type": "json_schema", "json_schema": {"type": "object"} if schema is None else schema}


def _optional(content: Form) -> Form:
    return {"type": "optional", "content": content}


def _list(tags: list[Form], separator: str = ", ") -> Form:
    return {"type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True}


def _triggered(tags: list[Form], *triggers: str, **start: Form) -> Form:
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": tags, **start}


def _refuse(name: str, why: str, fix: str = "Leave out strict, or change the schema") -> UnsupportedFieldError:
    return UnsupportedFieldError(
        f"The calls of the tool {name} cannot be made to fit its schema: {why}", fix=fix, param="tools"
    )


# Formats with JSON behind a begin.


def _json_tags(tools: Tools, begin: str, end: str) -> list[Form]:
    """A tag for each tool. `begin`: the text before the arguments, with NAME for the tool."""
    return [
        _tag(begin.replace("NAME", json.dumps(name, ensure_ascii=False)[1:-1]), _json(schema), end)
        for name, schema in tools.items()
    ]


def _behind_trigger(tools: Tools, *, trigger: str, begin: str, end: str) -> Form:
    return _triggered(_json_tags(tools, trigger + begin, end), trigger)


def _granite(tools: Tools) -> Form:
    calls = _list(_json_tags(tools, '{"name": "NAME", "arguments": ', "}"))
    tags = [_tag(f"{trigger}[", calls, "]") for trigger in ("<|tool_call|>", "<tool_call>")]
    start = {"char": "[", "content": _tag("[", calls, "]")}
    return _triggered(tags, "<|tool_call|>", "<tool_call>", at_start=start)


def _kimi(tools: Tools) -> Form:
    calls = [
        _tag(
            f"<|tool_call_begin|>functions.{name}:",
            _sequence(_regex("[0-9]{1,4}"), _const("<|tool_call_argument_begin|>"), _json(schema)),
            "<|tool_call_end|>",
        )
        for name, schema in _readable(tools, _NAME).items()
    ]
    section = _tag("<|tool_calls_section_begin|>", _list(calls, ""), "<|tool_calls_section_end|>")
    return _triggered([section, *calls], "<|tool_calls_section_begin|>", "<|tool_call_begin|>")


def _llama3(tools: Tools) -> Form:
    calls = _list(_json_tags(tools, '{"name": "NAME", "parameters": ', "}"), "; ")
    return _triggered([_tag("<|python_tag|>", calls, "")], "<|python_tag|>", at_start={"char": "{", "content": calls})


def _phi4(tools: Tools) -> Form:
    calls = _list(_json_tags(tools, '{"name": "NAME", "arguments": ', "}"))
    return _triggered([_tag("functools[", calls, "]")], "functools[")


# Harmony: a list of messages; a call or the final one is the last.


def _harmony(tools: Tools) -> Form:
    others = [_tag(header(channel), _ANY_TEXT, NEXT_MESSAGE) for channel in ("analysis", "commentary")]
    final = _tag(header("final"), _ANY_TEXT, "")
    return _sequence({"type": "star", "content": _or(*others)}, _or(final, _harmony_call(tools)))


def _harmony_call(tools: Tools) -> Form:
    calls = [
        _tag(header(f"commentary to=functions.{name} <|constrain|>json"), _json(schema), "")
        for name, schema in _readable(tools, _NAME).items()
    ]
    return _or(*calls)


# Formats whose arguments are written one by one.


def _readable(tools: Tools, pattern: re.Pattern[str]) -> Tools:
    """The tools, whose names must be readable in this format."""
    for name in tools:
        if not pattern.fullmatch(name):
            why = "this model's format of calls cannot write its name"
            raise _refuse(name, why, fix="Give the tool a name of letters, digits, _, - and dots")
    return tools


def _arguments(tools: Tools, names: re.Pattern[str], keys: re.Pattern[str]) -> Iterator[tuple[str, Arguments | None]]:
    """Each tool with its arguments; None: it is not strict.

    Args:
        names: the names of tools that the format can write.
        keys: the names of arguments that it can write.
    """
    num_bytes = 0  # a definition comes with each argument that refers to it
    for name, schema in _readable(tools, names).items():
        arguments: Arguments = []
        given = schema or {}
        for key, value in _properties(name, given, keys).items():
            alone = _standing_alone(value, key, given)
            num_bytes += len(json.dumps(alone))
            if num_bytes > MAX_ARGUMENT_BYTES:
                which = f"from its argument {len(arguments) + 1}, {key!r}, on"
                why = f"arguments, with all that they refer to, have more than {MAX_ARGUMENT_BYTES:,} bytes of schemas"
                fix = "Leave out strict, or ask for fewer arguments or for such that refer to less"
                raise _refuse(name, f"{why} {which}", fix)
            arguments.append((key, alone, key in given.get("required", ())))
        yield name, None if schema is None else arguments


def _properties(name: str, schema: Schema, keys: re.Pattern[str]) -> Mapping[str, Any]:
    """The schemas of the arguments."""
    if others := sorted(schema.keys() - _OF_OBJECTS):
        raise _refuse(name, f"this model's format of calls has no place for {', '.join(others)} at the top")
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
        raise _refuse(name, "properties is an object, and required is a list")
    if len(properties) > MAX_ARGUMENTS:
        raise _refuse(name, f"it has {len(properties)} arguments, and at most {MAX_ARGUMENTS} are possible")
    for key in [*properties, *required]:
        if not isinstance(key, str) or not keys.fullmatch(key) or key not in properties:
            raise _refuse(name, f"this model's format of calls cannot write the argument {key!r}")
    return properties


def _standing_alone(value: Any, key: str, root: Schema) -> Any:
    """The schema of an argument, with the definitions that it leads to."""
    definitions: dict[str, dict[str, Any]] = {}
    waiting = [value]
    while waiting:
        for _, each in subschemas(waiting.pop()):
            if (reference := reference_of(each)) is None:
                continue
            if not (found := _DEFINITION.fullmatch(reference)):
                reference = f"#/$defs/arguments/properties/{escaped(key)}"
                return {"$ref": reference, "$defs": {"arguments": moved(root, "#/$defs/arguments")}}
            section, name = found.groups()
            definition = referred(reference, root)
            if definition is not None and name not in definitions.get(section, {}):
                definitions.setdefault(section, {})[name] = definition
                waiting.append(definition)
    return {**value, **definitions} if definitions else value


def moved(schema: Any, root: str) -> Any:
    """The schema with its references to itself, when it is found under `root`."""
    if isinstance(schema, list):
        return [moved(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: root + value[1:] if key == "$ref" and isinstance(value, str) and value[:1] == "#" else moved(value, root)
        for key, value in schema.items()
    }


def _pythonic(tools: Tools) -> Form:
    calls = _list([_python_call(*tool) for tool in _arguments(tools, _PYTHON_NAME, _PYTHON_NAME)])
    start = {"char": "[", "content": _tag("[", calls, "]")}
    return _triggered([_tag("<|python_start|>[", calls, "]")], "<|python_start|>", at_start=start)


def _python_call(name: str, arguments: Arguments | None) -> Form:
    """JSON's values can be read as Python's."""
    if arguments is None:
        argument = _sequence(_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}="), _json({}))
        return _tag(f"{name}(", _optional(_list([_tag("", argument, "")])), ")")
    elements = [
        {"content": _sequence(_const(f"{key}="), _json(value)), "required": is_required}
        for key, value, is_required in arguments
    ]
    return _tag(f"{name}(", {"type": "in_order", "elements": elements, "separator": ", "}, ")")


def _qwen(tools: Tools) -> Form:
    tags = []
    for name, arguments in _arguments(tools, _NAME, re.compile("[^>]+")):
        for opening, closing in (("<tool_call>\n", "\n</tool_call>"), ("", "")):
            begin, end = f"{opening}<function={name}>\n", f"</function>{closing}"
            if arguments is None:
                tags.append(_tag(begin, _ANY_TEXT, "</function>"))
                continue
            content = [
                _tagged(name, value, is_required, f"<parameter={key}>\n", "\n</parameter>\n", "</parameter>")
                for key, value, is_required in arguments
            ]
            tags.append(_tag(begin, _sequence(*content, _const("")), end))
    return _triggered(tags, "<tool_call>", "<function=")


def _glm(tools: Tools) -> Form:
    tags = []
    for name, arguments in _arguments(tools, _NAME, re.compile("[^<]+")):
        if arguments is None:
            tags.append(_tag(f"<tool_call>{name}\n", _ANY_TEXT, "</tool_call>"))
            continue
        content = [
            _tagged(
                *(name, value, is_required, f"<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n", "</arg_value>")
            )
            for key, value, is_required in arguments
        ]
        tags.append(_tag(f"<tool_call>{name}\n", _sequence(*content, _const("")), "</tool_call>"))
    return _triggered(tags, "<tool_call>")


def _tagged(name: str, schema: Any, is_required: bool, begin: str, end: str, mark: str) -> Form:
    """An argument between tags. `mark`: the text that ends it."""
    tag = _tag(begin, _value(name, schema, mark), end)
    return tag if is_required else _optional(tag)


def _alternatives(schema: Any) -> list[Any]:
    """What a value may be one of."""
    schema = resolved(schema, schema) if isinstance(schema, Mapping) else {}
    lists = [schema[keyword] for keyword in ("anyOf", "oneOf") if isinstance(schema.get(keyword), list)]
    is_list = len(lists) == 1 and schema.keys() <= {"$defs", "definitions", "anyOf", "oneOf", *_FOR_PEOPLE}
    return lists[0] if is_list else [schema]


def _values(schema: Schema) -> list[Any]:
    """The values that are listed in a schema that says nothing else."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    is_all = schema.keys() <= {"const", "enum", "type", *_FOR_PEOPLE} and isinstance(values, list)
    return values if is_all and all(isinstance(each, str) for each in values) else []


def _texts(name: str, schema: Schema, mark: str, root: Any) -> Form:
    """A string or another text of one of the alternatives, as it is."""
    found: list[Schema] = []
    _find_alternatives(schema, root, {}, found)
    forms = [_text(name, each, mark) for each in found]
    return forms[0] if len(forms) == 1 else _or(*forms)


def _find_alternatives(schema: Schema, root: Any, looked_at: dict[int, bool], found: list[Schema]) -> None:
    """Find the alternatives of a schema and of the schemas that it refers to, each once. Raises RecursionError for a
    cycle.

    Args:
        looked_at: schemas, and whether all of their alternatives are found.
    """
    if (is_done := looked_at.get(id(schema))) is not None:
        if not is_done:
            raise RecursionError
        return
    looked_at[id(schema)] = False
    parts = _alternatives(schema)
    if len(parts) > 1 and "anyOf" in schema:
        for part in parts:
            _find_alternatives(resolved(part, root), root, looked_at, found)
    else:
        found.append(schema)
    looked_at[id(schema)] = True


def _text(name: str, schema: Schema, mark: str) -> Form:
    """A string, as it is."""
    if schema.get("type") == "null":
        return _const("null")
    if values := _values(schema):
        if any(mark in value for value in values):
            raise _refuse(name, f"a value of an argument has {mark}")
        return _or(*map(_const, values))
    if others := sorted(schema.keys() - _OF_TEXTS):
        raise _refuse(name, f"this model writes texts without quotes, which cannot be made to fit {', '.join(others)}")
    pattern = _FORMATS_OF_TEXTS.get(str(schema.get("format", "")))
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if pattern is None or (pattern and (least or most != "")):
        raise _refuse(name, f"this model writes texts without quotes, which cannot be made to fit {json.dumps(schema)}")
    return {**_ANY_TEXT, "pattern": pattern or f"(?s:.{{{least},{most}}})", "excludes": [mark]}


def _value(name: str, schema: Any, mark: str) -> Form:
    """The text of an argument, which is read by the types that its schema names: see tagged_calls."""
    types = json_types(schema)
    if types == {"string"}:
        return _texts(name, resolved(schema, schema), mark, schema)
    parts = [resolved(part, schema) for part in _alternatives(schema)]
    if "string" in types or not types:
        if all(part.keys() <= {"type", *_FOR_PEOPLE} for part in parts):
            return {**_ANY_TEXT, "excludes": [mark]}
        if types == {"null", "string"} and all(part.get("type") == "null" or _values(part) for part in parts):
            return _or(*(_text(name, part, mark) for part in parts))
        if not types:
            raise _refuse(name, "the type of an argument is not known, and this model's format of calls has none")
    try:
        return _json(without_text(schema, mark))
    except ValueError as error:
        raise _refuse(name, str(error)) from None


_FORMATS: dict[str, Callable[[Tools], Form]] = {
    "deepseek_v3": partial(
        _behind_trigger,
        trigger="<｜tool▁call▁begin｜>",
        begin="function<｜tool▁sep｜>NAME\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
    ),
    "deepseek_v31": partial(
        _behind_trigger, trigger="<｜tool▁call▁begin｜>", begin="NAME<｜tool▁sep｜>", end="<｜tool▁call▁end｜>"
    ),
    "glm45": _glm,
    "granite": _granite,
    "hermes": partial(
        _behind_trigger, trigger="<tool_call>", begin='\n{"name": "NAME", "arguments": ', end="}\n</tool_call>"
    ),
    "kimi_k2": _kimi,
    "llama3_json": _llama3,
    "llama4_pythonic": _pythonic,
    "mistral": partial(_behind_trigger, trigger="[TOOL_CALLS]", begin="NAME[ARGS]", end=""),
    HARMONY_TOOLS: _harmony,
    "phi4_mini_json": _phi4,
    "pythonic": _pythonic,
    "qwen3_coder": _qwen,
    "qwen3_xml": _qwen,
}
