"""A grammar allows exactly the texts that jsonschema accepts: random walks over many schemas, without a model."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer

from quire.errors import InvalidRequestError
from quire.grammar.compiled import compiled_matcher
from quire.grammar.text import grammar_text
from quire.sampling_params import StructuredOutputsParams as Structured
from tests.examples import examples

Schema = dict[str, Any]

BYTES = LLTokenizer("byte")
PAGE = (Path(__file__).parents[2] / "docs" / "structured_output.md").read_text(encoding="utf-8")
NUMBERS = (0, 1, 2, -1, 0.5, 1.5, -0.5, 3, 10)
VALUES: tuple[Any, ...] = (None, True, 0, 1, 1.5, "a", "ab", "", [], [1, "a"], {}, {"a": 1})
PATTERNS = ("a", "^a", "b$", "^(a|b)*$", "^[a-c]{2,3}$", "[^a]", r"\d", "^.$")


def matcher_of(schema: Schema, **options: Any) -> LLMatcher:
    return compiled_matcher(BYTES, grammar_text(Structured(json=schema, **options)))


def tagged(schema: Schema) -> LLMatcher:
    """The schema in a structural tag, behind its trigger."""
    tag = {"structures": [{"begin": "<a>", "schema": schema, "end": ""}], "triggers": ["<a>"]}
    matcher = compiled_matcher(BYTES, grammar_text(Structured(structural_tag=json.dumps(tag))))
    assert matcher.consume_tokens(list(b"<a>"))
    return matcher


def takes(matcher: LLMatcher, text: str) -> bool:
    """Whether an answer may be this text."""
    matcher, data = matcher.deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def maybe(numbers: random.Random, **keywords: Any) -> Schema:
    return {name: value for name, value in keywords.items() if numbers.random() < 0.4}


def any_schema(numbers: random.Random, depth: int) -> Schema:
    """A schema of any supported keywords, which nothing may satisfy."""

    def inner() -> Any:
        return any_schema(numbers, depth - 1) if numbers.random() < 0.8 else numbers.random() < 0.7

    kinds = ["number", "string", "value", "type", *(["object", "array", "parts", "parts", "ref"] if depth else [])]
    count, choose = numbers.randrange, numbers.choice
    match kind := choose(kinds):
        case "number":
            bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            found = maybe(numbers, **{name: choose(NUMBERS) for name in bounds}, multipleOf=choose([1, 2, 3, 0.5]))
            found |= {"type": choose(["number", "integer"])}
        case "string":
            found = maybe(numbers, minLength=count(4), maxLength=count(6), pattern=choose(PATTERNS)) | {"type": kind}
        case "value":
            return choose([{"const": choose(VALUES)}, {"enum": numbers.sample(VALUES, 3)}])
        case "type":
            return {"type": choose(["boolean", "null", ["integer", "string"], ["object", "number"]])}
        case "object":
            names = numbers.sample(["a", "b", "ab"], count(4))
            found = maybe(
                numbers,
                required=numbers.sample(["a", "b", "ab"], count(3)),
                additionalProperties=inner(),
                patternProperties={choose(["^a", "b", "a$"]): inner()},
                minProperties=count(4),
                maxProperties=count(4),
            )
            found |= {"type": kind, "properties": {name: inner() for name in names}}
        case "array":
            found = maybe(numbers, items=inner(), prefixItems=[inner()], minItems=count(4), maxItems=count(4))
            found |= {"type": kind}
        case "ref":
            found = {**any_schema(numbers, 0), "$ref": "#/$defs/other"}
        case _:
            keyword = choose(["allOf", "anyOf", "oneOf"])
            found = {**any_schema(numbers, depth - 1), keyword: [inner() for _ in range(2)]}
    if numbers.random() < 0.2:
        found.pop("type", None)
    return found


def walk(matcher: LLMatcher, numbers: random.Random) -> str | None:
    """A text that a grammar allows; None: it was cut off. Marks of JSON and short names are likely."""
    text = bytearray()
    while len(text) < 300 and not matcher.is_stopped() and not (matcher.is_accepting() and numbers.random() < 0.3):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:256]
        allowed = [byte for byte in np.flatnonzero(bits).tolist() if byte != BYTES.eos_token]
        if not allowed:
            break
        likely = [[byte for byte in allowed if byte in some] for some in (b'"}],', b'{}[]":,019.-ab\\u6')]
        byte = numbers.choice(next((some for some in likely if some and numbers.random() < 0.5), allowed))
        text.append(byte)
        assert matcher.consume_token(byte)
    return text.decode() if matcher.is_accepting() else None


def ends(matcher: LLMatcher) -> bool:
    return any(walk(matcher.deep_copy(), random.Random(seed)) is not None for seed in range(40))


def test_walks() -> None:
    num_walks = num_taken = 0
    count = examples(1800)
    for seed in range(count):
        numbers = random.Random(seed)
        schema = any_schema(numbers, 2)
        if '"$ref"' in json.dumps(schema):
            schema["$defs"] = {"other": any_schema(numbers, numbers.randrange(3))}  # it may refer to itself
        try:
            matcher = matcher_of(schema)
        except InvalidRequestError:
            continue
        num_taken += 1
        for _ in range(8):
            if (text := walk(matcher.deep_copy(), numbers)) is not None:
                num_walks += 1
                assert is_valid(text, schema), (seed, text, schema)
    assert num_taken > 0.4 * count, "too few schemas were taken"
    assert num_walks > 6 * num_taken, "too few walks ended"


def is_valid(text: str, schema: Schema) -> bool:
    """Without a look at the schema itself, which takes most of the time of jsonschema.validate."""
    try:
        return validator_for(schema)(schema).is_valid(json.loads(text))
    except (OverflowError, RecursionError):  # a number that is too large to divide, a reference to itself in place
        return True


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"propertyNames": {"pattern": "^x"}}, ["{}", '{"x": 1}', '{"xy": []}'], ['{"y": 1}', '{"x": 1, "y": 1}']),
        ({"propertyNames": {"pattern": "x", "type": "string"}, "additionalProperties": {"type": "null"}},
         ['{"ax": null}'], ['{"x": 1}', '{"b": null}']),
        ({"propertyNames": {"pattern": "^x"}, "properties": {"x": {"type": "null"}, "y": True}},
         ['{"x": null, "xy": 1}'], ['{"x": 1}', '{"y": 1}']),
        ({"propertyNames": {"enum": ["a", "b", 3]}, "properties": {"a": {"type": "null"}, "c": True}},
         ['{"a": null, "b": 2}', "{}"], ['{"a": 1}', '{"c": 1}', '{"d": 1}']),
        ({"propertyNames": {"const": "a"}, "additionalProperties": {"type": "null"}}, ['{"a": null}'], ['{"b": null}']),
        ({"propertyNames": True}, ['{"a": null}'], []),
        ({"propertyNames": {"type": "string", "description": "any"}}, ['{"a": null}'], []),
    ],
)  # fmt: skip
def test_names_of_keys(schema: Schema, allowed: list[str], forbidden: list[str]) -> None:
    schema = {"type": "object", **schema}
    assert all(is_valid(text, schema) for text in allowed)
    assert not any(is_valid(text, schema) for text in forbidden)
    assert [text for text in [*allowed, *forbidden] if takes(tagged(schema), text)] == allowed
    matcher = matcher_of(schema)
    assert [text for text in [*allowed, *forbidden] if takes(matcher, text)] == allowed
    walked = [walk(matcher.deep_copy(), random.Random(seed)) for seed in range(20)]
    assert all(is_valid(text, schema) for text in walked if text is not None)


@pytest.mark.parametrize(
    "names", [False, {"maxLength": 3}, {"pattern": "a", "minLength": 2}, {"not": {"const": "a"}}, {"$ref": "#/$defs/a"}]
)
def test_other_names_of_keys_are_refused(names: Any) -> None:
    with pytest.raises(InvalidRequestError, match="#/items/propertyNames"):
        grammar_text(Structured(json={"items": {"propertyNames": names}}))
    with pytest.raises(InvalidRequestError, match="#/propertyNames"):
        grammar_text(Structured(json={"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}}))


LIST = {"type": "array", "items": {"$ref": "#/$defs/list"}, "minItems": 1}
# Each holds for a value together with all behind it.
CHAIN = {
    "allOf": [{"$ref": "#/$defs/0"}],
    "$defs": {str(at): {"maximum": at, "allOf": [{"$ref": f"#/$defs/{at + 1}"}]} for at in range(1000)},
    "exclusiveMinimum": 1,
}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {"a": {"minProperties": 2}}}, "more than one key that is not required: #/properties/a"),
        ({"allOf": [{"required": ["a"]}, {"minProperties": 3}]}, "more than one key that is not required: #"),
        ({"properties": {"a": {}}, "maxProperties": 1}, "every key in properties to be required: #/maxProperties"),
        ({"$ref": "#"}, "has to contain itself: #"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "has to contain itself: #"),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]}, "has to contain itself: #"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}},
            "has to contain itself: #",
        ),
        ({"type": "object", "required": ["n"], "unevaluatedProperties": {"$ref": "#"}}, "has to contain itself: #"),
        (
            {"allOf": [{"type": "object", "properties": {"a": {"$ref": "#"}}}, {"required": ["a"]}]},
            "has to contain itself: #",
        ),
        ({"type": "array", "allOf": [{"items": {"$ref": "#"}}, {"minItems": 1}]}, "has to contain itself: #"),
        (
            {
                "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#"}}}},
                **{"$ref": "#/$defs/a", "required": ["b"]},
            },
            "has to contain itself: #",
        ),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1}, "has to contain itself: #"),
        (
            {
                **{"type": "object", "patternProperties": {"^a": {"$ref": "#"}}, "required": ["ab"]},
                "additionalProperties": False,
            },
            "has to contain itself: #",
        ),
        (CHAIN, "refer to each other in more ways than Quire can check"),
    ],
)
def test_what_would_be_taken_and_is_refused(schema: Schema, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(why)):
        grammar_text(Structured(json=schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"exclusiveMinimum": 1}, {"maximum": 2}]},
        {"anyOf": [{"minProperties": 1}, {"required": ["a", "b"], "minProperties": 3}]},
        {"allOf": [{"required": ["a", "b"]}, {"minProperties": 3}]},
        {"type": "array", "items": {"$ref": "#"}},
        {"allOf": [{"type": ["null", "object"], "properties": {"a": {"$ref": "#"}}}, {"required": ["a"]}]},
        {"type": "object", "patternProperties": {"^a": {"$ref": "#"}}, "required": ["b"]},
        {"type": "object", "patternProperties": {"^a": {"$ref": "#"}}, "minProperties": 1},
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
        {"propertyNames": {"pattern": "^a"}, "required": ["a"], "additionalProperties": {"$ref": "#"}},
        {"properties": {"next": {"$ref": "#"}}, "required": ["next"]},  # the next one may be a number
        {"type": "array", "prefixItems": [True, {"$ref": "#"}], "minItems": 1},
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "number", "minimum": -5, "maximum": 0.5}]},
        {"type": "string", "$defs": {"list": LIST}},  # nothing refers to it
        {
            "$ref": "#/components/schemas/a",
            "components": {
                "schemas": {
                    "a": {"type": "object", "properties": {"b": {"$ref": "#/components/schemas/b"}}, "required": ["b"]},
                    "b": {"type": "string"},
                }
            },
        },
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": ["null", "object"], "additionalProperties": {"$ref": "#"}}}},
    ],
)
def test_what_is_taken(schema: Schema) -> None:
    assert ends(matcher_of(schema))


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.5", "1.01", "1.0000000001"], ["1", "1.0", "1.51"]),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, ["-1.5", "-1.25"], ["-1", "-1.0", "-1.51"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.25", "0.000001"], ["0", "0.0", "0.5", "-0"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.000001"], ["0", "-0", "-0.0"]),
        ({"minimum": 3, "exclusiveMinimum": True, "maximum": 3.5}, ["3.5", "3.01"], ["3", "3.0"]),
        ({"exclusiveMinimum": 123456789, "maximum": 123456789.5}, ["123456789.25"], ["123456789", "123456789.0"]),
        ({"allOf": [{"exclusiveMinimum": 1}, {"maximum": 1.5}], "type": "number"}, ["1.25"], ["1", "1.0", "2"]),
        ({"$ref": "#/$defs/a", "exclusiveMaximum": 2, "$defs": {"a": {"minimum": 1.5}}}, ["1.5"], ["2", "2.0"]),
        ({"exclusiveMinimum": 1, "anyOf": [{"maximum": 9}, {"minimum": 0.5, "maximum": 1.5}]}, ["9", "1.1"], ["1"]),
        ({"exclusiveMinimum": 1, "maximum": 1.5, "multipleOf": 0.5}, ["1.5"], ["1", "1.25"]),
        ({"type": "integer", "exclusiveMinimum": 1, "maximum": 2.5}, ["2"], ["1", "3"]),
    ],
)
def test_exclusive_bounds(schema: Schema, allowed: list[str], forbidden: list[str]) -> None:
    """Also where llguidance would take a whole one that is less than 1 from the other bound for an inclusive one."""
    schema = {"type": "number", **schema}
    assert [text for text in [*allowed, *forbidden] if takes(matcher_of(schema), text)] == allowed


@pytest.mark.parametrize("low", [0, 1, 2, -1, 0.5, -0.5, 9, 10, 99, 1e9, -1e9])
@pytest.mark.parametrize("width", [0.25, 0.5, 1, 1.5])
def test_ranges_of_numbers(low: float, width: float) -> None:
    """All of them against a list of numbers around their bounds."""
    numbers = [low + width * part / 4 for part in range(-4, 9)]
    texts = {form.format(number) for number in numbers for form in ("{:.3f}", "{:g}" if abs(low) < 1e5 else "{}")}
    texts |= {str(int(number)) for number in numbers if number == int(number)}
    for below, above in itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        schema = {"type": "number", below: low, above: low + width}
        matcher = matcher_of(schema)
        for text in texts:
            assert not takes(matcher, text) or is_valid(text, schema), (text, schema)
            if is_valid(text, schema) and not text.endswith("0"):
                assert takes(matcher, text), (text, schema)


@pytest.mark.parametrize("schema", [{"type": 5}, {"type": [{}]}, {"required": 3}, {"allOf": 7}, {"minItems": "a"}])
def test_what_is_no_schema_is_refused(schema: Schema) -> None:
    with pytest.raises(InvalidRequestError):
        grammar_text(Structured(json={**schema, "items": {"$ref": "#"}, "exclusiveMinimum": 1, "minProperties": 1}))


@pytest.mark.parametrize(
    "named",
    [
        {"properties": {"a": {"type": "integer"}}},
        {"patternProperties": {"^a": False}},
        {"properties": {"a": {"type": "integer", "description": "no \x01 and no \\u0001"}}},
        {"properties": {"a": {"type": "integer"}, "c": {"pattern": r"^[^\u0000-\u001f]+$"}}},
    ],
)
def test_a_named_key_cannot_come_as_a_free_one(named: Schema) -> None:
    """Its name with an escape is the same name to whoever reads the answer."""
    schema = {"type": "object", **named, "additionalProperties": {"type": "string"}}
    for matcher in (matcher_of(schema), tagged(schema)):
        assert takes(matcher, '{"b": "x\\n"}')
        assert not takes(matcher, '{"\\u0061": "x"}')


def test_keywords_of_the_page() -> None:
    """Keywords listed as refused are refused with their path, and keywords listed as supported are taken."""
    supported, refused = re.findall(r"^(?:Supported|Everything else).*?(?=\n\n)", PAGE, flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"`([$\w]+)`", refused.partition(" other values")[0])
    assert {"not", "contains", "uniqueItems", "$dynamicRef"} <= {*named}
    for name in named:
        with pytest.raises(InvalidRequestError, match=re.escape(f"#/properties/a/{name}")):
            grammar_text(Structured(json={"properties": {"a": {name: argument_of(name)}}}))
    formats = re.findall(r"`([\w-]+)`", re.findall(r"`format`\s\((.*?)\)", supported, flags=re.DOTALL)[0])
    assert len(formats) == 10
    for form in formats:
        assert ends(matcher_of({"type": "string", "format": form}))
    with pytest.raises(InvalidRequestError, match="#/format = regex"):
        grammar_text(Structured(json={"format": "regex"}))


def argument_of(name: str) -> Any:
    match name:
        case "uniqueItems":
            return True
        case "dependentRequired":
            return {"a": ["b"]}
        case "$dynamicRef" | "$recursiveRef":
            return "#"
        case "minContains" | "maxContains":
            return 1
        case _:
            return {"type": "string"}


def test_whitespace() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"const": 1}}}}
    spaces = {"a": [1, 1]}
    compact, plain = json.dumps(spaces, separators=(",", ":")), json.dumps(spaces)
    texts = [compact, plain, json.dumps(spaces, indent=2), plain.replace("[", "[   ")]
    for options, allowed in (
        ({}, texts),
        ({"disable_any_whitespace": True}, [plain]),
        ({"whitespace_pattern": " ?"}, [compact, plain]),
    ):
        matcher = matcher_of(schema, **options)
        assert [text for text in texts if takes(matcher, text)] == allowed, options
    assert [text for text in texts if takes(tagged(schema), text)] == texts
    for matcher in (matcher_of(schema), tagged(schema)):
        assert not takes(matcher, '{"a":' + " " * 100 + "[]}"), "an answer of spaces would have no end"
