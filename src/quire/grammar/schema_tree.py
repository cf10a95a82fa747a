"""Finds the schemas in a JSON Schema."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

# Where schemas stand in a schema.
SCHEMAS = {
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf",
    "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
DEFINITIONS = {"$defs", "definitions"}
NAMED_SCHEMAS = {*DEFINITIONS, "dependentSchemas", "patternProperties", "properties"}
_INDEX_DIGITS = 10  # more than any list has places
# Keywords that restrict nothing.
FOR_PEOPLE = {"$comment", "default", "deprecated", "description", "examples", "title"}


def subschemas(schema: Any, path: str = "#", but: Collection[str] = ()) -> Iterator[tuple[str, Schema]]:
    """A schema and the schemas in it, with their JSON pointers. `but`: keywords that are not entered."""
    if isinstance(schema, list):
        for index, each in enumerate(schema):
            yield from subschemas(each, f"{path}/{index}", but)
    elif isinstance(schema, dict):
        yield path, schema
        for name, value in schema.items():
            if name in but:
                continue
            if name in SCHEMAS:
                yield from subschemas(value, f"{path}/{name}", but)
            elif name in NAMED_SCHEMAS and isinstance(value, dict):
                for key, each in value.items():
                    yield from subschemas(each, f"{path}/{name}/{escaped(key)}", but)


def escaped(key: Any) -> str:
    """A key in a JSON pointer (RFC 6901, section 3)."""
    return str(key).replace("~", "~0").replace("/", "~1")


def reference_of(schema: Schema) -> str | None:
    """Its `$ref`, if that is a text."""
    return reference if isinstance(reference := schema.get("$ref"), str) else None


def has_cycle(graph: Mapping[Any, Iterable[Any]]) -> bool:
    """Whether a node leads back to itself. The graph: the nodes that each node leads to."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The target of a `$ref`; None: it leads to nothing within the schema."""
    if not reference.startswith("#"):
        return None
    at: Any = root
    for key in unquote(reference[1:]).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list):
            is_index = key.isascii() and key.isdigit() and (key == "0" or key[0] != "0") and len(key) < _INDEX_DIGITS
            at = at[int(key)] if is_index and int(key) < len(at) else None
        else:
            at = at.get(key) if isinstance(at, dict) else None
    return at if reference[1:2] in ("", "/") else None


def replaced(value: Any, changes: Mapping[int, Any]) -> Any:
    """A schema in which some of its parts are replaced by other schemas, by their ids."""
    if isinstance(value, dict):  # all values `true` have the same id
        value = changes.get(id(value), value)
    if isinstance(value, dict):
        return {name: replaced(each, changes) for name, each in value.items()}
    return [replaced(each, changes) for each in value] if isinstance(value, list) else value
