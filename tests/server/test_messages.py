"""Anthropic's API with its own client: answers, events, token counts, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from quire.frontend.echo_client import EchoClient
from quire.messages import AddRequest
from quire.server.text.reader import Tags
from quire.server.text.reasoning import REASONING_FORMATS, ReasoningFormat
from tests.server.serving import ANSWER, MAX_MODEL_LEN, MODEL, TEXT, TOKENIZER, RunningServer
from tests.server.test_errors import MESSAGES, error_of
from tests.server.test_tools import ANSWER as ANSWER_WITH_CALLS
from tests.server.test_tools import answering
from tests.server.text.answers import TOOLS

if TYPE_CHECKING:
    import anthropic  # it takes a second, which only these tests need

PATH = "/v1/messages"
ANTHROPIC_TOOLS = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def client_of(server: RunningServer) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=20)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


def prompt_of(server: RunningServer) -> str:
    return TOKENIZER.decode(list(server.last_request().prompt_token_ids), skip_special_tokens=False)


def test_an_answer(server: RunningServer, client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=100,
        system="Be short.",
        messages=[{"role": "user", "content": "Hi"}],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 4},
    )
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert answer.id.startswith("msg")
    (block,) = answer.content
    assert block.text == TEXT
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    asked = server.last_request()
    params = asked.sampling_params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 4)
    assert answer.usage.output_tokens == len(ANSWER) + 1  # the end of text is a token too
    assert answer.usage.input_tokens == len(asked.prompt_token_ids)
    assert (answer.usage.cache_read_input_tokens, answer.usage.cache_creation_input_tokens) == (0, 0)


def test_a_streamed_answer(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        answer = stream.get_final_message()
    assert text == TEXT == answer.content[0].text
    whole = client.messages.create(model=MODEL, max_tokens=100, messages=MESSAGES)
    assert answer.usage == whole.usage
    assert (answer.stop_reason, answer.role, answer.model) == ("end_turn", "assistant", MODEL)


def test_the_events_in_their_order(server: RunningServer) -> None:
    events = server.named_events(PATH, messages=MESSAGES, max_tokens=100)
    assert all(name == event["type"] for name, event in events)
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert events[0][1]["message"]["usage"]["output_tokens"] == 0
    assert events[-2][1]["usage"]["output_tokens"] == len(ANSWER) + 1


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"max_tokens": 50, "stop_sequences": ["zzz", " is"]}, "stop_sequence", " is"),
        ({"max_tokens": 50}, "end_turn", None),
    ],
)
def test_why_an_answer_ended(client: anthropic.Anthropic, fields, reason, sequence, is_streamed) -> None:
    if is_streamed:
        with client.messages.stream(model=MODEL, messages=MESSAGES, **fields) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(model=MODEL, messages=MESSAGES, **fields)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)
    if sequence:
        assert answer.content[0].text == TEXT[: TEXT.index(sequence)]


def test_an_answer_ends_where_the_context_does() -> None:
    with RunningServer(EchoClient(ANSWER * 300, max_model_len=MAX_MODEL_LEN)) as server, client_of(server) as client:
        answer = client.messages.create(model=MODEL, max_tokens=10**6, messages=MESSAGES)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.input_tokens + answer.usage.output_tokens == MAX_MODEL_LEN


def test_a_prompt_has_every_block(server: RunningServer, client: anthropic.Anthropic) -> None:
    text = [{"type": "text", "text": "One", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Two"}]
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "Three"},
        {"role": "user", "content": "Four"},
    ]
    chat = [{"role": "system", "content": "Zero\nMore"}, {"role": "user", "content": "One\nTwo"}, *messages[1:]]
    system = [{"type": "text", "text": "Zero"}, {"type": "text", "text": "More"}]
    client.messages.create(model=MODEL, max_tokens=1, system=system, messages=messages)
    prompt = prompt_of(server)
    server.chat(messages=chat, max_tokens=1)
    assert prompt == prompt_of(server)


def test_a_last_message_of_the_assistant_is_continued(server: RunningServer, client: anthropic.Anthropic) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    answer = client.messages.create(model=MODEL, max_tokens=100, messages=messages)
    assert prompt_of(server).endswith("Once upon")
    assert answer.content[0].text == TEXT


def test_a_form_of_the_text(server: RunningServer, client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"format": {"type": "json_schema", "schema": schema}}
    client.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES, output_config=form)
    grammar = server.last_request().sampling_params.grammar
    server.chat(structured_outputs={"json": schema})
    assert grammar == server.last_request().sampling_params.grammar is not None


def test_the_salt_of_the_prefix_cache(server: RunningServer) -> None:
    server.http.post(PATH, json={"messages": MESSAGES, "max_tokens": 1, "cache_salt": "a"})
    assert server.last_request().cache_salt == "a"


def test_tokens_are_counted_without_an_answer(server: RunningServer, client: anthropic.Anthropic) -> None:
    fields = {"model": MODEL, "system": "Be short.", "messages": MESSAGES}
    answer = client.messages.create(max_tokens=1, **fields)
    num_sent = sum(isinstance(message, AddRequest) for message in server.client.sent)
    assert client.messages.count_tokens(**fields).input_tokens == answer.usage.input_tokens
    assert num_sent == sum(isinstance(message, AddRequest) for message in server.client.sent)


@pytest.mark.parametrize(("path", "fields"), [(PATH, {"max_tokens": 1}), (f"{PATH}/count_tokens", {})])
def test_an_unknown_model(server: RunningServer, path: str, fields) -> None:
    error = error_of(server.http.post(path, json={"model": "gpt", "messages": MESSAGES, **fields}), 404)
    assert error["type"] == "not_found_error"
    assert MODEL in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_tokens": None}, "max_tokens", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"stop_sequences": [""]}, "stop_sequences", "invalid_value"),
        ({"tools": [TOOL]}, "tools", "unsupported_field"),  # this server lets none be called
        ({"tools": [{**TOOL, "type": "web_search_20250305"}]}, "tools[0].type", "invalid_value"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "unsupported_field"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
            "invalid_value",
        ),
        ({"output_config": {"effort": "low"}}, "output_config", "invalid_value"),
        ({"output_config": {"format": {"schema": {"not": {}}}}}, "output_config", None),
        ({"messages": []}, "messages", "invalid_value"),
        ({"max_token": 1}, "max_token", "unsupported_field"),
    ],
)
def test_refusals_name_the_field(server: RunningServer, fields, param, code) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, **fields}
    error = error_of(server.http.post(PATH, json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert code is None or error["code"] == code


def test_fields_that_ask_for_nothing(server: RunningServer) -> None:
    extra = {"tools": [], "metadata": {"user_id": "1"}, "service_tier": "auto"}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"messages": MESSAGES, "max_tokens": 1, "thinking": thinking, **extra}
    response = server.http.post(PATH, json=body)
    assert response.status_code == 200
    ignored = {"metadata", "service_tier", "thinking.budget_tokens"}
    assert set(response.headers["x-quire-ignored-fields"].split(", ")) == ignored


def test_a_budget_of_thinking(agent: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the engine if the end of the reasoning is a token. `disabled` has none."""

    def ignored(**thinking: object) -> bool:
        body = {"messages": MESSAGES, "max_tokens": 1, "thinking": thinking}
        response = agent.http.post(PATH, json=body)
        assert response.status_code == 200, response.text
        return "thinking.budget_tokens" in response.headers.get("x-quire-ignored-fields", "")

    assert ignored(type="enabled", budget_tokens=5), "the demo model has no such tokens"
    assert agent.last_request().sampling_params.thinking_token_budget is None
    monkeypatch.setitem(REASONING_FORMATS, "qwen3", ReasoningFormat(Tags(">"), Tags("a")))
    assert not ignored(type="enabled", budget_tokens=5)
    params = agent.last_request().sampling_params
    assert (params.thinking_token_budget, len(params.thinking_token_ids or ())) == (5, 1)
    assert ignored(type="disabled", budget_tokens=5)
    assert agent.last_request().sampling_params.thinking_token_budget is None
    for wrong in (0, -1, 2**31):
        body = {"messages": MESSAGES, "max_tokens": 1, "thinking": {"type": "enabled", "budget_tokens": wrong}}
        assert error_of(agent.http.post(PATH, json=body), 400)["param"] == "thinking.budget_tokens"


@pytest.fixture(scope="module")
def agent() -> Iterator[RunningServer]:
    """Thinks, says something, and calls a tool twice."""
    with answering(ANSWER_WITH_CALLS, enable_auto_tool_choice=True) as server:
        yield server


def blocks_of(answer: anthropic.types.Message) -> list[dict[str, object]]:
    return [block.model_dump(exclude={"id"}, exclude_none=True) for block in answer.content]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools_and_thinking(agent: RunningServer, is_streamed: bool) -> None:
    with client_of(agent) as client:
        fields = {"model": MODEL, "max_tokens": 500, "messages": MESSAGES, "tools": ANTHROPIC_TOOLS}
        if is_streamed:
            with client.messages.stream(**fields) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**fields)
        assert blocks_of(answer) == [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "name": "get_weather", "input": {"city": "Zürich", "days": 2}},
            {"type": "tool_use", "name": "get_weather", "input": {"city": "Zürich", "days": 3}},
        ]
        assert answer.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": f"{block.input['days']} sunny days"}
            for block in answer.content[2:]
        ]
        history = [*MESSAGES, answer.to_param(), {"role": "user", "content": [*results, {"type": "text", "text": "?"}]}]
        client.messages.create(**{**fields, "messages": history})
        prompt = prompt_of(agent)
        assert "<assistant>I look.get_weatherZürichget_weatherZürich</>" in prompt
        assert "<tool>2 sunny days</><tool>3 sunny days</><user>?</>" in prompt
        assert prompt.startswith("1 tools;")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tool_that_must_be_called(is_streamed: bool) -> None:
    with answering('[{"name": "get_weather", "parameters": {"city": "Bern"}}]') as server, client_of(server) as client:
        fields = {"model": MODEL, "max_tokens": 100, "messages": MESSAGES, "tools": ANTHROPIC_TOOLS}
        fields["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
        if is_streamed:
            with client.messages.stream(**fields) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**fields)
        assert blocks_of(answer) == [{"type": "tool_use", "name": "get_weather", "input": {"city": "Bern"}}]
        assert answer.stop_reason == "tool_use"
        assert server.last_request().sampling_params.grammar is not None


@pytest.mark.parametrize("strict", [True, False])
def test_a_strict_tool(agent: RunningServer, strict: bool) -> None:
    tools = [{**tool, "strict": strict} for tool in ANTHROPIC_TOOLS]
    with client_of(agent) as client:
        client.messages.create(model=MODEL, max_tokens=5, messages=MESSAGES, tools=tools)
    assert (agent.last_request().sampling_params.grammar is not None) == strict


def test_a_call_that_is_cut(agent: RunningServer) -> None:
    with client_of(agent) as client:
        answer = client.messages.create(model=MODEL, max_tokens=50, messages=MESSAGES, tools=ANTHROPIC_TOOLS)
    assert answer.stop_reason == "max_tokens"
    assert answer.content[-1].type == "tool_use"
    assert answer.content[-1].input == {}


def test_the_client_raises_its_own_errors() -> None:
    import anthropic

    raises = pytest.raises(anthropic.AuthenticationError)
    with RunningServer(api_keys=("key",)) as server, client_of(server) as client, raises as error:
        client.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES)
    assert error.value.body["error"]["type"] == "authentication_error"


def test_an_error_within_a_stream() -> None:
    import anthropic

    engine = EchoClient(ANSWER, step_seconds=0.02, max_model_len=MAX_MODEL_LEN)
    with RunningServer(engine) as server, client_of(server) as client:
        stream = client.messages.create(model=MODEL, max_tokens=50, messages=MESSAGES, stream=True)
        next(stream)
        server.run(server.client.die)
        with pytest.raises(anthropic.APIStatusError) as error:
            list(stream)
    assert error.value.body["error"]["type"] == "overloaded_error"
