"""Brings schemas to a form that llguidance 1.9 enforces.

It would accept some keywords without enforcing them. These keywords are rewritten or refused.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from quire.grammar.endless import EndlessError, EndlessParts
from quire.grammar.objections import contradicts_itself
from quire.grammar.schema_tree import (
    DEFINITIONS,
    FOR_PEOPLE,
    Schema,
    has_cycle,
    listed,
    reference_of,
    referred,
    replaced,
    subschemas,
)

MAX_WORK = 200_000  # schemas that are looked at with others; 0.2 s
_BOUNDS = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "allOf", "anyOf", "oneOf"}
_INTEGERS_ONLY = 2.0**53  # from here on, a double has no fractions
_DIGITS = 15  # digits of the longest numbers that llguidance reads exactly
_ALTERNATIVES = ("anyOf", "oneOf")
_OTHER_KEYS = {"patternProperties", "unevaluatedProperties"}


class UnusableError(ValueError):
    """Why a schema cannot be used, with the JSON pointer of the place."""


def usable(schema: Schema) -> Schema:
    """The schema in a form that llguidance enforces. Raises UnusableError."""
    checked = _Checked(schema)
    if nothing := checked.references_to_false():
        checked = _Checked(replaced(checked.root, nothing))
    if changes := checked.names_of_keys():
        checked = _Checked(replaced(checked.root, changes))
    if why := checked.repeated_key():
        raise UnusableError(why)
    if changes := checked.inclusive_bounds():
        checked = _Checked(replaced(checked.root, changes))
    try:
        return checked.without_endless_parts()
    except EndlessError as error:
        raise UnusableError(str(error)) from None


def has_free_keys(schema: Schema) -> bool:
    """Whether an object with named keys may have others, which llguidance would let be a named one with an escape."""
    return any(
        ("properties" in each or "patternProperties" in each) and each.get("additionalProperties") is not False
        for _, each in subschemas(schema)
    )


class _Checked:
    """A schema with all that its references reach: definitions that nothing refers to do not matter."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._work = 0
        self._found: dict[int, tuple[str, Schema]] = {}
        self._targets: dict[str, Any] = {}  # the target of each reference; None: the schema has no such target
        waiting: list[tuple[str, Any]] = [("#", root)]
        while waiting:
            path, part = waiting.pop()
            if id(part) in self._found:
                continue
            for at, each in subschemas(part, path, but=DEFINITIONS):
                self._count(1)  # a part comes again for each way to write a reference to a list of it
                self._found.setdefault(id(each), (at, each))
                if (reference := reference_of(each)) is not None and reference not in self._targets:
                    self._targets[reference] = target = referred(reference, root)
                    waiting.append((reference, target))
        self._keywords = {name for _, each in self._found.values() for name in each}

    def references_to_false(self) -> dict[int, bool]:
        """False in place of schemas that refer to it, which llguidance refuses even where nobody needs them."""
        waiting = [reference for reference, target in self._targets.items() if target is False]
        behind = defaultdict[str, list[str]](list)
        for reference, target in self._targets.items():
            further = reference_of(target) if isinstance(target, dict) and target is not self.root else None
            if further is not None:
                behind[further].append(reference)
        false = set[str]()
        while waiting:
            if (reference := waiting.pop()) not in false:
                false.add(reference)
                waiting += behind[reference]
        others = (each for _, each in self._found.values() if each is not self.root)
        return {id(each): False for each in others if reference_of(each) in false}

    def names_of_keys(self) -> dict[int, Schema]:
        """Replacements of schemas with `propertyNames` that can be said with other keywords."""
        if "propertyNames" not in self._keywords:
            return {}
        return {
            id(each): changed
            for _, each in self._found.values()
            if "propertyNames" in each and (changed := _with_names_of_keys(each)) is not None
        }

    def inclusive_bounds(self) -> dict[int, Schema]:
        """Replacements of schemas with an exclusive bound that llguidance would take for an inclusive bound.

        The next number of 15 digits becomes an inclusive bound, so numbers that are nearer are not allowed.
        """
        if self._keywords.isdisjoint(("exclusiveMinimum", "exclusiveMaximum")):
            return {}
        return {
            id(part): _with_inclusive_bounds(part)
            for _, each in self._found.values()
            if not _BOUNDS.isdisjoint(each)
            for together in self._at_once(each)
            if _is_inexact(together)
            for part in together
            if "exclusiveMinimum" in part or "exclusiveMaximum" in part
        }

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

    def without_endless_parts(self) -> Schema:
        """The schema without parts that have to contain themselves. Raises EndlessError."""
        if not self._is_recursive():
            return self.root
        paths = {id(each): path for path, each in self._found.values()}
        return EndlessParts(self.root, self._targets, paths, self._count).left_out()

    def _is_recursive(self) -> bool:
        """Whether a reference leads to a schema that the reference is a part of."""
        targets: dict[str, set[str]] = {}
        for reference, target in self._targets.items():
            parts = [each for _, each in subschemas(target, but=DEFINITIONS)]
            self._count(len(parts))
            targets[reference] = {further for each in parts if (further := reference_of(each)) is not None}
        return has_cycle(targets)

    def _at_once(self, schema: Schema) -> Iterator[list[Schema]]:
        """Groups of schemas that may hold for one value, with one alternative of a list, and all schemas of other
        lists.
        """
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
                reference = reference_of(each)
                target = None if reference is None else self._targets.get(reference)
                waiting += [target] if isinstance(target, dict) else []
        return list(found.values())

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise UnusableError("its schemas refer to each other in more ways than Quire can check")


def _schemas(schema: Schema, *names: str) -> list[Schema]:
    """The schemas in lists of these names."""
    lists = (value for name in names if isinstance(value := schema.get(name), list))
    return [each for values in lists for each in values if isinstance(each, dict)]


def _with_names_of_keys(schema: Schema) -> Schema | None:
    """The schema with one pattern for all keys, or with all of its keys, in place of `propertyNames`."""
    changed = dict(schema)
    names = changed.pop("propertyNames")
    if isinstance(names, dict):
        names = {name: value for name, value in names.items() if name not in FOR_PEOPLE}
        names = names if names.get("type") != "string" else {k: v for k, v in names.items() if k != "type"}
    if names is True or names == {}:
        return changed
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    if (
        not isinstance(names, dict)
        or len(names) != 1
        or not isinstance(properties, dict)
        or not _OTHER_KEYS.isdisjoint(schema)
    ):
        return None
    ((keyword, value),) = names.items()
    allowed = {"const": [value], "enum": listed(value)}.get(keyword)
    if keyword == "pattern" and isinstance(value, str):
        allowed = [name for name in properties if not contradicts_itself({"const": name, "pattern": value})]
        changed["patternProperties"] = {value: rest}
    elif allowed is None:
        return None
    named = dict.fromkeys((name for name in allowed if isinstance(name, str)), rest)
    changed["properties"] = {name: each if name in named else False for name, each in properties.items()} | {
        name: rest for name in named if name not in properties
    }
    return changed | {"additionalProperties": False}


def _is_inexact(together: list[Schema]) -> bool:
    """Whether llguidance takes an exclusive bound for an inclusive one: 1 within (1, 1.5], -1 within [-1.5, -1)."""
    lows, highs, after, before = set(), set(), set(), set()  # the last two: whole numbers that bounds exclude
    for low, above, high, below in map(_bounds, together):
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


def _bounds(schema: Schema) -> list[float | None]:
    """minimum, exclusiveMinimum, maximum, exclusiveMaximum; None: there is none, or one without fractions near it.

    The exclusive ones of draft 4 are booleans that say something about the others.
    """
    low, above, high, below = (
        schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    )
    above, below = low if above is True else above, high if below is True else below
    return [
        value
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _INTEGERS_ONLY
        else None
        for value in (low, above, high, below)
    ]


def _with_inclusive_bounds(schema: Schema) -> Schema:
    """The schema, with an inclusive bound next to each exclusive bound that is whole, in its place."""
    low, above, high, below = _bounds(schema)
    changed = dict(schema)
    if above is not None and above == int(above):
        changed["minimum"] = max(above + _step(above), above if low is None else low)
        del changed["exclusiveMinimum"]
    if below is not None and below == int(below):
        changed["maximum"] = min(below - _step(below), below if high is None else high)
        del changed["exclusiveMaximum"]
    return changed


def _step(whole: float) -> float:
    """From a whole number to the next one with _DIGITS digits."""
    return min(10.0 ** (len(str(abs(int(whole)))) - _DIGITS), 0.5)


def _counts_keys_twice(together: list[Schema]) -> bool:
    """Whether keys that have no name in the schema may make up `minProperties`: llguidance lets one come twice."""
    counts = [count for each in together if isinstance(count := each.get("minProperties"), int | float)]
    names = (each["required"] for each in together if isinstance(each.get("required"), list))
    required = {name for each in names for name in each if isinstance(name, str)}
    return max(counts, default=0) > len(required) + 1
