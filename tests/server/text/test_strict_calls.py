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

from quire.errors import UnsupportedFieldError
from quire.formats.answer_formats import TOOL_PARSERS
from quire.frontend.tokenizer import Tokenizer
from quire.grammar.compiled import compiled_matcher
from quire.grammar.text import grammar_text
from quire.sampling_params import StructuredOutputsParams
from quire.server.protocol.chat import ChatRequest
from quire.server.text.parser import AnswerParser
from quire.server.tool_choice import ToolChoice
from quire.settings import ServerSettings
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
# How models begin calls, all that stands before the name of the tool.
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
    parser = AnswerParser(tools=form, schemas=[WEATHER, NOW])
    events = merged(parser.feed(text) + parser.finish())
    return [(name, json.loads(arguments)) for _, name, arguments in calls_of(events)]


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("form", TOOL_PARSERS)
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
        parser = AnswerParser(tools=form, schemas=[WEATHER, NOW])
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


def test_nested_tags_are_written_once() -> None:
    """The grammar grows with what is asked, not with its depth."""
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
def test_alternatives_that_refer_to_each_other_in_many_ways(form: str) -> None:
    """Each is looked at once: ways through 40 levels are more than can be walked."""
    levels = 40
    definitions: dict[str, Any] = {
        f"A{level}": {"anyOf": 2 * [{"$ref": f"#/$defs/A{level + 1}"}]} for level in range(levels)
    }
    definitions[f"A{levels}"] = {"type": "string", "enum": ["end"]}
    argument = {"anyOf": [{"type": "string", "maxLength": 2}, {"$ref": "#/$defs/A0"}]}
    grammar = constrained(form, {"properties": {"a": argument}, "required": ["a"], "$defs": definitions})
    assert len(grammar) < 10_000
    for text, is_allowed in (("ab", True), ("end", True), ("abc", False)):
        assert allows(grammar, written(form, {"a": text}, name="f")) == is_allowed
