"""Finds schemas that llguidance 1.9 accepts and does not hold to: it allows what they forbid, or endless answers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

MAX_WORK = 200_000  # schemas that are looked at with others; 0.2 s
_BOUNDS = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "allOf", "anyOf", "oneOf"}
_INTEGERS_ONLY = 2.0**53  # of a double: from here on it has no fractions
# Where schemas stand in a schema.
SCHEMAS = {
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf",
    "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
_DEFINITIONS = {"$defs", "definitions"}
NAMED_SCHEMAS = {*_DEFINITIONS, "dependentSchemas", "patternProperties", "properties"}
# Keywords that restrict nothing.
FOR_PEOPLE = {"$comment", "default", "deprecated", "description", "examples", "title"}
_ALTERNATIVES = ("anyOf", "oneOf")


class _TooMuchError(Exception):
    pass


def subschemas(schema: Any, path: str = "#", but: Collection[str] = ()) -> Iterator[tuple[str, Schema]]:
    """A schema and those in it, with their JSON pointers. `but`: keywords that are not entered."""
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


def objection(schema: Schema) -> str | None:
    """Why a schema cannot be used, with the JSON pointer of the place; None: nothing is known against it."""
    checked = _Checked(schema)
    try:
        return checked.inexact_bound() or checked.repeated_key() or checked.endless()
    except _TooMuchError:
        return "its schemas refer to each other in more ways than can be looked at"


def has_free_keys(schema: Schema) -> bool:
    """Whether an object with named keys may have others, which llguidance would let be a named one with an escape."""
    return any(
        ("properties" in each or "patternProperties" in each) and each.get("additionalProperties") is not False
        for _, each in subschemas(schema)
    )


class _Checked:
    """A schema with all that its references reach: definitions that nothing refers to do not matter."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._work = 0
        self._within: set[int] = set()  # schemas that are being looked at
        self._found: dict[int, tuple[str, Schema]] = {}
        self._targets: dict[str, Any] = {}  # of each reference; None: it leads to nothing within the schema
        waiting: list[tuple[str, Any]] = [("#", root)]
        while waiting:
            path, part = waiting.pop()
            if id(part) in self._found:
                continue
            for at, each in subschemas(part, path, but=_DEFINITIONS):
                self._found.setdefault(id(each), (at, each))
                reference = each.get("$ref")
                if isinstance(reference, str) and reference not in self._targets:
                    self._targets[reference] = target = referred(reference, root)
                    waiting.append((reference, target))
        self._keywords = {name for _, each in self._found.values() for name in each}

    def inexact_bound(self) -> str | None:
        """A range behind an exclusive bound that is too small."""
        if self._keywords.isdisjoint(("exclusiveMinimum", "exclusiveMaximum")):
            return None
        for path, each in self._found.values():
            if not _BOUNDS.isdisjoint(each) and any(map(_is_inexact, self._at_once(each))):
                return f"an exclusive bound that is a whole number is less than 1 from the other bound: {path}"
        return None

    def repeated_key(self) -> str | None:
        """A number of keys that one key could make up by coming twice."""
        if "minProperties" not in self._keywords:
            return None
        parts = {id(part) for _, each in self._found.values() for part in _schemas(each, "allOf")}
        for path, each in self._found.values():
            is_own = id(each) not in parts and ("minProperties" in each or "allOf" in each)
            if is_own and _counts_keys_twice(self._together([each], "allOf")):
                return f"minProperties asks for more than one key that is not required: {path}"
        return None

    def endless(self) -> str | None:
        """A schema whose values would contain another one of it, and so on."""
        ended = {name for name, target in self._targets.items() if target is None}
        num_ended = -1
        while num_ended < len(ended):
            num_ended = len(ended)
            self._count(len(self._targets))
            for name in reversed(self._targets):  # definitions mostly use what comes behind them
                if name not in ended and self._can_end(self._targets[name], ended):
                    ended.add(name)
        for path, each in self._found.values() if self._targets else ():
            if not self._can_end(each, ended) or self._endless_types(self._whole(each), ended):
                return f"this part has no end, because it has to contain itself: {path}"
        return None

    def _can_end(self, schema: Any, ended: Collection[str]) -> bool:
        """Whether some value satisfies a schema, as far as references matter.

        Args:
            ended: references that lead to such schemas.
        """
        if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
            return True
        if id(schema) in self._within:  # a value of it that ends would have a smaller one in it
            return False
        self._within.add(id(schema))
        can_end = self._is_satisfied(schema, ended)
        self._within.remove(id(schema))
        return can_end

    def _is_satisfied(self, schema: Schema, ended: Collection[str]) -> bool:
        whole = self._whole(schema)
        for each in whole:
            if isinstance(reference := each.get("$ref"), str) and reference not in ended:
                return False
            for name in _ALTERNATIVES:
                parts = each.get(name)
                if isinstance(parts, list) and parts and not any(self._can_end(part, ended) for part in parts):
                    return False
        return not self._endless_types(whole, ended).issuperset(_types(whole))

    def _endless_types(self, whole: list[Schema], ended: Collection[str]) -> set[str]:
        """`object` and `array`, where schemas that hold together allow this type and no value of it can end."""
        needed = {"object": _needed_properties(whole), "array": _needed_items(whole)}
        return {
            kind
            for kind in _types(whole) & needed.keys()
            if not all(any(self._can_end(each, ended) for each in choices) for choices in needed[kind])
        }

    def _whole(self, schema: Schema) -> list[Schema]:
        """The schemas that hold for whatever a schema holds for."""
        return self._together([schema], "allOf") if "allOf" in schema or {"$ref"} < schema.keys() else [schema]

    def _at_once(self, schema: Schema) -> Iterator[list[Schema]]:
        """Groups of schemas that may hold for one value: with one alternative of a list, and all of other lists."""
        base = self._together([schema], "allOf")
        lists = [found for each in base for name in _ALTERNATIVES if (found := _schemas(each, name))]
        yield base
        for chosen in lists:
            others = [each for alternatives in lists if alternatives is not chosen for each in alternatives]
            for alternative in chosen:
                yield base + self._together([alternative, *others], "allOf", *_ALTERNATIVES)

    def _together(self, schemas: list[Schema], *names: str) -> list[Schema]:
        """These schemas, what they refer to, and what stands in lists of these names."""
        found: dict[int, Schema] = {}
        waiting = schemas[:]
        while waiting:
            each = waiting.pop()
            if id(each) not in found:
                self._count(1)
                found[id(each)] = each
                waiting += _schemas(each, *names)
                reference = each.get("$ref")
                target = self._targets.get(reference) if isinstance(reference, str) else None
                waiting += [target] if isinstance(target, dict) else []
        return list(found.values())

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise _TooMuchError


def escaped(key: Any) -> str:
    """A key in a JSON pointer (RFC 6901, section 3)."""
    return str(key).replace("~", "~0").replace("/", "~1")


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _schemas(schema: Schema, *names: str) -> list[Schema]:
    """Those in lists of these names."""
    lists = (value for name in names if isinstance(value := schema.get(name), list))
    return [each for values in lists for each in values if isinstance(each, dict)]


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What a `$ref` leads to; None: nothing within the schema."""
    if not reference.startswith("#"):
        return None
    at: Any = root
    for key in unquote(reference[1:]).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list):
            at = next((each for index, each in enumerate(at) if key == str(index)), None)
        else:
            at = at.get(key) if isinstance(at, dict) else None
    return at if reference[1:2] in ("", "/") else None


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


def _types(whole: list[Schema]) -> set[str]:
    """The types that schemas allow together. Types that cannot contain the schema are all `others`."""
    found = {"array", "object", "others"}
    for schema in whole:
        kinds = schema.get("type", list(found))
        kinds = kinds if isinstance(kinds, list) else [kinds]
        found &= {kind if kind in ("array", "object") else "others" for kind in kinds if isinstance(kind, str)}
    return found or {"others"}


def _needed_properties(whole: list[Schema]) -> list[list[Any]]:
    """Of each property that an object must have: schemas; one of them must hold."""
    required = {name for each in whole for name in listed(each.get("required")) if isinstance(name, str)}
    needed: list[list[Any]] = []
    for schema in whole:
        named = properties if isinstance(properties := schema.get("properties"), dict) else {}
        patterns = list(found.values()) if isinstance(found := schema.get("patternProperties"), dict) else []
        rest = schema.get("additionalProperties")
        others = patterns if patterns and rest is False else [*patterns, rest]
        needed += [[named[name]] if name in named else others for name in required]
        least = schema.get("minProperties")
        if isinstance(least, int | float) and least > len(required):
            needed.append([*named.values(), *others])
    return needed


def _needed_items(whole: list[Schema]) -> list[list[Any]]:
    """Of each item that an array must have: a schema that must hold."""
    least = max((count for each in whole if isinstance(count := each.get("minItems"), int | float)), default=0)
    needed: list[list[Any]] = []
    for schema in whole:
        first, rest = schema.get("prefixItems"), schema.get("items")
        first = first if isinstance(first, list) else listed(rest)
        needed += [[each] for index, each in enumerate([*first, rest]) if index < least]
    return needed
