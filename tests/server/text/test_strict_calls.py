"""Strict tools: behind the beginning of a call, the grammar allows only calls with valid arguments, in each format."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.errors import InvalidRequestError, UnsupportedFieldError
from quire.formats.answer_formats import TOOL_PARSERS
from quire.frontend.tokenizer import Tokenizer
from quire.grammar.compiled import compiled_matcher
from quire.grammar.text import grammar_text
from quire.sampling_params import StructuredOutputsParams
from quire.server.protocol.chat import ChatRequest
from quire.server.text.parser import AnswerParser
from quire.server.text.tagged_calls import parameter_types
from quire.server.tool_choice import ToolChoice
from quire.settings import ServerSettings
from tests.covering import in_turn
from tests.examples import examples
from tests.server.text.answers import TOKENIZER, allows, calls_of, merged

BYTES = LLTokenizer("byte")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 1, "maximum": 12},
        "city": {"type": "string", "minLength": 2, "maxLength": 6},
        "units": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "kind": {"$ref": "#/$defs/kind"},
        "mode": {"anyOf": [{"enum": ["a", "b c"]}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/place"},
        "exact": {"type": "boolean"},
        "day": {"type": "string", "format": "date"},
        "rest": {},
    },
    "required": ["city", "kind"],
    "additionalProperties": False,
    "$defs": {
        "kind": {"enum": ["rain", "snow"]},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "in": {"$ref": "#/$defs/place"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = {"days": 3, "city": "Bern", "units": None, "kind": "rain", "place": {"x": 1.5, "in": {"x": 2}}}
# How models begin calls: all text before the name of the tool.
BEGINNINGS = {
    "deepseek_v3": ["Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"],
    "deepseek_v31": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"],
    "glm45": ["Hm.\n<tool_call>"],
    "granite": ["<|tool_call|>", "Hm. <tool_call>", " [", "["],
    "hermes": ["Hm. <tool_call>"],
    "kimi_k2": ["Hm.<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    "llama3_json": ["Hm.<|python_tag|>", "{", "\n{"],
    "llama4_pythonic": ["Hm.<|python_start|>", "["],
    "mistral": ["Hm.[TOOL_CALLS]"],
    "openai": [
        "<|channel|>commentary to=",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>comm",
    ],
    "phi4_mini_json": ["Hm. functools["],
    "pythonic": ["Hm.<|python_start|>", "[", " ["],
    "qwen3_coder": ["Hm.\n<tool_call>", "<function="],
    "qwen3_xml": ["<tool_call>", "Hm.\n<function="],
}
# A text that is no call, and what a text before a call may be.
FREE = {"openai": "<|channel|>final<|message|>I write <b>functools</b>."}
BEFORE = {"openai": "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant", "phi4_mini_json": "I look. "}
MARKS = re.compile(r"<[|｜][^>]*[|｜]>|</?(?:tool_call|arg_key|arg_value)>|\[[A-Z_]{2,}\]")


def written(form: str, arguments: Mapping[str, Any], name: str = "get_weather") -> str:
    """A call as the format has it."""
    as_json = json.dumps(arguments, ensure_ascii=False)
    match form:
        case "deepseek_v3":
            call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json}\n```<｜tool▁call▁end｜>"
            return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"
        case "deepseek_v31":
            call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json}<｜tool▁call▁end｜>"
            return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"
        case "granite":
            return f'<|tool_call|>[{{"name": "{name}", "arguments": {as_json}}}]'
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {as_json}}}\n</tool_call>'
        case "kimi_k2":
            begin, middle = f"<|tool_call_begin|>functions.{name}:0", "<|tool_call_argument_begin|>"
            call = f"{begin}{middle}{as_json}<|tool_call_end|>"
            return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
        case "llama3_json":
            return f'<|python_tag|>{{"name": "{name}", "parameters": {as_json}}}'
        case "mistral":
            return f"[TOOL_CALLS]{name}[ARGS]{as_json}"
        case "openai":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{as_json}"
        case "phi4_mini_json":
            return f'functools[{{"name": "{name}", "arguments": {as_json}}}]'
        case "llama4_pythonic" | "pythonic":
            pairs = (f"{key}={json.dumps(value)}" for key, value in arguments.items())
            return f"<|python_start|>[{name}({', '.join(pairs)})]"
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    if form == "glm45":
        values = (f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())
        return f"<tool_call>{name}\n{''.join(values)}</tool_call>"
    values = (f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"


@cache
def grammar_of(form: str, tokenizer: Tokenizer | None = None) -> str:
    body = ChatRequest(messages=[{"role": "user", "content": "?"}], tools=[WEATHER, NOW])
    constraint = ToolChoice.of(body, ServerSettings(tool_call_parser=form), []).constraint
    assert constraint is not None
    return grammar_text(constraint, {} if tokenizer is None else tokenizer.special_ids)


def constrained(form: str, parameters: Any) -> str:
    """The grammar for a strict tool `f`."""
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    body = ChatRequest(messages=[{"role": "user", "content": "?"}], tools=[tool])
    constraint = ToolChoice.of(body, ServerSettings(tool_call_parser=form), []).constraint
    assert constraint is not None
    return grammar_text(constraint)


def parsed(form: str, text: str) -> list[tuple[str, Any]]:
    parser = AnswerParser(tools=form, types=parameter_types([WEATHER, NOW]))
    events = merged(parser.feed(text) + parser.finish())
    return [(name, json.loads(arguments)) for _, name, arguments in calls_of(events)]


@pytest.mark.parametrize(("form", "is_special"), in_turn([[(form,)] for form in TOOL_PARSERS], [True, False]))
def test_calls(form: str, is_special: bool) -> None:
    """As the model writes them, whether its tags are special tokens or not."""
    tokenizer = TOKENIZER
    call = written(form, ARGUMENTS)
    if is_special:
        backend = copy.deepcopy(TOKENIZER.backend)
        marks = {*MARKS.findall(call + BEFORE.get(form, "") + "".join(BEGINNINGS[form]))} - {"[ARGS]"}
        backend.add_special_tokens(sorted(marks))
        tokenizer = Tokenizer(backend, special_tokens=TOKENIZER.special_tokens)
    grammar = grammar_of(form, tokenizer)
    before = BEFORE.get(form, "I look.\n")
    for text in (FREE.get(form, "I write <b>functools</b>."), call, before + call):
        assert allows(grammar, text, tokenizer), text
        assert parsed(form, text) == ([("get_weather", ARGUMENTS)] if call in text else [])
    if form not in ("openai", "llama3_json", "pythonic", "llama4_pythonic"):  # one call, or one list of calls
        assert allows(grammar, f"{call}\n{call} Done", tokenizer)
    for wrong in (
        {},
        {**ARGUMENTS, "kind": "hail"},
        {**ARGUMENTS, "city": "B"},
        {**ARGUMENTS, "days": 13},
        {**ARGUMENTS, "days": "three"},
        {**ARGUMENTS, "place": {}},
        {**ARGUMENTS, "more": 1},
    ):
        assert not allows(grammar, before + written(form, wrong), tokenizer), wrong
    assert not allows(grammar, written(form, ARGUMENTS, name="get_wether"), tokenizer)
    assert not allows(grammar, call[: len(call) // 2], tokenizer)


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_random_texts_behind_the_beginning_of_a_call(form: str) -> None:
    """Every call of the strict tool is valid, and of the other tool it is a call."""
    start, num_calls = compiled_matcher(BYTES, grammar_of(form)), {"get_weather": 0, "now": 0}
    for seed in range(examples(40)):
        numbers = random.Random(seed)
        text = walk(start.deep_copy(), numbers.choice(BEGINNINGS[form]), numbers)
        if text is None:
            continue
        parser = AnswerParser(tools=form, types=parameter_types([WEATHER, NOW]))
        calls = calls_of(merged(parser.feed(text) + parser.finish()))
        assert calls, text
        for _, name, arguments in calls:
            num_calls[name] += 1
            if name == "get_weather":
                jsonschema.validate(json.loads(arguments), SCHEMA)
    assert num_calls["get_weather"] > 2, num_calls


def walk(matcher: LLMatcher, beginning: str, numbers: random.Random) -> str | None:
    """A text with this beginning that the grammar allows; None: it was cut off."""
    text = bytearray(beginning.encode())
    assert matcher.try_consume_tokens(list(text)) == len(text), beginning
    while len(text) < 700:
        if matcher.is_accepting() and numbers.random() < 0.5:
            return text.decode()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:256]
        allowed = [byte for byte in np.flatnonzero(bits).tolist() if byte != BYTES.eos_token]
        if not allowed:
            return text.decode() if matcher.is_accepting() else None
        likely = [byte for byte in allowed if byte in b'"}])\n</>,' or numbers.random() < 0.05]
        byte = numbers.choice(likely if likely and numbers.random() < 0.7 else allowed)
        text.append(byte)
        assert matcher.consume_token(byte)
    return None


@pytest.mark.parametrize(
    ("parameters", "forms", "why"),
    [
        ({"type": "object", "patternProperties": {"^a": {}}}, ["pythonic", "glm45"], "patternProperties"),
        ({"type": "object", "properties": {"a<b>": {}}}, ["pythonic", "glm45", "qwen3_coder"], "'a<b>'"),
        ({"properties": {"a": {}}, "required": ["b"]}, ["llama4_pythonic", "qwen3_xml"], "'b'"),
        ({"properties": {"a": {"type": "string", "pattern": "^a"}}}, ["qwen3_coder", "glm45"], "pattern"),
        ({"properties": {"a": {"type": "string", "format": "ipv4"}}}, ["qwen3_coder", "glm45"], "ipv4"),
        ({"properties": {"a": {"type": "string", "format": ["date"]}}}, ["qwen3_coder", "glm45"], '["date"]'),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/b"}},
                "$defs": {"b": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "string"}]}},
            },
            ["qwen3_coder", "glm45"],
            "itself",
        ),
        ({"properties": {"a": {"const": "</parameter>"}}}, ["qwen3_coder"], "</parameter>"),
        (
            {"properties": {"a": {"type": "array", "items": {"type": "object", "patternProperties": {"^a": {}}}}}},
            ["qwen3_coder"],
            "keys with a pattern could contain </parameter>: #/items/patternProperties",
        ),
        ({"properties": {"a": {"minimum": 3}}}, ["qwen3_coder"], "type of an argument"),
    ],
)
def test_what_a_format_cannot_hold_to_is_refused(parameters: Any, forms: list[str], why: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    body = ChatRequest(messages=[{"role": "user", "content": "?"}], tools=[tool])
    for form in forms:
        with pytest.raises(UnsupportedFieldError, match=re.escape(why)) as error:
            ToolChoice.of(body, ServerSettings(tool_call_parser=form), [])
        assert error.value.param == "tools"
    assert ToolChoice.of(body, ServerSettings(tool_call_parser="hermes"), []).constraint is not None


OBJECT: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "string"}, "c": {"type": "integer"}}}


@pytest.mark.parametrize(("form", "mark"), [("qwen3_coder", "</parameter>"), ("glm45", "</arg_value>")])
@pytest.mark.parametrize(
    ("more", "taken", "refused"),
    [
        ({"anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, [{"b": "x"}, {"c": 1, "d": [{}]}], [{}, {"d": 1}]),
        (
            {"allOf": [{"required": ["b"]}, {"properties": {"c": {"minimum": 3}}}]},
            [{"b": "x", "c": 3}],
            [{"c": 3}, {"b": "x", "c": 2}],
        ),
        (
            {
                "oneOf": [
                    {"properties": {"c": {"const": 1}}, "required": ["c"]},
                    {"properties": {"c": {"type": "string"}}, "required": ["c"]},
                ]
            },
            [{"c": 1}],
            [{"c": 2}],
        ),
    ],
)
def test_objects_with_alternatives_before_a_mark(
    form: str, mark: str, more: Any, taken: list[Any], refused: list[Any]
) -> None:
    """A definition for the same object in other places has no text of its own: the object excludes the mark."""
    grammar = constrained(form, {"properties": {"a": {**OBJECT, **more}}, "required": ["a"]})
    for value in taken:
        assert allows(grammar, written(form, {"a": value}, name="f")), value
        for key, text in (("d", f"a{mark}"), (f"a{mark}", "d")):
            assert not allows(grammar, written(form, {"a": {**value, key: text}}, name="f")), key
    for value in refused:
        assert not allows(grammar, written(form, {"a": value}, name="f")), value


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"not": {}}, "these keywords are not supported: #/properties/a/not"),
        ({"patternProperties": {"^a": {}, "b$": {}}}, "may match the same key: #/properties/a/patternProperties"),
        ({"pattern": "(?=a)"}, "this pattern is not supported: #/properties/a/pattern"),
        ({"format": "idn-email"}, "this format is not supported: #/properties/a/format"),
    ],
)
def test_what_is_wrong_with_the_schema_in_a_tag_is_said_of_the_schema(schema: Any, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(why)):
        constrained("hermes", {"type": "object", "properties": {"a": schema}})


def test_two_schemas_that_refer_to_themselves() -> None:
    trees = {
        name: {"type": "object", "properties": {"next": {"$ref": f"#/$defs/{name}"}, "last": {"$ref": "#/$defs/a"}}}
        for name in "ab"
    }
    together = {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": trees}
    with pytest.raises(InvalidRequestError, match=r"refer to themselves cannot be combined .*: #/allOf"):
        constrained("hermes", together)


def test_special_tokens_are_listed_once_for_all_triggers() -> None:
    backend = copy.deepcopy(TOKENIZER.backend)
    backend.add_special_tokens([f"<|{index}|>" for index in range(300)])
    special_ids = Tokenizer(backend).special_ids
    tags = [{"type": "tag", "begin": f"<{name}>", "content": {"type": "any_text"}, "end": "."} for name in "abcdefgh"]
    sizes = []
    for count in (1, 8):
        form = {"type": "triggered_tags", "triggers": [tag["begin"] for tag in tags[:count]], "tags": tags[:count]}
        grammar = grammar_text(StructuredOutputsParams(structural_tag=json.dumps({"format": form})), special_ids)
        ids = re.findall(r"<\[([\d,]+)\]>", grammar)
        assert len(ids) == 1
        sizes.append(len(grammar))
    assert sizes[1] < sizes[0] + 8 * 300


def test_nested_tags_are_written_once() -> None:
    """The grammar grows with the size of the schema, not with its depth."""
    form: Any = {"type": "const_string", "value": "a"}
    sizes = []
    for depth in range(1, 12):
        tags = [{"type": "tag", "begin": f"<{depth}>", "content": form, "end": "."}]
        form = {"type": "tags_with_separator", "tags": tags, "separator": ";"}
        sizes.append(len(grammar_text(StructuredOutputsParams(structural_tag=json.dumps({"format": form})))))
    assert sizes[-1] < 20 * sizes[0]


@pytest.mark.parametrize("pattern", ["a\nb/", "a\\\nb/", "a\\nb\\/", "a[\n]b[/]"])
def test_patterns_with_newlines_and_slashes(pattern: str) -> None:
    """A newline may have a backslash before it, and is still one."""
    tag = {"format": {"type": "regex", "pattern": pattern}}
    grammar = grammar_text(StructuredOutputsParams(structural_tag=json.dumps(tag)))
    assert allows(grammar, "a\nb/")
    assert not allows(grammar, "a\\nb/")


@pytest.mark.parametrize(("form", "mark"), [("qwen3_coder", "</parameter>"), ("glm45", "</arg_value>")])
def test_a_text_has_no_mark_of_its_end(form: str, mark: str) -> None:
    """It would end there for whoever reads it."""
    for name in ("city", "units"):
        assert allows(grammar_of(form), written(form, {**ARGUMENTS, name: "a</b"}))
        assert not allows(
            grammar_of(form), written(form, {**ARGUMENTS, name: f"a{mark}"}).replace(f"a{mark}", f"a{mark}b", 1)
        )


def test_a_name_that_a_format_cannot_write_is_refused() -> None:
    """Also where no tool is strict: leaving out `strict` is no cure there."""
    tool = {"type": "function", "function": {"name": "two words", "strict": True}}
    body = ChatRequest(messages=[{"role": "user", "content": "?"}], tools=[tool])
    for form in ("glm45", "kimi_k2", "openai", "pythonic", "qwen3_xml"):
        with pytest.raises(UnsupportedFieldError, match="two words"):
            ToolChoice.of(body, ServerSettings(tool_call_parser=form), [])
    tool = {"type": "function", "function": {"name": "two words"}}
    for choice in ("required", tool):
        body = ChatRequest(messages=[{"role": "user", "content": "?"}], tools=[tool], tool_choice=choice)
        with pytest.raises(UnsupportedFieldError, match="Give the tool a name of letters") as error:
            ToolChoice.of(body, ServerSettings(tool_call_parser="openai"), [])
        assert "strict" not in str(error.value)


@pytest.mark.parametrize("form", ["glm45", "qwen3_coder"])
@pytest.mark.parametrize("section", ["$defs", "definitions"])
def test_alternatives_that_refer_to_each_other_in_many_ways(form: str, section: str) -> None:
    """Each is looked at once: ways through 40 levels are more than can be walked."""
    levels = 40
    definitions: dict[str, Any] = {
        f"A{level}": {"anyOf": 2 * [{"$ref": f"#/{section}/A{level + 1}"}]} for level in range(levels)
    }
    definitions[f"A{levels}"] = {"type": "string", "enum": ["end"]}
    argument = {"anyOf": [{"type": "string", "maxLength": 2}, {"$ref": f"#/{section}/A0"}]}
    grammar = constrained(form, {"properties": {"a": argument}, "required": ["a"], section: definitions})
    assert len(grammar) < 10_000
    for text, is_allowed in (("ab", True), ("end", True), ("abc", False)):
        assert allows(grammar, written(form, {"a": text}, name="f")) == is_allowed


@pytest.mark.parametrize(
    ("form", "required"),
    in_turn([[(form,)] for form in ("glm45", "llama4_pythonic", "qwen3_xml", "pythonic")], [["a0", "a59"], [], ["a7"]]),
)
def test_many_arguments(form: str, required: list[str]) -> None:
    """The grammar grows with their number, whichever are required and whatever they refer to."""
    sizes = []
    for num_arguments in (60, 120):
        properties: dict[str, Any] = {f"a{index}": {"type": "integer"} for index in range(num_arguments - 20)}
        properties |= {f"a{index}": {"$ref": f"#/$defs/b{index}"} for index in range(num_arguments - 20, num_arguments)}
        grammar = constrained(
            form,
            {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
                "$defs": {name.replace("a", "b"): {"enum": [1, 2]} for name in properties},
            },
        )
        sizes.append(len(grammar))
        needed = dict.fromkeys(required, 1)
        for given in ({}, {"a3": 1, "a7": 2, "a41": 1, "a58": 1}, dict.fromkeys(properties, 2)):
            arguments = {**given, **needed}
            in_order = {key: arguments[key] for key in properties if key in arguments}
            assert allows(grammar, written(form, in_order, name="f")), in_order
            if required:
                left_out = {key: value for key, value in in_order.items() if key != required[-1]}
                assert not allows(grammar, written(form, left_out, name="f"))
        assert not allows(grammar, written(form, {**needed, f"a{num_arguments - 1}": 3}, name="f"))
    assert sizes[1] < 2.5 * sizes[0]


@pytest.mark.parametrize("form", ["glm45", "pythonic", "qwen3_coder"])
def test_a_small_request_for_a_huge_grammar_is_refused(form: str) -> None:
    """Many arguments. Each comes with all definitions."""
    for num_arguments in (400, 401):
        plain = {"properties": {f"a{index}": {"type": "integer"} for index in range(num_arguments)}}
        if num_arguments == 400:
            assert allows(constrained(form, plain), written(form, {"a5": 1, "a399": 2}, name="f"))
            continue
        with pytest.raises(UnsupportedFieldError, match="401 arguments, and at most 400"):
            constrained(form, plain)
    for reference in ("#/$defs/b0", "#/properties/a0"):
        properties: dict[str, Any] = {f"a{index}": {"$ref": reference} for index in range(1, 400)}
        properties["a0"] = {"type": "integer"}
        definitions = {
            f"b{index}": {"type": "integer", "anyOf": [{"$ref": f"#/$defs/b{index + 1}"}]} for index in range(100)
        }
        definitions["b100"] = {"type": "integer"}
        with pytest.raises(
            UnsupportedFieldError, match=r"of the tool f .* more than 262,144 bytes of schemas from its argument \d+"
        ):
            constrained(form, {"properties": properties, "$defs": definitions})
        few = dict(list(properties.items())[:20]) | {"a0": {"type": "integer"}}
        if reference != "#/properties/a0":
            assert constrained(form, {"properties": few, "$defs": definitions})
        assert constrained(form, {"properties": few, "$defs": {"b0": {"type": "integer"}}})


TEXTS: list[tuple[Any, Any]] = [
    ({"type": "array", "items": {"type": "string"}}, ["a{}b"]),
    ({"type": "array"}, [[{"k": "{}"}]]),
    ({"type": "array", "items": {"type": "string", "pattern": "^a"}}, ["a{}b"]),
    ({"type": "object"}, {"k": "{}"}),
    ({"type": "object"}, {"a{}": 1}),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, {"a": 1, "{}": [2]}),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        {"k": "{}"},
    ),
    ({"type": "object", "properties": {"a": True}, "additionalProperties": False}, {"a": ["x{}"]}),
    ({"anyOf": [{"type": "string", "maxLength": 40}, {"type": "integer"}]}, "a{}b"),
    ({"$ref": "#/$defs/tree"}, {"name": "a", "sub": [{"name": "b{}"}]}),
    ({"type": "array", "items": {"$ref": "#/properties/b"}}, ["{}"]),
]


@pytest.mark.parametrize(("schema", "value"), TEXTS)
@pytest.mark.parametrize(("form", "mark"), [("qwen3_coder", "</parameter>"), ("glm45", "</arg_value>")])
def test_json_has_no_mark_of_its_end(form: str, mark: str, schema: Any, value: Any) -> None:
    """A string of an array would end the argument. A text that only resembles the mark is no mark, and is parsed
    unchanged.
    """
    tree = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "sub": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
        "required": ["name"],
        "additionalProperties": False,
    }
    parameters = {
        "properties": {"a": schema, "b": {"type": "string"}},
        "required": ["a"],
        "$defs": {"tree": tree},
    }
    grammar = constrained(form, parameters)
    for text, is_allowed in ((mark[:-1], True), ("<b></b><<", True), (mark, False), (f"<{mark}", False)):
        arguments = {"a": json.loads(json.dumps(value).replace("{}", text))}
        call = written(form, arguments, name="f")
        if isinstance(value, str):
            call = call.replace(arguments["a"], json.dumps(arguments["a"]))
        assert allows(grammar, call) == is_allowed, call
        if is_allowed:
            tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
            parser = AnswerParser(tools=form, types=parameter_types([tool]))
            ((_, _, read),) = calls_of(merged(parser.feed(call) + parser.finish()))
            assert isinstance(value, str) or json.loads(read) == arguments
    with pytest.raises(UnsupportedFieldError, match=mark):
        constrained(form, {"properties": {"a": {"type": "array", "items": {"enum": [mark]}}}})
