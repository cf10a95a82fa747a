"""Tool calls and reasoning of POST /v1/chat/completions with OpenAI's own client, streamed and not."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire.formats.answer_formats import REASONING_PARSERS, TOOL_PARSERS
from quire.frontend.tokenizer import Tokenizer
from quire.grammar.text import grammar_text
from quire.measure.http import HttpClient
from quire.measure.load import Outcome, send
from quire.server.protocol.chat import ChatRequest
from quire.server.text import harmony
from quire.server.text.reader import Tags
from quire.server.text.reasoning import REASONING_FORMATS, ReasoningFormat
from quire.server.text.tools import CALL_LIST, TOOL_FORMATS
from quire.server.tool_choice import ToolChoice
from quire.settings import ServerSettings
from tests.server.serving import MODEL, TOKENIZER, RunningServer
from tests.server.test_errors import error_of
from tests.server.text.answers import TOOLS, allows

MESSAGES = [{"role": "user", "content": "Will it rain?"}]
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL.replace('2', '3')}"
TEMPLATE = (
    "{{ tools | length if tools else 'no' }} tools;"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments.city }}{% endfor %}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and enable_thinking %}<think>\n"
    "{% endif %}{% endif %}"
)


def strict(*tools: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The tools, as strict ones."""
    return [{"type": "function", "function": {**tool["function"], "strict": True, **fields}} for tool in tools]


STRICT = strict(*TOOLS, parameters={**TOOLS[0]["function"]["parameters"], "required": ["city"]})


@contextmanager
def answering(
    text: str, tools: str | None = "hermes", reasoning: str | None = "qwen3", **settings: Any
) -> Iterator[RunningServer]:
    """A server whose model always writes this text."""
    answer = settings.get("tokenizer", TOKENIZER).encode(text, add_special_tokens=False)
    parsers = {"tool_call_parser": tools, "reasoning_parser": reasoning}
    with RunningServer(answer=answer, chat_template=TEMPLATE, **parsers, **settings) as server:
        yield server
        server.wait_for_idle()


@pytest.fixture(scope="module")
def agent():
    with answering(ANSWER) as server:
        yield server


@pytest.fixture(scope="module")
def required():
    with answering('[{"name": "get_weather", "parameters": {"city": "Bern"}}]') as server:
        yield server


def ask(server: RunningServer, **fields: Any) -> Any:
    return server.openai().chat.completions.create(model=MODEL, messages=MESSAGES, **{"tools": TOOLS, **fields})


def streamed(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """A streamed answer, joined as clients do."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish_reason": []}
    for chunk in ask(server, stream=True, **fields):
        (choice,) = chunk.choices
        found["content"] += choice.delta.content or ""
        found["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
        assert getattr(choice.delta, "reasoning_content", None) == getattr(choice.delta, "reasoning", None)
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert (call.index, call.type, call.function.arguments) == (len(found["calls"]), "function", "")
                found["calls"].append([call.function.name, ""])
            else:
                assert call.function.name is None
                found["calls"][call.index][1] += call.function.arguments
        found["finish_reason"] += [choice.finish_reason] if choice.finish_reason else []
    return found


def test_calls_and_reasoning(agent):
    (choice,) = ask(agent).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning == choice.message.reasoning_content == "Hm."
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name) == ("function", "get_weather")
    assert json.loads(first.function.arguments) == {"city": "Zürich", "days": 2}
    assert json.loads(second.function.arguments) == {"city": "Zürich", "days": 3}
    assert first.id != second.id
    assert streamed(agent) == {
        "content": "I look.",
        "reasoning": "Hm.",
        "calls": [[call.function.name, call.function.arguments] for call in (first, second)],
        "finish_reason": ["tool_calls"],
    }


def test_arguments_are_streamed_in_pieces(agent):
    deltas = [chunk.choices[0].delta for chunk in ask(agent, stream=True)]
    pieces = [call for delta in deltas for call in delta.tool_calls or [] if call.index == 0]
    assert len(pieces) > 5


def test_every_continuation_is_parsed(agent):
    answer = ask(agent, n=2)
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [2, 2]


def test_logprobs_and_tokens_come_once(agent):
    fields = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = ask(agent, **fields).choices[0]
    parts = [chunk.choices[0] for chunk in ask(agent, stream=True, **fields)]
    assert [token for part in parts for token in part.token_ids or []] == whole.token_ids
    tokens = [entry.token for part in parts if part.logprobs for entry in part.logprobs.content]
    assert tokens == [entry.token for entry in whole.logprobs.content]


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}])
def test_without_tools_a_call_is_text(agent, fields):
    message = ask(agent, **fields).choices[0].message
    assert message.tool_calls is None
    assert CALL in message.content
    assert message.reasoning == "Hm."


def test_only_one_call_at_a_time(agent):
    assert len(ask(agent, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    assert len(streamed(agent, parallel_tool_calls=False)["calls"]) == 1


def test_reasoning_may_be_left_out(agent):
    message = ask(agent, extra_body={"include_reasoning": False}).choices[0].message
    assert (message.reasoning, message.content) == (None, "I look.")
    assert streamed(agent, extra_body={"include_reasoning": False})["reasoning"] == ""


def test_an_answer_that_is_cut_off_ends_by_length(agent):
    for fields in ({"max_tokens": 5}, {"max_tokens": 60}):
        choice = ask(agent, **fields).choices[0]
        assert choice.finish_reason == "length"
        assert streamed(agent, **fields)["finish_reason"] == ["length"]


def test_a_prompt_that_opens_the_reasoning():
    with answering("Hm.</think>Yes.") as server:
        message = ask(server, reasoning_effort="high").choices[0].message
        assert (message.reasoning, message.content) == ("Hm.", "Yes.")
        message = ask(server, reasoning_effort="none").choices[0].message
        assert (message.reasoning, message.content) == (None, "Hm.</think>Yes.")


def test_history_of_calls(agent):
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]},
    ]
    agent.chat(messages=history, tools=TOOLS, max_tokens=1)
    prompt = TOKENIZER.decode(agent.last_request().prompt_token_ids, skip_special_tokens=False)
    assert prompt == "1 tools;<user>Will it rain?</><assistant>get_weatherBern</><tool>rain</><assistant>"


def test_render(agent):
    body = {"messages": MESSAGES, "tools": TOOLS, "reasoning_effort": "high"}
    rendered = agent.http.post("/v1/chat/completions/render", json=body).json()
    assert rendered["prompt"] == "1 tools;<user>Will it rain?</><assistant><think>\n"
    assert rendered["token_ids"] == TOKENIZER.encode(rendered["prompt"], add_special_tokens=False)
    assert rendered["model"] == MODEL
    agent.chat(**body, max_tokens=1)
    assert agent.last_request().prompt_token_ids == rendered["token_ids"]
    for fields, status, param in (
        ({"model": "x"}, 404, "model"),
        ({"temperature": 9}, 400, "temperature"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ({"max_tokens": 10**6}, 400, "max_tokens"),
        ({"length_penalty": 2.0}, 400, "length_penalty"),
    ):
        answer = agent.http.post("/v1/chat/completions/render", json={**body, **fields})
        assert error_of(answer, status)["param"] == param
    for rank, status in (("0", 200), ("1", 400), ("x", 400)):
        headers = {"X-data-parallel-rank": rank}
        answer = agent.http.post("/v1/chat/completions/render", json=body, headers=headers)
        assert answer.status_code == status
        assert status == 200 or error_of(answer, 400)["param"] == "data_parallel_rank"


def test_required(required):
    (choice,) = ask(required, tool_choice="required", tools=[*TOOLS, NOW]).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Bern"}')
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert required.last_request().sampling_params.grammar is not None
    assert streamed(required, tool_choice="required")["calls"] == [["get_weather", '{"city": "Bern"}']]


def test_named():
    with answering('{"city": "Bern"} ') as server:
        choice = {"type": "function", "function": {"name": "get_weather"}}
        answer = ask(server, tool_choice=choice).choices[0]
        assert answer.message.tool_calls[0].function.arguments == '{"city": "Bern"}'
        assert (answer.message.content, answer.finish_reason) == (None, "stop")
        assert server.last_request().sampling_params.grammar is not None
        assert streamed(server, tool_choice=choice)["calls"] == [["get_weather", '{"city": "Bern"}']]


def test_the_grammar_begins_behind_the_reasoning():
    with answering('<think>Hm.</think>\n\n[{"name": "now", "parameters": {}}]') as server:
        (choice,) = ask(server, tool_choice="required", tools=[NOW]).choices
        assert (choice.message.reasoning, choice.finish_reason) == ("Hm.", "tool_calls")
        assert choice.message.tool_calls[0].function.name == "now"
        assert "<think>" in server.last_request().sampling_params.grammar
        fields = {"tools": [], "response_format": {"type": "json_object"}}
        message = ask(server, **fields).choices[0].message
        assert (message.reasoning, message.content) == ("Hm.", '[{"name": "now", "parameters": {}}]')
        for effort, has_start in (("high", False), ("none", True)):
            ask(server, reasoning_effort=effort, **fields)
            grammar = server.last_request().sampling_params.grammar
            assert ("</think>" in grammar, "begin" in grammar) == (True, has_start)


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
IN_HARMONY = {"tools": "openai", "reasoning": "openai_gptoss"}


def test_in_harmony_a_constraint_is_for_the_final_message():
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": {"a": {"type": "integer"}}}}}
    with answering(ANALYSIS + FINAL + '{"a": 5}<|return|>', **IN_HARMONY) as server:
        for fields in ({"tools": []}, {}):
            fields |= {"response_format": form}
            (choice,) = ask(server, **fields).choices
            assert (choice.message.reasoning, choice.message.content) == ("Hm.", '{"a": 5}')
            grammar = server.last_request().sampling_params.grammar
            found = streamed(server, **fields)
            assert (found["reasoning"], found["content"], found["calls"]) == ("Hm.", '{"a": 5}', [])
        for start in ("", ANALYSIS, ANALYSIS * 2):
            for header in (FINAL, "<|channel|>final <|constrain|>json<|message|>"):
                assert allows(grammar, start + header + '{"a": 5}')
                assert not allows(grammar, start + header + '{"a": "5"}')
                assert not allows(grammar, start + header + "No.")
            assert not allows(grammar, start + '{"a": 5}')
        assert not allows(grammar, "Hm. " + FINAL + '{"a": 5}')
        history = [*MESSAGES, {"role": "assistant", "content": FINAL + '{"a"'}]
        fields = {"messages": history, "continue_final_message": True, "add_generation_prompt": False}
        server.chat(response_format=form, **fields)
        assert "final" not in server.last_request().sampling_params.grammar, "the prompt has begun the message"


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "get_weather"}}, "stop")],
)
def test_in_harmony_a_constrained_call_is_a_message(choice, reason):
    """With the model's own header, and behind its reasoning."""
    call = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    with answering(ANALYSIS + call + '{"city": "Bern"}<|call|>', **IN_HARMONY) as server:
        (answer,) = ask(server, tools=[*STRICT, NOW], tool_choice=choice).choices
        assert (answer.message.reasoning, answer.message.content) == ("Hm.", None)
        assert answer.message.tool_calls[0].function.arguments == '{"city": "Bern"}'
        assert answer.finish_reason == reason
        grammar = server.last_request().sampling_params.grammar
        found = streamed(server, tools=[*STRICT, NOW], tool_choice=choice)
        assert (found["reasoning"], found["calls"]) == ("Hm.", [["get_weather", '{"city": "Bern"}']])
    for start in ("", ANALYSIS):
        assert allows(grammar, start + call + '{"city": "Bern"}')
        assert not allows(grammar, start + call + '{"city": 5}')
        assert not allows(grammar, start + FINAL + "No.")
        assert allows(grammar, start + call.replace("get_weather", "now") + "{}") == (choice == "required")


def test_tags_that_are_special_tokens_reach_the_parser():
    backend = copy.deepcopy(TOKENIZER.backend)
    backend.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer = Tokenizer(backend, special_tokens=TOKENIZER.special_tokens)
    with answering('[TOOL_CALLS]now{"a": 1}', "mistral", None, tokenizer=tokenizer) as server:
        for fields in ({}, {"extra_body": {"skip_special_tokens": True}}):
            (call,) = ask(server, **fields).choices[0].message.tool_calls
            assert (call.function.name, call.function.arguments) == ("now", '{"a": 1}')
        assert ask(server, tools=[]).choices[0].message.content == 'now{"a": 1}'


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools", r"tools\[0\] is not a function"),
        ({"tools": [{"type": "search", "function": {"name": "f"}}]}, "tools", "not a function"),
        ({"tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools", "not a function"),
        ({"tool_choice": "sometimes"}, "tool_choice", "not understood"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "not understood"),
        ({"tool_choice": {"function": {"name": "g"}}}, "tool_choice", "not among the tools"),
        (
            {"tools": [{"function": {"name": "f", "strict": True, "parameters": {"not": {"type": "object"}}}}]},
            "tools",
            "not",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{"function": {"name": "f", "parameters": {"not": {"type": "object"}}}}],
            },
            "tools",
            "not supported: #/.defs/0/not",
        ),
    ],
)
def test_refused(agent, fields, param, message):
    error = error_of(agent.chat(**{"tools": TOOLS, **fields}), 400)
    assert error["param"] == param
    assert re.search(message, error["message"])


def test_automatic_choice_needs_a_format_and_the_flag():
    for tools, settings, fix in (
        (None, {}, "--tool-call-parser"),
        ("hermes", {"enable_auto_tool_choice": False}, "--enable-auto-tool-choice"),
    ):
        with answering("x", tools, None, **settings) as server:
            error = error_of(server.chat(tools=TOOLS), 400)
            assert (error["code"], error["param"]) == ("unsupported_field", "tools")
            assert fix in error["message"]


def test_tools_that_are_not_to_be_called_may_be_hidden():
    with answering("x", exclude_tools_when_tool_choice_none=True) as server:
        ask(server, tool_choice="none", max_tokens=1)
        assert TOKENIZER.decode(server.last_request().prompt_token_ids).startswith("no tools")


def test_references_of_a_schema_move_with_it():
    schema = {
        "properties": {"next": {"$ref": "#"}, "pets": {"type": "array", "items": {"$ref": "#/$defs/pet"}}},
        "$defs": {"pet": {"enum": ["cat", "dog"]}},
    }
    tools = [*TOOLS, {"type": "function", "function": {"name": "visit", "parameters": schema}}]

    body = ChatRequest(messages=MESSAGES, tools=tools, tool_choice="required", parallel_tool_calls=False)
    constraint = ToolChoice.of(body, ServerSettings(), []).constraint
    assert grammar_text(constraint)
    moved = constraint.json["$defs"]["1"]
    assert moved["properties"]["next"] == {"$ref": "#/$defs/1"}
    assert moved["properties"]["pets"]["items"] == {"$ref": "#/$defs/1/$defs/pet"}
    assert constraint.json["maxItems"] == 1


def test_strict_calls_with_reasoning_and_a_form_of_the_answer():
    with answering(ANSWER) as server:
        (choice,) = ask(server, tools=STRICT).choices
        assert (choice.message.reasoning, len(choice.message.tool_calls)) == ("Hm.", 2)
        grammar = server.last_request().sampling_params.grammar
        assert "</think>" in grammar
        assert "<tool_call>" in grammar
        ask(server, tools=STRICT, response_format={"type": "json_object"})
        assert "<tool_call>" not in server.last_request().sampling_params.grammar, "as before, the answer is JSON"
        for fields in ({"tools": TOOLS}, {"tools": STRICT, "tool_choice": "none"}):
            ask(server, **fields)
            assert server.last_request().sampling_params.grammar is None


def test_the_flags_name_every_format():
    assert {*TOOL_PARSERS} - {"openai"} == TOOL_FORMATS.keys() - {CALL_LIST}
    assert {*REASONING_PARSERS} - {"openai_gptoss"} == REASONING_FORMATS.keys()


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tools": STRICT}])
def test_calls_whose_form_is_given_are_refused_with_beam_search(agent, fields):
    """Beam search follows no grammar: the calls would not have the form."""
    fields = {"tools": TOOLS, "max_tokens": 1, **fields}
    error = error_of(agent.chat(use_beam_search=True, **fields), 400)
    assert (error["code"], error["param"]) == ("unsupported_field", "tools")
    assert agent.chat(use_beam_search=True, **{**fields, "tools": TOOLS, "tool_choice": "auto"}).status_code == 200


def test_a_thinking_budget_needs_tags_that_are_tokens(agent):
    error = error_of(agent.chat(thinking_token_budget=5), 400)
    assert (error["code"], error["param"]) == ("unsupported_field", "thinking_token_budget")
    assert agent.chat(thinking_token_budget=-1, max_tokens=1).status_code == 200
    error = error_of(agent.complete(thinking_token_budget=5), 400)
    assert error["param"] == "thinking_token_budget"
    with answering("x", reasoning=None) as server:
        assert "--reasoning-parser" in error_of(server.chat(thinking_token_budget=5), 400)["message"]


@pytest.mark.parametrize(("opening", "closing", "tags"), [(">", "a", "a"), ("e", "a", "ae"), ("e", ">", None)])
def test_a_thinking_budget_reaches_the_engine(agent, monkeypatch, opening, closing, tags):
    """The demo model has tokens for these tags. The prompt ends with >, which may open or close the reasoning."""
    monkeypatch.setitem(REASONING_FORMATS, "qwen3", ReasoningFormat(Tags(opening), Tags(closing)))
    assert agent.chat(thinking_token_budget=5, max_tokens=1).status_code == 200
    params = agent.last_request().sampling_params
    assert params.thinking_token_budget == (None if tags is None else 5)
    if tags is not None:
        assert params.thinking_token_ids == [TOKENIZER.token_to_id(tag) for tag in tags]


def test_a_thinking_budget_in_harmony(monkeypatch):
    """The tokens of a header begin the reasoning, unless the prompt has begun a message."""
    tags = ("a", "b", "c", "d")  # for which the demo model has tokens
    with answering("x", **IN_HARMONY) as server:
        error = error_of(server.chat(thinking_token_budget=5), 400)
        assert "not tokens" in error["message"]
        monkeypatch.setattr(harmony, "REASONING_TOKENS", tags)
        server.chat(thinking_token_budget=5, max_tokens=1)
        params = server.last_request().sampling_params
        assert params.thinking_token_budget == 5
        assert params.thinking_token_ids == [TOKENIZER.token_to_id(tag) for tag in tags]
        history = [*MESSAGES, {"role": "assistant", "content": FINAL}]
        fields = {"messages": history, "continue_final_message": True, "add_generation_prompt": False}
        assert server.chat(thinking_token_budget=5, max_tokens=1, **fields).status_code == 200
        assert server.last_request().sampling_params.thinking_token_budget is None


async def test_the_benchmark_measures_from_the_first_token_of_the_reasoning(agent):
    outcome, client = Outcome(0), HttpClient(agent.url)
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    await send(client, "/v1/chat/completions", json.dumps(body).encode(), outcome)
    client.close()
    assert outcome.success
    assert outcome.text.startswith("Hm.I look.")
