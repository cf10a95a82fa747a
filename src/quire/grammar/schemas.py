"""Schemas that llguidance 1.9 takes, and then allows what they forbid, or an answer that cannot end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

_BOUNDS = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "allOf", "anyOf", "oneOf"}
_INTEGERS_ONLY = 2.0**53  # of a double: from here on it has no fractions
# Where schemas stand in a schema.
_SCHEMAS = {
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf",
    "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
_NAMED_SCHEMAS = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}


def subschemas(schema: Any, path: str = "#") -> Iterator[tuple[str, Schema]]:
    """A schema and those in it, with their JSON pointers."""
    if isinstance(schema, list):
        for index, each in enumerate(schema):
            yield from subschemas(each, f"{path}/{index}")
    elif isinstance(schema, dict):
        yield path, schema
        for name, value in schema.items():
            if name in _SCHEMAS:
                yield from subschemas(value, f"{path}/{name}")
            elif name in _NAMED_SCHEMAS and isinstance(value, dict):
                for key, each in value.items():
                    yield from subschemas(each, f"{path}/{name}/{key}")


def objection(schema: Schema) -> str | None:
    """Why a schema cannot be used, with the JSON pointer of the place; None: nothing is known against it."""
    found = list(subschemas(schema))
    keywords = {name for _, each in found for name in each}
    # A schema that only refers to another one is as good as that one, which is looked at itself.
    if not keywords.isdisjoint(("exclusiveMinimum", "exclusiveMaximum")):
        for path, each in found:
            if not _BOUNDS.isdisjoint(each) and _is_inexact(_together(each, schema, "allOf", "anyOf", "oneOf")):
                return f"an exclusive bound that is a whole number is less than 1 from the other bound: {path}"
    if "minProperties" in keywords:
        parts = {id(part) for _, each in found for part in _schemas(each, "allOf")}
        for path, each in found:
            is_own = id(each) not in parts and ("minProperties" in each or "allOf" in each)
            if is_own and _counts_keys_twice(_together(each, schema, "allOf")):
                return f"minProperties asks for more than one key that is not required: {path}"
    return _endless(schema, found)


def has_free_keys(schema: Schema) -> bool:
    """Whether an object with named keys may have others, which llguidance would let be a named one with an escape."""
    return any(
        ("properties" in each or "patternProperties" in each) and each.get("additionalProperties") is not False
        for _, each in subschemas(schema)
    )


def _schemas(schema: Schema, *names: str) -> list[Schema]:
    """Those in lists of these names."""
    lists = (value for name in names if isinstance(value := schema.get(name), list))
    return [each for values in lists for each in values if isinstance(each, dict)]


def _target(reference: Any, root: Schema) -> Any:
    """What a `$ref` leads to; None: nothing within the schema."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    at: Any = root
    for key in unquote(reference[1:]).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list):
            at = next((each for index, each in enumerate(at) if key == str(index)), None)
        else:
            at = at.get(key) if isinstance(at, dict) else None
    return at if reference[1:2] in ("", "/") else None


def _together(schema: Schema, root: Schema, *names: str) -> list[Schema]:
    """Schemas that may hold for one value: this one, what it refers to, and what stands in lists of these names."""
    found: dict[int, Schema] = {}
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found[id(each)] = each
            waiting += _schemas(each, *names)
            waiting += [target for target in [_target(each.get("$ref"), root)] if isinstance(target, dict)]
    return list(found.values())


def _is_inexact(together: list[Schema]) -> bool:
    """Whether llguidance takes an exclusive bound for an inclusive one: 1 within (1, 1.5], -1 within (-1.5, -1)."""
    lows, highs, after, before = set(), set(), set(), set()  # the last two: whole numbers that bounds exclude
    for schema in together:
        low, above, high, below = (
            value if isinstance(value := schema.get(name), int | float) and abs(value) < _INTEGERS_ONLY else None
            for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        )
        if least := [value for value in (low, above) if value is not None]:
            lows.add(max(least))
            after |= {above} if above == max(least) and above == int(above) else set()
        if most := [value for value in (high, below) if value is not None]:
            highs.add(min(most))
            before |= {below} if below == min(most) and below == int(below) else set()
    upwards, downwards = sorted(highs), sorted(lows)
    next_highs = ((low, upwards[at]) for low in after if (at := bisect_right(upwards, low)) < len(upwards))
    next_lows = ((downwards[at - 1], high) for high in before if (at := bisect_left(downwards, high)))
    return any(high - low < 1 for pairs in (next_highs, next_lows) for low, high in pairs)


def _counts_keys_twice(together: list[Schema]) -> bool:
    """Whether keys that have no name in the schema may make up `minProperties`: llguidance lets one come twice."""
    counts = [count for each in together if isinstance(count := each.get("minProperties"), int | float)]
    names = (each["required"] for each in together if isinstance(each.get("required"), list))
    required = {name for each in names for name in each if isinstance(name, str)}
    return max(counts, default=0) > len(required) + 1


def _endless(schema: Schema, found: list[tuple[str, Schema]]) -> str | None:
    """A schema whose values would contain another one of it, and so on."""
    targets = {name: _target(name, schema) for _, each in found if isinstance(name := each.get("$ref"), str)}
    ended = {name for name, target in targets.items() if target is None}
    num_ended = -1
    while num_ended < len(ended):
        num_ended = len(ended)
        for name in reversed(targets):  # definitions mostly use what comes behind them
            if name not in ended and _can_end(targets[name], ended):
                ended.add(name)
    for path, each in found if targets else ():
        if not _can_end(each, ended) or _endless_types(each, ended):
            return f"nothing satisfies a schema that has to contain itself: {path}"
    return None


def _can_end(schema: Any, ended: Collection[str]) -> bool:
    """Whether some value satisfies a schema, as far as references matter. `ended`: those that lead to such schemas."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    if isinstance(reference := schema.get("$ref"), str) and reference not in ended:
        return False
    for name, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        parts = schema.get(name)
        if isinstance(parts, list) and parts and not enough(_can_end(each, ended) for each in parts):
            return False
    return not _endless_types(schema, ended).issuperset(_types(schema))


def _types(schema: Schema) -> set[str]:
    """That a schema allows; those without a part that could contain the schema are not told apart."""
    kinds = schema.get("type", ["array", "object", "others"])
    return {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)} or {"others"}


def _endless_types(schema: Schema, ended: Collection[str]) -> set[str]:
    """`object` and `array`, where a schema allows this type and no value of it can end."""
    properties, required = schema.get("properties"), schema.get("required")
    named = properties if isinstance(properties, dict) else {}
    others = True if "patternProperties" in schema else schema.get("additionalProperties")
    least, first, rest = schema.get("minItems"), schema.get("prefixItems"), schema.get("items")
    least = least if isinstance(least, int | float) else 0
    first = first if isinstance(first, list) else rest if isinstance(rest, list) else []
    names = required if isinstance(required, list) else []
    needed = {
        "object": [named.get(name, others) for name in names if isinstance(name, str)],
        "array": [each for index, each in enumerate([*first, rest]) if index < least],
    }
    return {kind for kind in _types(schema) & needed.keys() if not all(_can_end(each, ended) for each in needed[kind])}
