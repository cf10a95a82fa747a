"""Parts of a recursive schema that no value satisfies, because they have to contain themselves.

llguidance leaves out parts that contradict themselves, but not parts without an end: a model that begins such a part
goes on until max_tokens. So these parts are taken out of a schema, and a schema that is such a part is refused.

A state is a set of schemas that hold for one value together. It can end in one of its ways: with one alternative of
each `anyOf`, `oneOf` and `enum`, as one kind of value, in which each part that has to be there is in a state that can
end. The states that can end are the least fixed point of this rule. The emptiness of an alternating tree automaton is
decided in this way (Comon et al., Tree Automata Techniques and Applications, chapter 7).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.grammar.objections import contradicts_itself
from quire.grammar.schema_tree import Schema, has_cycle, listed, reference_of, replaced, subschemas

State = frozenset[int]  # ids of schemas

_TYPES = {"array", "boolean", "null", "number", "object", "string"}
_CONTAINERS = {"array", "object"}
_SCALAR_KEYWORDS = {
    "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxLength", "maximum", "minLength", "minimum",
    "multipleOf", "pattern", "type",
}  # fmt: skip
_NEVER_EMPTY = _SCALAR_KEYWORDS - {"enum", "format", "pattern"}  # one of these alone, with at most a type
_QUESTION = 100  # work of a question to llguidance: 0.1 ms
# The work for each character of a question: 0.25 us for values alone, some 4 us if another keyword restricts them.
_READ, _COMPARED = 0.25, 4.0
_VALUES = 10  # values of an enum that are checked in a microsecond


class EndlessError(ValueError):
    """A schema, or a part of it that cannot be taken out, has no end."""


@dataclass(slots=True, eq=False)
class _Way:
    """A way to satisfy the schemas of a state."""

    schemas: dict[int, Schema]
    chosen: list[int]  # alternatives
    kind: str  # a container, or `scalar`; empty: the alternatives lead back to themselves for the same value
    parts: list[State] = field(default_factory=list)  # its items and properties
    needed: list[list[State]] = field(default_factory=list)  # at least one of each list must be present
    is_possible: bool = True  # without looking at the parts


class EndlessParts:
    """The states of a schema.

    Args:
        targets: the targets of references; None: a reference leads to nothing within the schema.
        paths: JSON pointers by the ids of schemas.
        count: is told about work, and may raise an error where it is too much.
    """

    def __init__(
        self, root: Schema, targets: Mapping[str, Any], paths: Mapping[int, str], count: Callable[[int], None]
    ) -> None:
        self._root, self._targets, self._paths, self._count = root, targets, paths, count
        self._schemas: dict[int, Any] = {}  # the schemas of all states
        self._values: dict[int, list[Schema]] = {}  # alternatives for an enum
        self._answers: dict[str, bool] = {}  # answers of llguidance
        self._ways: dict[State, list[_Way]] = {}
        self._ended: set[State] = set()
        self._contradictory: set[State] = set()
        self._first = self._state([root])
        self._look_at_all()
        self._least_fixed_point(self._ended, lambda state: any(map(self._can_end, self._ways[state])))
        self._least_fixed_point(self._contradictory, lambda state: all(map(self._contradicts, self._ways[state])))

    def left_out(self) -> Schema:
        """The schema without parts that have no end. Raises EndlessError."""
        if self._first not in self._ended:
            if (path := self._endless_path()) is None:
                return self._root  # the schema contradicts itself; llguidance has the better message
            raise EndlessError(f"this part has no end, because it has to contain itself: {path}")
        states, ways = self._reached()
        can_end = [way for way in ways if self._can_end(way)]
        kinds = {(each, way.kind) for way in can_end for each in way.schemas}
        alive = {each for each, _ in kinds}.union(*(state for state in states if state in self._ended))
        gone: set[int] = set()
        narrowed: dict[int, set[str]] = {}
        for state in states - self._ended - self._contradictory:
            gone.update(self._needless(state, [each for each in state if each not in alive]))
        for way in ways:
            if self._can_end(way) or self._contradicts(way) or not way.kind or not gone.isdisjoint(way.schemas):
                continue
            if dead := [each for each in way.chosen if each in self._paths and each not in alive]:
                gone.update(dead)
                continue
            held = [each for each in way.schemas if (each, way.kind) not in kinds and each in self._paths]
            held.sort(key=lambda each: "$ref" in self._schemas[each])
            narrowed.setdefault(self._needless(way.schemas, held)[0], set()).add(way.kind)
        for each in gone:
            if any(id(inner) in alive for _, inner in subschemas(self._schemas[each])):
                self._needless([each], [])
        changes: dict[int, Any] = dict.fromkeys(gone, False)
        for each, without in narrowed.items():
            schema = self._schemas[each]
            changes[each] = {**schema, "type": [name for name in _type_names(schema) if name not in without]}
        left: Schema = replaced(self._root, changes)
        return left

    def _needless(self, together: Collection[int], dead: list[int]) -> list[int]:
        """`dead`: schemas of `together` that have no end together, and that are not needed elsewhere."""
        if not dead:
            paths = ", ".join(sorted(self._paths[each] for each in together if each in self._paths))
            raise EndlessError(f"these parts together have no end, because they have to contain themselves: {paths}")
        return dead

    def _endless_path(self) -> str | None:
        """The path of a part that the whole schema needs, and that needs itself; None: there is none."""
        state, seen = self._first, set[State]()
        while state not in self._contradictory:
            way = next(way for way in self._ways[state] if not self._contradicts(way))
            if state in seen or not way.kind:
                return min((self._paths[each] for each in way.schemas if each in self._paths), key=len)
            seen.add(state)
            choices = next(choices for choices in way.needed if self._ended.isdisjoint(choices))
            state = next(each for each in choices if each not in self._contradictory)
        return None

    def _reached(self) -> tuple[set[State], list[_Way]]:
        """States of the parts that an answer may begin, and the ways of the states that can end."""
        states, waiting, ways = {self._first}, [self._first], []
        while waiting:
            for way in self._ways[waiting.pop()]:
                ways.append(way)
                for part in way.parts if self._can_end(way) else ():
                    if part not in states:
                        states.add(part)
                        waiting += [part] if part in self._ended else []
        return states, ways

    def _look_at_all(self) -> None:
        waiting = [self._first]
        while waiting:
            if (state := waiting.pop()) not in self._ways:
                self._ways[state] = ways = [way for found in self._combined(state) for way in self._kinds(*found)]
                waiting += [part for way in ways for part in way.parts]

    def _least_fixed_point(self, found: set[State], holds: Callable[[State], bool]) -> None:
        num_found = -1
        while num_found < len(found):
            num_found = len(found)
            for state in reversed(self._ways):  # the parts that it needs mostly come after it
                if state not in found:
                    self._count(1 + len(self._ways[state]))
                    if holds(state):
                        found.add(state)

    def _can_end(self, way: _Way) -> bool:
        return way.is_possible and not any(self._ended.isdisjoint(choices) for choices in way.needed)

    def _contradicts(self, way: _Way) -> bool:
        """Whether nothing satisfies a way because of what a finite part of it says."""
        contradicts = any(self._contradictory.issuperset(choices) for choices in way.needed)
        return contradicts or (bool(way.kind) and not way.is_possible)

    def _state(self, schemas: list[Any]) -> State:
        self._schemas.update((id(each), each) for each in schemas)
        return frozenset(id(each) for each in schemas if each is not True)

    def _combined(self, state: State) -> Iterator[tuple[dict[int, Schema], list[int], bool]]:
        """For each choice of alternatives: all schemas that hold then, the alternatives, and whether they lead back to
        themselves for the same value, which says nothing about it.
        """
        waiting: list[tuple[dict[int, Schema], list[tuple[int, Any]], list[tuple[int, list[Any]]], list[int], Any]]
        waiting = [({}, [(0, self._schemas[each]) for each in state], [], [], [])]
        while waiting:
            found, adding, lists, chosen, edges = waiting.pop()
            while adding:
                self._count(1)
                owner, each = adding.pop()
                if each is False:
                    break
                edges.append((owner, id(each)))
                if not isinstance(each, dict) or id(each) in found:
                    continue
                self._count(len(listed(each.get("enum"))) // _VALUES)
                found[id(each)] = self._schemas[id(each)] = each
                adding += [(id(each), part) for part in listed(each.get("allOf"))]
                if (reference := reference_of(each)) and (target := self._targets.get(reference)) is not None:
                    adding.append((id(each), target))
                lists += [(id(each), each[name]) for name in ("anyOf", "oneOf") if isinstance(each.get(name), list)]
                if "const" in each and isinstance(each["const"], dict | list):
                    adding.append((id(each), self._alternatives(each, [each["const"]])[-1]))
                elif any(isinstance(value, dict | list) for value in listed(each.get("enum"))):
                    lists.append((id(each), self._alternatives(each, each["enum"])))
            else:
                if not lists:
                    yield found, chosen, _is_circle(edges)
                    continue
                owner, alternatives = lists.pop()
                for each in alternatives:
                    self._count(1 + len(found))
                    waiting.append(({**found}, [(owner, each)], lists[:], [*chosen, id(each)], edges[:]))

    def _alternatives(self, schema: Schema, values: list[Any]) -> list[Schema]:
        """Schemas for the values of an enum: one for all that are no containers, and one for each container."""
        if id(schema) not in self._values:
            scalars = [value for value in values if not isinstance(value, dict | list)]
            containers = [_schema_of(value) for value in values if isinstance(value, dict | list)]
            self._values[id(schema)] = [{"enum": scalars}, *containers]
        return self._values[id(schema)]

    def _kinds(self, schemas: dict[int, Schema], chosen: list[int], is_circle: bool) -> Iterator[_Way]:
        if is_circle:
            yield _Way(schemas, chosen, kind="", is_possible=False)
            return
        each_of = list(schemas.values())
        types = _TYPES.intersection(*map(_types, each_of))
        if types - _CONTAINERS:
            is_possible = self._has_scalar(each_of, types - _CONTAINERS)
            yield _Way(schemas, chosen, "scalar", is_possible=is_possible)
        for kind, parts_of in (("array", self._items), ("object", self._properties)):
            if kind in types:
                way = _Way(schemas, chosen, kind)
                parts_of(way, each_of)
                yield way

    def _has_scalar(self, schemas: list[Schema], types: set[str]) -> bool:
        """Whether a number, a string, a boolean or null satisfies all of these schemas."""
        asked = [{name: value for name, value in each.items() if name in _SCALAR_KEYWORDS} for each in schemas]
        keywords = [name for each in asked for name in each if name != "type"]
        if len(keywords) <= 1 and _NEVER_EMPTY.issuperset(keywords) and ("const" not in keywords or types == _TYPES):
            return True
        question = {"type": sorted(types), "allOf": [each for each in asked if each]}
        return self._is_satisfied(question, _COMPARED if len(keywords) > 1 else _READ)

    def _is_satisfied(self, schema: Schema, work: float = _COMPARED) -> bool:
        """Whether llguidance finds no contradiction in a schema that has no parts.

        Args:
            work: the work for a character.
        """
        asked = json.dumps(schema)
        if asked not in self._answers:
            self._count(_QUESTION + int(work * len(asked)))
            self._answers[asked] = not contradicts_itself(schema)
        return self._answers[asked]

    def _items(self, way: _Way, schemas: list[Schema]) -> None:
        least, most = _least(schemas, "minItems"), _most(schemas, "maxItems")
        heads: list[list[Any]] = []
        rests: list[Any] = []
        for each in schemas:
            items, further = each.get("items"), each.get("additionalItems")
            if isinstance(items, list):
                heads.append(items)
                rests.append(True if further is None else further)
            else:
                heads.append([] if "additionalItems" in each else listed(each.get("prefixItems")))
                rests.append(True if items is None else items)
        length = max(map(len, heads), default=0)
        self._count(length * len(schemas))
        columns = [
            [head[at] if at < len(head) else rest for head, rest in zip(heads, rests, strict=True)]
            for at in range(length)
        ]
        way.parts = [self._state(column) for column in [*columns, rests]]
        way.needed = [[part] for at, part in enumerate(way.parts) if at < least]
        way.is_possible = least <= most

    def _properties(self, way: _Way, schemas: list[Schema]) -> None:
        least, most = _least(schemas, "minProperties"), _most(schemas, "maxProperties")
        required = {name for each in schemas for name in listed(each.get("required")) if isinstance(name, str)}
        names = dict.fromkeys([name for each in schemas for name in _named(each, "properties")]) | dict.fromkeys(
            sorted(required)
        )
        patterns = dict.fromkeys(pattern for each in schemas for pattern in _named(each, "patternProperties"))
        self._count((len(names) + len(patterns) + 1) * len(schemas))
        by_name = {
            name: self._state([part for each in schemas for part in self._of_name(each, name)]) for name in names
        }
        others = [
            self._state([_named(each, "patternProperties").get(pattern, _further(each)) for each in schemas])
            for pattern in patterns
        ]
        others.append(self._state([_further(each) for each in schemas]))
        way.parts = [*by_name.values(), *others]
        way.needed = [[by_name[name]] for name in required]
        if least > len(required):
            way.needed.append([*(by_name[name] for name in names if name not in required), *others])
        way.is_possible = least <= most and len(required) <= most

    def _of_name(self, schema: Schema, name: str) -> list[Any]:
        """The schemas that a schema demands of a property."""
        parts = [properties[name]] if name in (properties := _named(schema, "properties")) else []
        patterns = _named(schema, "patternProperties").items()
        parts += [part for pattern, part in patterns if self._is_satisfied({"const": name, "pattern": pattern})]
        return parts or [_further(schema)]


def _is_circle(edges: list[tuple[int, int]]) -> bool:
    if len({child for _, child in edges}) == len(edges):  # each child is reached in only one way
        return False
    graph: dict[int, list[int]] = {}
    for owner, child in edges:
        graph.setdefault(owner, []).append(child)
    return has_cycle(graph)


def _schema_of(value: Any) -> Schema:
    """The schema that an object or an array alone satisfies."""
    if isinstance(value, dict):
        properties = {name: {"const": each} for name, each in value.items()}
        return {"type": "object", "properties": properties, "required": [*value], "additionalProperties": False}
    items = [{"const": each} for each in value]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(value), "maxItems": len(value)}


def _type_names(schema: Schema) -> list[str]:
    """The types that a schema names, or all of them."""
    names = schema.get("type", sorted(_TYPES))
    return [names] if isinstance(names, str) else listed(names)


def _types(schema: Schema) -> set[str]:
    """The types that a schema allows, `number` for `integer`."""
    types = {"number" if name == "integer" else name for name in _type_names(schema) if isinstance(name, str)} & _TYPES
    values = [schema["const"]] if "const" in schema else listed(schema.get("enum"))
    return types - _CONTAINERS if values and not any(isinstance(each, dict | list) for each in values) else types


def _least(schemas: list[Schema], name: str) -> float:
    return max((count for each in schemas if isinstance(count := each.get(name), int | float)), default=0)


def _most(schemas: list[Schema], name: str) -> float:
    return min((count for each in schemas if isinstance(count := each.get(name), int | float)), default=float("inf"))


def _named(schema: Schema, keyword: str) -> Mapping[str, Any]:
    return found if isinstance(found := schema.get(keyword), dict) else {}


def _further(schema: Schema) -> Any:
    """The schemas that a schema demands of properties that it does not name."""
    return schema.get("additionalProperties", True)
