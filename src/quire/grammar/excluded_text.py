"""Schemas of JSON that stands before a mark: no string of a value may contain the mark, which would end the JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from quire.grammar.schema_tree import FOR_PEOPLE, NAMED_SCHEMAS, SCHEMAS, Schema, escaped

_PARTS = {"$ref", "allOf", "anyOf", "oneOf"}


def without_text(schema: Schema, text: str) -> Schema:
    """The schema of the values that another one allows and that have no string or key with a text in it.

    Raises ValueError with the reason if the schema names such a string.

    Args:
        text: its first character comes only once in it.
    """
    assert text.count(text[0]) == 1
    return _Without(text, schema).of(schema)


class _Without:
    def __init__(self, text: str, root: Schema) -> None:
        self._text, self._pattern = text, _pattern_without(text)
        definitions = found if isinstance(found := root.get("$defs"), dict) else {}
        name = "any"
        while name in definitions:
            name += "_"
        self._name = name
        self._any = {"$ref": f"#/$defs/{name}"}  # a value of any type

    def of(self, root: Schema) -> Schema:
        schema: Schema = self._of(root, "#")
        if self._any["$ref"] in json.dumps(schema):
            schema = {**schema, "$defs": {**schema.get("$defs", {}), self._name: self._any_value()}}
        return schema

    def _any_value(self) -> Schema:
        return {
            "anyOf": [
                {"type": ["null", "boolean", "number"]},
                {"type": "string", "pattern": self._pattern},
                {"type": "array", "items": self._any},
                {"type": "object", "patternProperties": {self._pattern: self._any}, "additionalProperties": False},
            ]
        }

    def _of(self, schema: Any, path: str, is_held: bool = False) -> Any:
        """A schema, or a list of schemas.

        Args:
            is_held: another schema for the same value excludes the text already.
        """
        if isinstance(schema, list):
            return [self._of(each, f"{path}/{index}", is_held) for index, each in enumerate(schema)]
        if not isinstance(schema, dict) and schema is not True:
            return schema
        if schema is True or schema.keys() <= FOR_PEOPLE:
            return schema if is_held else self._any
        if "enum" in schema or "const" in schema:
            self._check([schema.get("enum"), schema.get("const")], path)
            return schema
        if "patternProperties" in schema:
            raise ValueError(f"keys with a pattern could contain {self._text}: {path}/patternProperties")
        holds = "type" in schema or _PARTS.isdisjoint(schema)
        inner = {
            name: {key: self._of(each, f"{path}/{name}/{escaped(key)}") for key, each in value.items()}
            if name in NAMED_SCHEMAS and isinstance(value, dict)
            else self._of(value, f"{path}/{name}", name in _PARTS and (holds or is_held))
            if name in SCHEMAS
            else value
            for name, value in schema.items()
        }
        if is_held:
            self._check(list(schema.get("properties", ())), path)
        return self._restricted(inner, path) if holds and not is_held else inner

    def _restricted(self, schema: Schema, path: str) -> Schema:
        """A schema that allows by itself the text that has to be excluded."""
        kind = schema.get("type", ["string", "array", "object"])
        kinds = kind if isinstance(kind, list) else [kind]
        more: Schema = {}
        if "string" in kinds:
            more["pattern"] = self._pattern
        if "array" in kinds and "unevaluatedItems" not in schema:
            rest = "additionalItems" if isinstance(schema.get("items"), list) else "items"
            schema.setdefault(rest, self._any)
        if "object" in kinds:
            self._check(list(schema.get("properties", ())), path)
            closed = [schema.get(name) is False for name in ("additionalProperties", "unevaluatedProperties")]
            if "unevaluatedProperties" not in schema:
                schema.setdefault("additionalProperties", self._any)
            if not any(closed):
                more |= {"patternProperties": {self._pattern: {}}, "additionalProperties": False}
        if not more:
            return schema
        if more.keys() == {"pattern"} and schema.keys().isdisjoint(("format", "pattern")):
            return {**schema, **more}
        return {**schema, "allOf": [*schema.get("allOf", ()), more]}

    def _check(self, values: Any, path: str) -> None:
        if self._text in json.dumps(values, ensure_ascii=False):
            raise ValueError(f"a value or a key of an argument has {self._text}: {path}")


def _pattern_without(text: str) -> str:
    """A regular expression for texts without another one, whose first character comes only once in it."""
    first = re.escape(text[0])
    begun = ""
    for char in reversed(text[1:-1]):
        begun = f"({re.escape(char)}{begun})?"
    begun = f"({first}{begun})*"  # beginnings of the text, one after the other
    broken = "|".join(f"{re.escape(text[:at])}[^{re.escape(text[at])}{first}]" for at in range(1, len(text)))
    return f"^([^{first}]|{begun}({broken}))*{begun}$"
