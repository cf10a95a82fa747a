"""Reasoning and tool calls: every format, every cut, text that is no call, and linear work."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.formats.answer_formats import REASONING_PARSERS, TOOL_PARSERS
from quire.server.text.events import Content, Reasoning, ToolCallStart
from quire.server.text.parser import AnswerParser
from quire.server.text.tagged_calls import parameter_types
from tests.examples import IS_FULL, examples
from tests.server.text.answers import TOOLS, calls_of, merged, parse, text_of

PARIS = '{"city": "Pa\\"ris", "days": 3}'
NONE = "{}"
# A format -> an answer with content and two calls, get_weather(city='Pa"ris', days=3) and now().
ANSWERS = {
    "deepseek_v3": (
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        + PARIS
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        f"I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "glm45": (
        'I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa"ris</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
    ),
    "granite": f'I look.<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now"}}]',
    "hermes": (
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>'
    ),
    "kimi_k2": (
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{PARIS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "llama3_json": (
        f'I look.<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}'
    ),
    "llama4_pythonic": """I look.<|python_start|>[get_weather(city='Pa"ris', days=3), now()]<|python_end|>""",
    "mistral": f"I look.[TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{PARIS}[TOOL_CALLS]now{{}}",
    "openai": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{PARIS}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>"
    ),
    "phi4_mini_json": f'I look.functools[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now"}}]',
    "pythonic": """[get_weather(city="Pa\\"ris", days=3), now()]""",
    "qwen3_coder": (
        'I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPa"ris\n</parameter>\n<parameter=days>\n3\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
}
ANSWERS["qwen3_xml"] = ANSWERS["qwen3_coder"]
# A format -> an answer with reasoning.
THOUGHTS = {
    "deepseek_r1": "<think>\nHm.\n</think>\n\nYes.",
    "glm45": "\n<think>Hm.</think>\nYes.",
    "granite": "Here's my thought process: Hm. Here is my response: Yes.",
    "mistral": "[THINK]Hm.[/THINK]Yes.",
    "openai_gptoss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    ),
    "qwen3": "<think>\nHm.\n</think>\n\nYes.",
}
# Texts that may follow each other in an answer: marks of a format, pieces of calls, and other text.
PIECES = (
    '{"name": "f", "arguments": ',
    '{"name": "f", "arguments": {"a": [1, {"b": null}], "c": "\\u00e9\\n"}}',
    "f(a=1, b=['x', True], c={'d': \"\\x41\\'\"})",
    *("get_weather", "city", "function", "```json", "json", "now:1", " to=functions.f ", "assistant"),
    *"{}[]()<>|,:;=\"'\\ \n-01eux.<",
    *("True", "null", "-1.5e3", "\ufffd", "Here is my", " thought process:", "<｜tool▁sep｜>", "```"),
)


def fragments(*texts: str) -> st.SearchStrategy[str]:
    """Answers made of whole and cut pieces of these texts and of PIECES."""
    marks = {text[start:end] for text in texts for start in range(0, len(text), 7) for end in (start + 7, start + 30)}
    return st.lists(st.sampled_from([*texts, *sorted(marks), *PIECES]), max_size=12).map("".join)


def cut(data: st.DataObject, text: str) -> list[str]:
    bounds = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *bounds], [*bounds, len(text)], strict=True)]


def test_every_format_is_tried():
    assert ANSWERS.keys() == {*TOOL_PARSERS}
    assert THOUGHTS.keys() == {*REASONING_PARSERS}


@pytest.mark.parametrize("tools", ANSWERS)
def test_calls(tools):
    events, reason = parse(ANSWERS[tools], tools=tools)
    assert reason == "tool_calls"
    assert text_of(events, Content) == ("" if tools == "pythonic" else "I look.")
    calls = calls_of(events)
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [
        ("get_weather", {"city": 'Pa"ris', "days": 3}),
        ("now", {}),
    ]
    expected = {"kimi_k2": ["functions.get_weather:0", "functions.now:1"], "mistral": ["abcDEF123", "id0"]}
    assert [call_id for call_id, _, _ in calls] == expected.get(tools, ["id0", "id1"])


@pytest.mark.parametrize("reasoning", THOUGHTS)
def test_reasoning(reasoning):
    assert parse(THOUGHTS[reasoning], reasoning=reasoning) == ([Reasoning("Hm."), Content("Yes.")], "stop")


@pytest.mark.parametrize("tools", ANSWERS)
def test_any_cut_gives_the_same_events(tools):
    @settings(max_examples=examples(100), deadline=None)
    @given(data=st.data(), text=fragments(ANSWERS[tools]))
    def check(data, text):
        whole = parse(text, tools=tools)
        assert parse(cut(data, text), tools=tools) == whole
        assert parse(text, tools=tools) == whole

    check()
    assert parse(list(ANSWERS[tools]), tools=tools) == parse(ANSWERS[tools], tools=tools)


def test_a_message_that_the_next_header_ends_keeps_its_spaces():
    text = '<|start|>assistant<|message|>{"city": 3} <|channel|>analysis<|message|>Hm.<|end|>'
    for end in range(len(text)):
        pieces = [text[:end], text[end:]]
        assert parse(pieces, tools="openai")[0] == [Content('{"city": 3}'), Reasoning("Hm.")]


@pytest.mark.parametrize("reasoning", THOUGHTS)
def test_any_cut_gives_the_same_reasoning(reasoning):
    tools = "openai" if reasoning == "openai_gptoss" else "hermes"

    @settings(max_examples=examples(100), deadline=None)
    @given(data=st.data(), text=fragments(THOUGHTS[reasoning], ANSWERS[tools]))
    def check(data, text):
        formats = {"reasoning": reasoning, "tools": data.draw(st.sampled_from((tools, None)))}
        assert parse(cut(data, text), **formats) == parse(text, **formats)

    check()


@pytest.mark.parametrize("tools", ANSWERS)
def test_finished_calls_have_valid_arguments_and_no_text_is_lost(tools):
    @settings(max_examples=examples(100), deadline=None)
    @given(text=fragments(ANSWERS[tools]))
    def check(text):
        events, reason = parse(text, tools=tools)
        calls = calls_of(events)
        if reason == "tool_calls":
            assert all(isinstance(json.loads(arguments), dict) for _, _, arguments in calls)
            assert all(name for _, name, _ in calls)
        elif not calls and tools != "openai":
            assert text_of(events, Content) == text

    check()


@pytest.mark.parametrize("tools", ANSWERS)
def test_pieces_come_at_once(tools):
    """The name and the first arguments are there before the call is complete."""
    parser = AnswerParser(tools=tools, types=parameter_types(TOOLS))
    answer = ANSWERS[tools]
    events = parser.feed(answer[: answer.index("ris")])
    assert calls_of(events)[0][1:] in [("get_weather", f'{{"city": "{start}') for start in ("Pa\\", 'Pa\\"')]


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", "<tool_call>\nsoon</tool_call>  "),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"'),
        ("hermes", '<tool_call>{"arguments": {}, "arguments": {}, "name": "f"}'),
        ("llama3_json", '{"answer": 42}'),
        ("pythonic", "[a link](https://example.org)"),
        ("pythonic", "[f(1)]"),
        ("phi4_mini_json", "import functools\nfunctools.cache"),
        ("mistral", "[TOOL_CALLS] f 1"),
        ("qwen3_coder", "<function=f> is a tag"),
        ("kimi_k2", "<|tool_calls_section_begin|>none"),
    ],
)
def test_what_is_no_call_is_content(tools, text):
    assert parse(text, tools=tools) == ([Content(text)], "stop")


@pytest.mark.parametrize(
    ("tools", "text", "arguments", "rest"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru}}', '{"a": tru', "}}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n', '{"a": "', ""),
        ("mistral", '[TOOL_CALLS]f{"a": 1, }', '{"a": 1, ', "}"),
        ("pythonic", "[f(a=1, b=c)]", '{"a": 1, "b": c', ")]"),
        ("openai", '<|channel|>commentary to=functions.f<|message|>{"a": x}<|call|>', '{"a": x', "}"),
    ],
)
def test_a_call_ends_where_its_arguments_are_no_json(tools, text, arguments, rest):
    events, reason = parse(text, tools=tools)
    assert reason == "stop"
    assert calls_of(events) == [("id0", "f", arguments)]
    assert text_of(events, Content) == rest


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<parameter=city>\n5\n</parameter>", {"city": "5"}),
        ("<parameter=city>\n\n two\nlines \n\n</parameter>", {"city": "\n two\nlines \n"}),
        ("<parameter=days>\nthree\n</parameter>", {"days": "three"}),
        ("<parameter=days>NaN</parameter>", {"days": "NaN"}),
        ("<parameter=units>null</parameter>", {"units": None}),
        ("<parameter=units>7</parameter>", {"units": "7"}),
        ("<parameter=exact>True</parameter>", {"exact": True}),
        ('<parameter=places>\n[{"a": 1}]\n</parameter>', {"places": [{"a": 1}]}),
        ('<parameter=unknown>{"a": 1}</parameter>', {"unknown": {"a": 1}}),
        ("<parameter=unknown>5</parameter>", {"unknown": "5"}),
    ],
)
def test_the_schema_says_what_a_tagged_argument_is(text, arguments):
    events, _ = parse(f"<tool_call>\n<function=get_weather>\n{text}\n</function>", tools="qwen3_coder")
    assert json.loads(calls_of(events)[0][2]) == arguments


@pytest.mark.parametrize("parameters", [None, 5, [], {"properties": []}, {"properties": {"a": None, "b": {"type": 7}}}])
def test_schemas_may_say_anything(parameters):
    schemas = [{"function": {"name": "f", "parameters": parameters}}, {"function": "f"}, {}]
    parser = AnswerParser(tools="qwen3_xml", types=parameter_types(schemas))
    events = parser.feed("<function=f><parameter=a>1</parameter><parameter=b>[2]</parameter></function>")
    assert json.loads(calls_of(events)[0][2]) == {"a": "1", "b": [2]}


def test_further_calls_are_left_out():
    events, reason = parse(ANSWERS["hermes"], tools="hermes", most_calls=1)
    assert (calls_of(events), reason) == ([("id0", "get_weather", PARIS)], "tool_calls")


def test_a_call_in_reasoning_is_reasoning():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    events, reason = parse(f"<think>{call}</think>{call}", reasoning="qwen3", tools="hermes")
    assert events[0] == Reasoning(call)
    assert isinstance(events[1], ToolCallStart)
    assert reason == "tool_calls"


@pytest.mark.parametrize(
    ("reasoning", "prompt", "expected"),
    [
        ("qwen3", "<|assistant|>", Content("Hm.")),
        ("qwen3", "<|assistant|><think>\n", Reasoning("Hm.")),
        ("qwen3", "<|assistant|><think>\n\n</think>\n\n", Content("Hm.")),
        ("deepseek_r1", "<|assistant|>", Reasoning("Hm.")),
        ("deepseek_r1", "<|assistant|></think>", Content("Hm.")),
    ],
)
def test_the_prompt_may_open_or_close_the_reasoning(reasoning, prompt, expected):
    assert parse("Hm.", reasoning=reasoning, prompt=prompt)[0] == [expected]


def test_space_of_an_answer_without_tags_is_kept():
    text = " \n It is  sunny. \n"
    assert parse(list(text), reasoning="qwen3", tools="hermes") == ([Content(text)], "stop")


def lines_run(text: str, size: int, **formats: str) -> int:
    """How many lines of the parsers run for a text in pieces of this size."""
    num_lines = 0

    def trace(frame, event, arg):
        nonlocal num_lines
        if "/server/text/" not in frame.f_code.co_filename:
            return None
        num_lines += event == "line"
        return trace

    parser = AnswerParser(types=parameter_types(TOOLS), **formats)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for start in range(0, len(text), size):
            parser.feed(text[start : start + size])
            assert len(parser._reader._text) - parser._reader._position < 64  # no text is read again and again
        parser.finish()
    finally:
        sys.settrace(before)
    return num_lines


HOSTILE = (
    *("<tool_call>", "<tool_cal", '<tool_call>{"name": ', '<tool_call>{"name":"f","arguments":', "[TOOL_CALLS]", "<"),
    *(
        "[",
        '{"a":',
        '"\\',
        " \n",
        "\\u",
        "functools[",
        "<function=f><parameter=a>",
        "<|channel|>",
        "<|channel|>a<|message|>",
    ),
    *("[f(a=", "{", "x", "<|tool_call_begin|>f:0", "<｜tool▁calls▁begin｜>", "1", "'", "<think>", "</tool_call>"),
)


@pytest.mark.parametrize("tools", ANSWERS)
def test_work_is_linear_in_the_text(tools):
    opening = ANSWERS[tools].removeprefix("I look.")
    openings = ("", opening[: opening.index("ris")], opening[: opening.index("get_weather")])
    shift = list(ANSWERS).index(tools)
    for index, text in enumerate(HOSTILE):
        # In `make test` a text meets one opening of each format, and all of them with several formats.
        for start in openings if IS_FULL else [openings[(index + shift) % len(openings)]]:
            for size in (1, 10_000):
                short, long = (lines_run(start + text * count, size, tools=tools) for count in (8, 32))
                assert long <= 5 * short, (text, start, size)


def test_types_of_tagged_arguments_behind_references():
    parameters = {
        "properties": {
            "a": {"$ref": "#/$defs/text"},
            "b": {"anyOf": [{"$ref": "#/$defs/number"}, {"type": "null"}]},
            "c": {"const": 5},
            "d": {"enum": ["5", None]},
            "e": {"$ref": "#/$defs/loop"},
            "f": {"$ref": "#/$defs/none"},
        },
        "$defs": {"text": {"enum": ["1", "2"]}, "number": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    values = "".join(f"<parameter={key}>5</parameter>" for key in "abcdef")
    parser = AnswerParser(tools="qwen3_coder", types=parameter_types(tools))
    events = parser.feed(f"<function=f>{values}</function>") + parser.finish()
    ((_, _, arguments),) = calls_of(merged(events))
    assert json.loads(arguments) == {"a": "5", "b": 5, "c": 5, "d": "5", "e": "5", "f": "5"}
