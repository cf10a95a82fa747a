"""Recursive schemas: one that no value satisfies is refused, and no answer begins a part that has no end."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from quire.errors import InvalidRequestError
from quire.grammar import schemas
from quire.grammar.schema_tree import referred
from quire.grammar.schemas import usable
from quire.grammar.text import grammar_text
from quire.sampling_params import StructuredOutputsParams as Structured
from tests.examples import examples
from tests.grammar.test_schemas import ends, is_valid, matcher_of, takes, walk

Schema = dict[str, Any]
REFERENCES = [{"$ref": f"#{at}"} for at in ("", "/$defs/a", "/$defs/b")]
FLAT = [True, False, {"type": "null"}, {"const": "a"}, {"enum": [1, {"a": None}, [None]]}, *REFERENCES, *REFERENCES]
NAMES = ["a", "b"]


def any_schema(depth: int) -> st.SearchStrategy[Any]:
    """Few keywords, so that most schemas need their references."""
    if depth == 0:
        return st.sampled_from(FLAT)
    inner = any_schema(depth - 1)
    required = st.lists(st.sampled_from(NAMES), unique=True)
    several = st.lists(inner, min_size=1, max_size=2)
    typed = st.sampled_from([{"type": "object"}, {"type": "array"}, {"type": ["array", "null"]}, {}])
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
        "required": required,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "^b"]), inner, min_size=1, max_size=2),
        "additionalProperties": inner,
        "items": inner,
        "minItems": st.integers(0, 2),
        "minProperties": st.integers(0, 1),
        "anyOf": several,
        "allOf": several,
    }
    some = st.fixed_dictionaries({}, optional=keywords)
    return st.one_of(st.sampled_from(FLAT), st.builds(lambda found, kind: {**found, **kind}, some, typed))


RECURSIVE = st.builds(
    lambda root, a, b: {**(root if isinstance(root, dict) else {}), "$defs": {"a": a, "b": b}},
    any_schema(2), any_schema(2), any_schema(1),
)  # fmt: skip


def values() -> Iterator[Any]:
    """Small ones, up to three levels."""
    level: list[Any] = [None, 1, "a"]
    yield from level
    for size in (2, 1):
        rows = [list(row) for count in range(size + 1) for row in itertools.product(level, repeat=count)]
        names = [names for count in range(3) for names in itertools.combinations(NAMES, count)]
        objects = [
            dict(zip(keys, each, strict=True))
            for keys in names
            for each in itertools.product(level[:9], repeat=len(keys))
        ]
        level = [*level, *rows, *objects]
        yield from level


def begin(matcher: LLMatcher, numbers: random.Random) -> None:
    """Append up to 12 characters of ASCII that the grammar allows."""
    for _ in range(numbers.randrange(12)):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:128]
        if matcher.is_stopped() or not bits.any():
            return
        assert matcher.consume_token(int(numbers.choice(np.flatnonzero(bits))))


def has_answer(schema: Schema, numbers: random.Random) -> bool:
    """Whether one of some values satisfies the schema: the smallest ones, and any others."""
    validator = jsonschema.Draft202012Validator(schema)
    try:
        return any(map(validator.is_valid, [*VALUES[:50], *numbers.sample(VALUES, 100)]))
    except RecursionError:  # it refers to itself for the same value
        return False


def taken(schema: Schema) -> tuple[LLMatcher | None, str]:
    """Its matcher, or why it is refused."""
    try:
        return matcher_of(schema), "taken"
    except InvalidRequestError as error:
        return None, error.message.partition("used: ")[2]


VALUES = [*values()]


@settings(max_examples=examples(600), deadline=None, print_blob=True)
@given(RECURSIVE, st.integers(0, 99))
def test_refused_are_those_that_nothing_satisfies(schema: Schema, seed: int) -> None:
    """Beside a plain twin, which tries small values. And an answer can end wherever it is."""
    numbers = random.Random(seed)
    matcher, why = taken(schema)
    event(re.sub("#.*|[^a-z ]", "", why)[:40])
    if matcher is None:
        is_ours = "has no end" in why  # llguidance refuses more: a required key that only a pattern allows
        assert not is_ours or not has_answer(schema, numbers), why
        return
    for _ in range(4):
        begun = matcher.deep_copy()
        if (text := walk(begun, numbers)) is not None:
            assert is_valid(text, schema), text
        begun = matcher.deep_copy()
        begin(begun, numbers)
        assert ends(begun), "an answer that begins so has no end"


LIST = {"type": "array", "items": {"$ref": "#/$defs/list"}, "minItems": 1}
NEEDS_A = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
A, B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}


def test_an_alternative_without_an_end_changes_no_other_true() -> None:
    endless = {"type": "object", "properties": {"e": {"$ref": "#/$defs/e"}}, "required": ["e"]}
    choice = {**endless, "anyOf": [True, {"type": "string"}]}
    choice.pop("type")
    properties = {"flag": {"const": True}, "n": choice}
    schema = {"type": "object", "properties": properties, "required": ["flag"], "$defs": {"e": endless}}
    left = usable({**schema, "additionalProperties": False})
    assert left["properties"]["flag"] == {"const": True}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/$defs/f"}, "b": {"$ref": []}}, "$defs": {"f": False}},
        {"type": "object", "propertyNames": {"pattern": []}},
        {"properties": {"\ud800": {}}, "propertyNames": {"pattern": "a"}},
    ],
)
def test_what_is_no_schema_is_refused(schema: Schema) -> None:
    assert taken(schema)[0] is None


def test_references_to_false_are_left_out() -> None:
    """llguidance alone refuses the schema for its optional key."""
    schema = {"type": "object", "properties": {"a": B}, "additionalProperties": False, "$defs": {"a": False, "b": A}}
    matcher, why = taken(schema)
    assert matcher is not None, why
    assert walk(matcher, random.Random(0)) == "{}"


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "anyOf": [{"required": ["a"]}] * 2}, "#"),
        ({**NEEDS_A, "oneOf": [{"properties": {"k": {"const": 1}}}, {"properties": {"k": {"const": 2}}}]}, "#"),
        ({"anyOf": [NEEDS_A, {"type": "integer", "minimum": 5, "maximum": 4}]}, "#"),
        (
            {"anyOf": [A, B], "$defs": {"a": {"type": "array", "items": B, "minItems": 1}, "b": LIST, "list": LIST}},
            "#/$defs/b",
        ),
        (
            {
                **{"type": "object", "required": ["ab", "cd"], "additionalProperties": False},
                "patternProperties": {"^a": True, "^c": {"$ref": "#"}, "^e": True},
            },
            "#",
        ),
        ({"properties": {"x": LIST}, "required": ["x"], "type": "object", "$defs": {"list": LIST}}, "#/properties/x"),
    ],
)
def test_schemas_without_an_answer(schema: Schema, path: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(f"has to contain itself: {path}. ")):
        grammar_text(Structured(json=schema))


@pytest.mark.parametrize(
    ("schema", "text", "begun"),
    [
        ({"anyOf": [{"type": "null"}, A], "$defs": {"a": LIST, "list": LIST}}, "null", "["),
        ({"type": "object", "properties": {"x": LIST}, "$defs": {"list": LIST}}, '{"y": 1}', '{"x"'),
        ({"items": A, "type": "array", "$defs": {"a": {"$ref": "#/$defs/list"}, "list": LIST}}, "[]", "[["),
        (NEEDS_A | {"type": ["object", "null"]}, '{"a": null}', None),
        ({"properties": {"a": A}, "$defs": {"a": {**NEEDS_A, "properties": {"a": A}}}}, '{"b": 1}', '{"a": {'),
        ({"required": ["a"], "properties": {"a": A}, "$defs": {"a": {**LIST, "type": ["array", "null"], "items": A}}},
         '{"a": [[null]]}', None),
        ({"required": ["a"], "properties": {"a": A}, "$defs": {"a": {"items": A, "minItems": 1}}}, '{"a": {}}', None),
        ({"patternProperties": {"^a": {"$ref": "#/$defs/list"}, "^b": True}, "type": "object",
          "additionalProperties": False, "required": ["bc"], "$defs": {"list": LIST}}, '{"bc": 1}', '{"a'),
        (
            {
                **{"type": "object", "properties": {"a": {"$ref": "#"}, "k": {"type": "null"}}},
                "anyOf": [{"required": ["a"]}, {"required": ["k"]}],
            },
            '{"a": {"k": null}}',
            None,
        ),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "null", None),
        ({"type": ["object", "null"], "required": ["a"], "additionalProperties": {"$ref": "#/$defs/list"},
          "$defs": {"list": LIST}}, "null", "{"),
    ],
)  # fmt: skip
def test_what_has_no_end_is_left_out(schema: Schema, text: str, begun: str | None) -> None:
    """`text`: an answer. `begun`: the beginning of a part without an end."""
    matcher = matcher_of(schema)
    assert takes(matcher, text)
    if begun is not None:
        begins = matcher.deep_copy()
        assert begins.try_consume_tokens(list(begun.encode())) < len(begun)


def test_contradictions_are_left_to_the_engine() -> None:
    """Alternatives that exclude each other are no reason to refuse a recursive schema."""
    kinds = [{"properties": {"kind": {"const": kind}}} for kind in "xy"]
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["x", "y"]}, "next": {"$ref": "#"}},
        "required": ["kind"],
        "additionalProperties": False,
        "anyOf": kinds,
        "allOf": [{"anyOf": [dict(each) for each in kinds]}],
    }
    matcher = matcher_of(schema)
    assert takes(matcher, '{"kind": "x", "next": {"kind": "y"}}')
    assert not takes(matcher, '{"kind": "z"}')


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema may have more states than can be looked at: here each level doubles them."""
    levels = {
        str(at): {"anyOf": [{"items": {"$ref": f"#/$defs/{at + 1}"}}, {"items": {"$ref": "#/$defs/0"}}], "minItems": 1}
        for at in range(12)
    }
    both = {"allOf": [{"$ref": f"#/$defs/{at}"} for at in range(12)], "$defs": {**levels, "12": {"type": "null"}}}
    monkeypatch.setattr(schemas, "MAX_WORK", 20_000)
    with pytest.raises(InvalidRequestError, match="in more ways than Quire can check"):
        grammar_text(Structured(json=both))


def spelled(count: int) -> list[Schema]:
    """References to one definition, each written in another way."""
    places = itertools.islice(itertools.product((False, True), repeat=10), count)
    names = (
        "".join(f"%{ord(c):02x}" if is_coded else c for c, is_coded in zip("abcdefghij", at, strict=True))
        for at in places
    )
    return [{"$ref": f"#/$defs/{name}"} for name in names]


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": spelled(150), "$defs": {"abcdefghij": {"properties": {str(at): {} for at in range(150)}}}},
        {"anyOf": spelled(150), "$defs": {"abcdefghij": [{} for _ in range(150)]}},
        {
            "anyOf": [{"items": {"$ref": "#"}}, *({"$ref": "#/$defs/a", "minimum": at} for at in range(20))],
            "$defs": {"a": {"enum": [*range(100)]}},
        },
    ],
    ids=["a large definition", "a list", "questions about an enum"],
)
def test_work_that_grows_with_the_square_is_counted(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "MAX_WORK", 20_000)
    with pytest.raises(InvalidRequestError, match="in more ways than Quire can check"):
        grammar_text(Structured(json=schema))


def test_a_schema_in_itself_may_have_a_large_enum() -> None:
    kinds = [f"a kind of some length {at}" for at in range(3000)]
    tree = {"properties": {"kind": {"enum": kinds}, "in": {"type": "array", "items": {"$ref": "#"}}}}
    assert takes(matcher_of({"type": "object", **tree}), json.dumps({"kind": kinds[-1], "in": [{"kind": kinds[0]}]}))


@pytest.mark.parametrize(
    ("place", "found"), [("0", 1), ("1", 2), ("01", None), ("2", None), ("-1", None), ("1" * 30, None)]
)
def test_a_reference_to_a_place_in_a_list(place: str, found: int | None) -> None:
    assert referred(f"#/prefixItems/{place}", {"prefixItems": [1, 2]}) == found


def test_a_value_of_the_twin_is_what_jsonschema_takes() -> None:
    assert len(VALUES) > 100
    assert jsonschema.Draft202012Validator(LIST | {"$defs": {"list": True}}).is_valid([1])
