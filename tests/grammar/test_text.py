"""Constraints that cannot be used are refused with the reason, before they reach the engine."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

import quire.demo
from quire.errors import InvalidRequestError
from quire.frontend.tokenizer import Tokenizer
from quire.grammar import text
from quire.grammar.kept import MAX_KEPT, Kept
from quire.grammar.limits import parser_limits
from quire.grammar.objections import objections
from quire.grammar.text import _closed, grammar_text
from quire.sampling_params import MAX_GRAMMAR_BYTES
from quire.sampling_params import StructuredOutputsParams as Structured
from tests.server.text.answers import TOKENIZER, allows

ENDLESS = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
ENDLESS_TAG = json.dumps({"structures": [{"begin": "<a>", "schema": ENDLESS, "end": "</a>"}], "triggers": ["<a>"]})


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


TAG = '{"structures": [{"begin": "<a>", "schema": %s, "end": ""}], "triggers": ["<a>"]}'


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"json": {"$ref": "https://json-schema.org/draft/2020-12/schema"}}, r"not supported: \$dynamic"),
        ({"json": {"properties": {"a": {"not": {"type": "string"}}}}}, r"not supported: #/properties/a/not"),
        ({"json": {"properties": {"a~b/c": {"not": {}}, "not": {}}}}, r"not supported: #/properties/a~0b~1c/not\. "),
        ({"json": {"patternProperties": {"a/(": {}}}}, r"not supported: #/patternProperties/a~1\(: "),
        ({"json": {"items": [{"uniqueItems": True}]}}, r"#/items/0/uniqueItems|items"),
        ({"json": False}, "schema is false"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "minLength"),
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"$ref": "http://example.com/x"}}, "example.com"),
        ({"json": "{"}, "not JSON"),
        ({"json": "3"}, "a schema is an object"),
        ({"json": nested(80)}, "levels"),
        ({"json": '{"const": NaN}'}, "expected value"),
        ({"json": '{"const": 1e999}'}, "expected value"),
        ({"json": '{"const": "\\ud800"}'}, "hex escape"),
        ({"json": {"const": 10**400}}, "JSON|number"),
        ({"structural_tag": TAG % '{"const": NaN}'}, "JSON|expected"),
        ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "levels|not JSON"),
        ({"json": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}, "bytes"),
        ({"json": {"items": {"pattern": "(?=a)b"}}}, "pattern is not supported: #/items/pattern: .*look-around"),
        ({"json": {"patternProperties": {"(": {}}}}, r"not supported: #/patternProperties/\(: .*unclosed group"),
        ({"json": {"type": "string", "pattern": "a\n("}}, r"not supported: a\\n\(: .*unclosed group"),
        ({"json": {"items": {"type": "text"}}}, "type is not known: #/items/type = text"),
        ({"json": {"items": {"type": ["null", "text"]}}}, "type is not known: #/items/type = text"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(" * 30_000 + ")" * 30_000}, "regex"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "bytes"),
        ({"grammar": "start: nope"}, "nope"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}, "nested"),
        ({"structural_tag": "{}"}, "structures"),
        ({"structural_tag": '{"format": {"type": "dispatch"}}'}, "type 'dispatch' of a format"),
        ({"structural_tag": '{"format": {"type": "tag", "begin": "a"}}'}, "KeyError.*content"),
        ({"structural_tag": '{"format": {"type": "regex", "pattern": "("}}'}, "regex|unclosed"),
        ({"structural_tag": '{"format": ' + '{"type": "star", "content": ' * 900 + "3" + "}" * 901}, "structural_tag"),
        ({"regex": "a", "answer_start": ["A:"]}, "answer_start needs reasoning_end"),
        ({"structural_tag": ENDLESS_TAG}, "has to contain itself: #"),
        ({"regex": "a", "reasoning_start": ["<think>"]}, "needs reasoning_end"),
        (
            {"structural_tag": '{"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b>"]}'},
            "begin",
        ),
    ],
)
def test_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as error:
        grammar_text(Structured(**fields))
    assert str(error.value.param).startswith("structured_outputs")
    assert len(error.value.message) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json": None, "json_object": False},
        {"choice": []},
        {"choice": [""]},
        {"choice": [1]},
        {"choice": "abc"},
        {"regex": 3},
        {"json": 3},
        {"regex": "a", "disable_any_whitespace": "yes"},
    ],
)
def test_one_constraint_of_the_right_type(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        Structured(**fields)


def test_whitespace_and_further_properties() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object"}}}
    closed = grammar_text(Structured(json=schema, disable_additional_properties=True))
    assert closed.count('"additionalProperties"') == 2
    assert '"whitespace_pattern"' in grammar_text(Structured(json=schema, whitespace_pattern=" ?"))


def test_what_can_be_used_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is refused is refused again."""
    checks: list[str] = []
    monkeypatch.setattr(text, "objections", lambda grammar: checks.append(grammar) or objections(grammar))
    for _ in range(2):
        grammar_text(Structured(regex="made once"))
        with pytest.raises(InvalidRequestError, match="#/not"):
            grammar_text(Structured(json={"not": {"const": "made once"}}))
    assert len(checks) == 1 + 2


def test_a_kept_grammar_is_of_the_same_constraint() -> None:
    """Of the same types in it, the same options, and the same special tokens where it has some."""
    assert '"const":1' in grammar_text(Structured(json={"const": 1}))
    assert '"const":true' in grammar_text(Structured(json={"const": True}))
    assert '"const":null' in grammar_text(Structured(json={"const": None}))
    with pytest.raises(InvalidRequestError):
        grammar_text(Structured(json={"const": float("nan")}))
    for options in ({}, {"reasoning_end": ["</t>"]}, {"reasoning_start": ["<t>"], "reasoning_end": ["</t>"]}):
        texts = {grammar_text(Structured(regex="a", **options), ids) for ids in ({}, {"</t>": 7}, {"</t>": 8})}
        assert len(texts) == (3 if options else 1)


def test_what_nothing_else_evaluates() -> None:
    """Beside keywords that apply no other schema in place, it is what additionalProperties and items are."""
    for schema, same in (
        (
            {"properties": {"a": {}}, "unevaluatedProperties": False},
            {"properties": {"a": {}}, "additionalProperties": False},
        ),
        ({"additionalProperties": True, "unevaluatedProperties": False}, {"additionalProperties": True}),
        ({"prefixItems": [{}], "unevaluatedItems": {"type": "null"}}, {"prefixItems": [{}], "items": {"type": "null"}}),
        ({"items": {"items": {}, "unevaluatedItems": False}}, {"items": {"items": {}}}),
    ):
        assert json.loads(grammar_text(Structured(json=schema))) == json.loads(grammar_text(Structured(json=same)))
    for applies in (
        {"anyOf": [{"prefixItems": [{}]}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"prefixItems": [{}]}}},
        {"items": [{}]},
    ):
        with pytest.raises(InvalidRequestError, match="#/unevaluatedItems"):
            grammar_text(Structured(json={**applies, "unevaluatedItems": False}))


def test_only_schemas_are_closed() -> None:
    """Data stays as it is, and so does the map of properties that have the names of keywords."""
    data = {"type": "object", "properties": {}}
    kept = {"const": data, "enum": [data], "default": data, "examples": [data]}
    asked = {**kept, "properties": {"properties": {"type": "object"}, "type": {}, "enum": {"items": data}}}
    closed = _closed(asked)
    assert {name: closed[name] for name in kept} == kept
    assert closed["additionalProperties"] is False
    assert closed["properties"] == {
        "properties": {"type": "object", "additionalProperties": False},
        "type": {},
        "enum": {"items": {**data, "additionalProperties": False}},
    }


def test_what_is_kept_is_bounded() -> None:
    """By the number and by the bytes; the one that was asked for longest ago goes first."""
    kept: Kept[list[int]] = Kept(1000, lambda text, sizes: sum(sizes))
    for index in range(300):
        kept.put(str(index), [1])
    assert len(kept) == MAX_KEPT
    assert kept.get("43") is None
    grown = kept.get("44")
    assert grown is not None
    grown.append(998)
    kept.shrink()
    assert kept.get("44") is grown
    assert len(kept) == 2
    grown.append(2)
    kept.shrink()
    kept.drop("44", [1, 998, 2])
    assert kept.get("44") is grown
    kept.drop("44", grown)
    assert not len(kept)


# The demo model's tokenizer, and one to which the end of the reasoning is a special token.
@pytest.mark.parametrize("special", [(), ("</think>", "<think>")])
@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}, '{"a": 5}'),
        ({"regex": "ab+"}, "abb"),
        ({"choice": ["yes", "no"]}, "no"),
        ({"grammar": 'start: "q" word\nword: /z+/'}, "qzz"),
    ],
)
def test_a_constraint_behind_reasoning(fields: dict[str, Any], answer: str, special: tuple[str, ...]) -> None:
    backend = copy.deepcopy(Tokenizer.from_folder(quire.demo.path("target")).backend)
    backend.add_special_tokens(list(special))
    tokenizer = Tokenizer(backend)
    vocabulary = LLTokenizer(backend.to_str(), n_vocab=tokenizer.vocab_size + 2, eos_token=0)

    def is_allowed(text: str, start: list[str] | None) -> bool:
        asked = Structured(**fields, reasoning_start=start, reasoning_end=["</think>"])
        grammar = grammar_text(asked, tokenizer.special_ids)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
        return matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False)) and matcher.is_accepting()

    for before in ("", 'Hm. {"a": x} ', "One\n\ntwo < three </thin"):
        assert is_allowed(f"{before}</think>\n\n{answer}", None)
        assert is_allowed(f"\n<think>{before}</think>{answer}", ["<think>"])
        assert not is_allowed(f"{before}</think>\n\nNo. {answer}", None)
        assert not is_allowed(before + answer, None)
    assert is_allowed(answer, ["<think>"])
    assert not is_allowed(f"Hm.{answer}", ["<think>"])


@pytest.mark.parametrize(
    "schema",
    [
        {"exclusiveMinimum": 1, "maximum": 2},
        {"exclusiveMinimum": 1.25, "maximum": 1.5},
        {"minimum": 1, "maximum": 1.5},
        {"const": {"exclusiveMinimum": 1, "maximum": 1.5}},
    ],
)
def test_other_bounds_are_exact(schema: dict[str, Any]) -> None:
    assert grammar_text(Structured(json=schema))


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TAGS = [{"type": "tag", "begin": f"<{name}>", "content": INTEGER, "end": ["</f>", "</g>"]} for name in "fg"]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": TAGS}
SEPARATED = {"type": "tags_with_separator", "tags": TAGS, "separator": ";"}
ANY = {"type": "any_text"}


@cache
def with_special_tokens(special: tuple[str, ...]) -> Tokenizer:
    backend = copy.deepcopy(TOKENIZER.backend)
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, special_tokens=TOKENIZER.special_tokens)


@pytest.mark.parametrize("special", [(), ("<f>", "<g>", "</f>", "<|x|>")])
@pytest.mark.parametrize(
    ("form", "allowed", "forbidden"),
    [
        ({"type": "const_string", "value": "a/b"}, ["a/b"], ["a", ""]),
        ({"type": "regex", "pattern": "a/[b\\/]"}, ["a/b", "a//"], ["a/", "a"]),
        ({"type": "sequence", "elements": [INTEGER, {"type": "const_string", "value": "!"}]}, ["1!"], ["1", "!"]),
        ({"type": "or", "elements": [INTEGER, {"type": "const_string", "value": "!"}]}, ["12", "!"], ["1!", ""]),
        ({"type": "optional", "content": TAGS[0]}, ["", "<f>1</f>"], ["<f>1</f><f>1</f>"]),
        ({"type": "star", "content": TAGS[0]}, ["", "<f>1</f><f>1</g>"], ["<g>1</f>", "<f>x</f>"]),
        ({"type": "plus", "content": TAGS[0]}, ["<f>1</f>", "<f>1</f><f>1</f>"], [""]),
        ({**TAGS[0], "content": ANY, "end": "</f>"}, ["<f></f>", "<f>a\n<g</f>"], ["<f>a", "<f>a</f>b", "<f></f></f>"]),
        ({**ANY, "excludes": ["no", "(b"]}, ["", "on", "a\nb"], ["a no", "(b"]),
        (TRIGGERED, ["", "a <h>", "<f>1</f>", "a<g>2</f> b<f>3</g>\n"], ["<f>", "a <f>x</f>", "<g>1"]),
        ({**TRIGGERED, "at_least_one": True}, ["<f>1</f>", "<f>1</f> a <g>2</f>"], ["", "a<f>1</f>"]),
        ({**TRIGGERED, "stop_after_first": True}, ["", "a<f>1</f>"], ["<f>1</f>a", "<f>1</f><f>1</f>"]),
        (
            {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
            ["<f>1</f>", "<g>1</g>"],
            ["", "a<f>1</f>", "<f>1</f>b"],
        ),
        ({**TRIGGERED, "excludes": ["no"]}, ["on<f>1</f>"], ["no", "no<f>1</f>", "<f>1</f>no"]),
        (SEPARATED, ["", "<f>1</f>", "<f>1</f>;<g>2</g>;<g>3</f>"], ["<f>1</f>;", "<f>1</f><g>2</g>"]),
        ({**SEPARATED, "at_least_one": True}, ["<f>1</f>;<f>1</f>"], [""]),
        ({**SEPARATED, "stop_after_first": True}, ["", "<f>1</f>"], ["<f>1</f>;<f>1</f>"]),
    ],
)
def test_forms_of_a_structural_tag(
    form: Any, allowed: list[str], forbidden: list[str], special: tuple[str, ...]
) -> None:
    """Whether its tags are special tokens or not."""
    tokenizer = with_special_tokens(special)
    grammar = grammar_text(Structured(structural_tag=json.dumps({"format": form})), tokenizer.special_ids)
    for answer in allowed:
        assert allows(grammar, answer, tokenizer), answer
    for answer in forbidden:
        assert not allows(grammar, answer, tokenizer), answer
    if special and form["type"] == "triggered_tags" and len(form) == 3:
        assert allows(grammar, "a<|x|>b<f>1</f><|x|>", tokenizer), "free text has other special tokens too"
