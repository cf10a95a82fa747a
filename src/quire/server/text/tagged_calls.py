"""Calls whose arguments are tagged texts: `<parameter=city>Paris</parameter>`. The tools' schemas decide which values
are text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from quire.grammar.schema_tree import referred
from quire.server.text.output import Output
from quire.server.text.reader import SPACE, Malformed, Reader, Steps, Tags, drop

# Tool -> parameter -> the JSON types that it may have; none are known if the set is empty.
ParameterTypes = Mapping[str, Mapping[str, frozenset[str]]]

_MAX_REFERENCES = 16  # the longest chain of references
_TEXT = frozenset(("string",))
_STRUCTURES = frozenset(("array", "object"))
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> ParameterTypes:
    """The parameters' types in the tools of a request. Schemas come from clients and may hold anything."""
    functions = [_mapping(tool.get("function")) for tool in tools]
    return {
        function["name"]: {
            name: json_types(schema, _mapping(function.get("parameters")))
            for name, schema in _mapping(_mapping(function.get("parameters")).get("properties")).items()
        }
        for function in functions
        if isinstance(function.get("name"), str)
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def json_types(schema: Any, root: Any = None) -> frozenset[str]:
    """The types that a schema names, itself or by its values; none are known if the set is empty.

    Args:
        root: the schema in which references are found; None: the schema itself.
    """
    root = schema if root is None else root
    schema = resolved(schema, root)
    alternatives = [schema]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            alternatives += [resolved(item, root) for item in schema[key]]
    return frozenset(name for each in alternatives for name in _named_types(each))


def _named_types(schema: Mapping[str, Any]) -> list[str]:
    kind = schema.get("type")
    if kind is None:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else []
        values = [schema["const"]] if "const" in schema else values
        return ["null" if value is None else _TYPES.get(type(value), "") for value in values]
    return [name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)]


def resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """The target of a schema's reference, if it has one that leads to a schema; else the schema."""
    for _ in range(_MAX_REFERENCES):
        reference = _mapping(schema).get("$ref")
        found = referred(reference, root) if isinstance(reference, str) else None
        if not isinstance(found, Mapping):
            break
        schema = found
    return _mapping(schema)


@dataclass(frozen=True)
class TaggedArguments:
    """How a format writes arguments.

    Args:
        key: the tag before a parameter's name.
        key_end: the tag behind it.
        value: the tag before the value, if there is one more.
        padding: a character that may stand at both ends of a value, without belonging to it.
        ends: the texts that end the call.
    """

    key: str
    key_end: Tags
    value: str
    value_end: Tags
    padding: str
    ends: Tags

    def read(self, reader: Reader, output: Output, name: str, types: ParameterTypes) -> Steps[None]:
        """Read a call's arguments and the end of the call. Raises Malformed."""
        tags = Tags(self.key, *self.ends.names)
        known = types.get(name, {})
        yield from reader.take(SPACE)
        if not (tag := (yield from reader.at(tags))):
            raise Malformed
        reader.flush()
        output.start(name)
        reader.to(drop)
        separator = "{"
        while tag == self.key:
            reader.skip(len(tag))
            key = yield from _text_until(reader, self.key_end)
            output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._read_value(reader, output, known.get(key, frozenset()))
            yield from reader.take(SPACE)
            tag = yield from reader.at(tags)
        if not tag:
            raise Malformed
        reader.skip(len(tag))
        output.arguments("}" if separator == ", " else "{}")
        reader.to(output.hold)
        output.end()

    def _read_value(self, reader: Reader, output: Output, types: frozenset[str]) -> Steps[None]:
        if self.value:
            yield from reader.take(SPACE)
            yield from reader.expect(self.value)
        if self.padding and (yield from reader.peek()) == self.padding:
            reader.skip(1)
        if types != _TEXT:
            output.arguments(_as_json((yield from _text_until(reader, self.value_end)), types))
            return
        output.arguments('"')
        reader.to(lambda text: output.arguments(json.dumps(text, ensure_ascii=False)[1:-1]))
        tag = yield from reader.until(self.value_end)
        reader.to(drop)
        if not tag:
            raise Malformed
        reader.skip(len(tag))
        output.arguments('"')


def _text_until(reader: Reader, end: Tags) -> Steps[str]:
    """Read a text and the tag behind it. Raises Malformed."""
    pieces: list[str] = []
    reader.to(pieces.append)
    tag = yield from reader.until(end)
    reader.to(drop)
    if not tag:
        raise Malformed
    reader.skip(len(tag))
    return "".join(pieces)


def _as_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON: a string, unless it reads as one of the types, or as a structure if no type is known."""
    word = text.strip()
    if "boolean" in types and word in ("True", "False"):
        return word.lower()
    try:
        value = json.loads(word, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = "null" if value is None else _TYPES[type(value)]
    allowed = types or _STRUCTURES
    if kind in allowed or (kind == "integer" and "number" in allowed):
        return word
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity are no JSON
