"""OpenAI's Responses API with its own client: answers, events, conversations, and work in the background."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseReasoningItem

from quire.config import EngineConfig, ServerConfig
from quire.entry.launch import open_model
from quire.entry.serve import server_settings
from quire.frontend.echo_client import EchoClient
from quire.frontend.tokenizer import Tokenizer
from quire.server.protocol.responses import Reasoning, ResponseObject, TextConfig
from quire.server.response_store import ResponseStore, StoredResponse
from tests.server.serving import ANSWER, MAX_MODEL_LEN, MODEL, TEXT, TOKENIZER, RunningServer
from tests.server.test_errors import error_of
from tests.server.test_tools import ANSWER as ANSWER_WITH_CALLS
from tests.server.test_tools import answering
from tests.server.text.answers import TOOLS

PATH = "/v1/responses"
FUNCTIONS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def slow() -> Iterator[RunningServer]:
    """Answers with TEXT ten times, a token every 10 ms."""
    with RunningServer(EchoClient(ANSWER * 10, step_seconds=0.01, max_model_len=MAX_MODEL_LEN)) as server:
        yield server
        server.wait_for_idle()


def prompt_of(server: RunningServer) -> str:
    return TOKENIZER.decode(list(server.last_request().prompt_token_ids), skip_special_tokens=False)


def wait_for(client: openai.OpenAI, response_id: str, is_so: Callable[[Response], bool]) -> Response:
    deadline = time.monotonic() + 10
    while not is_so(response := client.responses.retrieve(response_id)):
        assert time.monotonic() < deadline, response
        time.sleep(0.01)
    return response


def test_an_answer(server: RunningServer, client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL,
        input="Hi",
        instructions="Be short.",
        temperature=0.5,
        max_output_tokens=100,
        metadata={"a": "b"},
        extra_body={"top_k": 4, "cache_salt": "salt"},
    )
    assert response.output_text == TEXT
    assert (response.status, response.object, response.model, response.error) == ("completed", "response", MODEL, None)
    assert (response.temperature, response.max_output_tokens, response.metadata) == (0.5, 100, {"a": "b"})
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    asked = server.last_request()
    assert (asked.sampling_params.temperature, asked.sampling_params.top_k) == (0.5, 4)
    assert (asked.max_tokens, asked.cache_salt) == (100, "salt")
    assert response.usage.input_tokens == len(asked.prompt_token_ids)
    assert response.usage.output_tokens == len(ANSWER) + 1  # the end of text is a token too
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_input_and_instructions_are_a_chat(server: RunningServer, client: openai.OpenAI) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "One"}, {"type": "input_text", "text": "Two"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Three"}]},
        {"role": "user", "content": "Four"},
    ]
    client.responses.create(model=MODEL, instructions="Zero", input=items)
    prompt = prompt_of(server)
    texts = [("system", "Zero"), ("user", "One\nTwo"), ("assistant", "Three"), ("user", "Four")]
    server.chat(messages=[{"role": role, "content": text} for role, text in texts])
    assert prompt == prompt_of(server)


def test_tokens_of_a_prompt(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "Hi", "instructions": "Be short"}
    first = client.responses.create(**fields)
    assert first.usage is not None
    assert client.responses.input_tokens.count(**fields).input_tokens == first.usage.input_tokens
    longer = client.responses.input_tokens.count(**fields, previous_response_id=first.id)
    assert longer.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_the_events(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hi", top_logprobs=2) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert list(dict.fromkeys(event.type for event in events)) == ORDER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == TEXT == response.output_text
    assert events[0].response.output == []
    logprobs = [position for event in deltas for position in event.logprobs]
    assert len(logprobs) == response.usage.output_tokens
    assert all(len(position.top_logprobs) >= 2 for position in logprobs)
    assert len(response.output[0].content[0].logprobs) == len(logprobs)


@pytest.mark.parametrize(
    "thoughts", ["", "<think>\nLet me see: 1 < 2.\n</think>\n\n", "<think></think>", "\n<think>x", "<thin"]
)
@pytest.mark.parametrize("text", ["Hi <b> there\n\nwörld 😀 <thi", "<tool_call>", "ok "])
def test_logprobs_are_those_of_the_text(thoughts: str, text: str) -> None:
    """Not those of what the model thought, nor of tags; the same in a stream."""
    tokens = TOKENIZER.encode(thoughts + text, add_special_tokens=False)
    body = {"model": MODEL, "input": "Hi", "include": ["message.output_text.logprobs"]}
    with RunningServer(answer=tokens, reasoning_parser="qwen3") as server:
        whole = server.http.post(PATH, json=body).json()["output"]
        streamed = [event for _, event in server.named_events(PATH, **body)]
        plain = server.http.post(PATH, json=body | {"include": []}).json()["output"]
    assert [item["type"] for item in whole] == [item["type"] for item in plain]
    parts = [item["content"][0] for item in whole if item["type"] == "message"]
    if thoughts.endswith("<think>x"):
        assert [part["logprobs"] for part in parts] == []
        return
    (part,) = parts
    (done,) = (event for event in streamed if event["type"] == "response.output_text.done")
    assert done["logprobs"] == part["logprobs"]
    *names, end = [position["token"] for position in part["logprobs"]]
    assert ("".join(names), end) == (part["text"], "<|im_end|>")
    deltas = [event for event in streamed if event["type"] == "response.output_text.delta"]
    assert [position for event in deltas for position in event["logprobs"]] == part["logprobs"]


@pytest.mark.parametrize("text", ["<think>a@b</think>ok", "<think>ab@</think>ok", "<think>ab</think>o@k", "o@k@"])
def test_logprobs_beside_a_special_token_that_is_left_out(text: str) -> None:
    """It has a logprob and no text. The tokens after it keep their places."""
    answer = [1 if char == "@" else TOKENIZER.encode(char, add_special_tokens=False)[0] for char in text]
    body = {"model": MODEL, "input": "Hi", "include": ["message.output_text.logprobs"]}
    with RunningServer(answer=answer, reasoning_parser="qwen3") as server:
        (*_, item) = server.http.post(PATH, json=body).json()["output"]
        streamed = [event for _, event in server.named_events(PATH, **body)]
    (part,) = item["content"]
    (done,) = (event for event in streamed if event["type"] == "response.output_text.done")
    assert done["logprobs"] == part["logprobs"]
    names = [position["token"] for position in part["logprobs"]]
    said = text.partition("</think>")[2] or text
    assert names == [{"@": "<|im_start|>"}.get(char, char) for char in said] + ["<|im_end|>"]


def test_a_streamed_answer_is_the_whole_one(client: openai.OpenAI) -> None:
    def fixed(response: Response) -> dict[str, Any]:
        changing = {"id", "created_at", "completed_at", "output"}
        return {**response.model_dump(exclude=changing), "text": response.output_text}

    events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
    assert fixed(events[-1].response) == fixed(client.responses.create(model=MODEL, input="Hi"))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_is_cut(client: openai.OpenAI, is_streamed: bool) -> None:
    response = client.responses.create(model=MODEL, input="Hi", max_output_tokens=3, stream=is_streamed)
    if is_streamed:
        last = list(response)[-1]
        assert last.type == "response.incomplete"
        response = last.response
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 3


def test_a_form_of_the_text(server: RunningServer, client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    response = client.responses.create(model=MODEL, input="Hi", text={"format": form})
    grammar = server.last_request().sampling_params.grammar
    server.chat(structured_outputs={"json": schema})
    assert grammar == server.last_request().sampling_params.grammar is not None
    assert response.text.format.to_dict() == form
    client.responses.create(model=MODEL, input="Hi", text={"format": {"type": "json_object"}})
    grammar = server.last_request().sampling_params.grammar
    server.chat(structured_outputs={"json_object": True})
    assert grammar == server.last_request().sampling_params.grammar is not None


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation(server: RunningServer, client: openai.OpenAI, is_streamed: bool) -> None:
    first = client.responses.create(model=MODEL, input="Hi", instructions="Be short", stream=is_streamed)
    if is_streamed:
        *_, last = first
        first = last.response
    second = client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = client.responses.create(model=MODEL, input="Why?", previous_response_id=second.id, instructions="Rhyme")
    prompt = prompt_of(server)
    texts = ["Rhyme", "Hi", TEXT, "And?", TEXT, "Why?"]
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    server.chat(messages=[{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])
    assert prompt == prompt_of(server)
    assert client.responses.retrieve(third.id) == third
    assert client.responses.retrieve(first.id).output_text == TEXT


def test_what_is_not_stored_is_not_found(server: RunningServer, client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Hi", store=False)
    assert response.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    error = error_of(server.http.post(PATH, json={"input": "Hi", "previous_response_id": response.id}), 404)
    assert error["code"] == "response_not_found"


def test_a_server_that_stores_nothing() -> None:
    with RunningServer(stores_responses=False) as server, server.openai() as client:
        response = client.responses.with_raw_response.create(model=MODEL, input="Hi", store=True)
        assert response.headers["x-quire-ignored-fields"] == "store"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.parse().id)
        assert error_of(server.http.post(PATH, json={"input": "Hi", "background": True}), 400)["param"] == "background"


@pytest.mark.parametrize(("value", "stores"), [("", True), ("0", False), ("1", True)])
def test_the_variable_that_stores_nothing(monkeypatch: pytest.MonkeyPatch, value: str, stores: bool) -> None:
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", value)
    parts = open_model(EngineConfig(), lambda *report: None)
    assert server_settings(EngineConfig(), ServerConfig(), parts).stores_responses is stores


def test_an_answer_in_the_background(slow: RunningServer) -> None:
    with slow.openai() as client:
        promised = client.responses.create(model=MODEL, input="Hi", background=True, max_output_tokens=60)
        assert promised.status == "queued"
        assert error_of(slow.http.post(PATH, json={"input": "x", "previous_response_id": promised.id}), 400)
        response = wait_for(client, promised.id, lambda response: response.status not in ("queued", "in_progress"))
        assert (response.status, response.usage.output_tokens, response.background) == ("incomplete", 60, True)
        assert response.output_text == TOKENIZER.decode((ANSWER * 3)[:60])
        assert client.responses.cancel(response.id) == response  # it has finished


def test_a_cancelled_answer(slow: RunningServer) -> None:
    with slow.openai() as client:
        promised = client.responses.create(model=MODEL, input="Hi", background=True)
        wait_for(client, promised.id, lambda response: bool(response.output))
        assert client.responses.cancel(promised.id).status == "cancelled"
        slow.wait_for_idle()
        assert client.responses.retrieve(promised.id).status == "cancelled"


def test_deleted(slow: RunningServer) -> None:
    """One that is finished, and one in the background, which ends."""
    with slow.openai() as client:
        done = client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
        running = client.responses.create(model=MODEL, input="Hi", background=True)
        for response_id in (done.id, running.id):
            answer = slow.http.delete(f"{PATH}/{response_id}")
            assert answer.json() == {"id": response_id, "object": "response", "deleted": True}
            assert error_of(slow.http.get(f"{PATH}/{response_id}"), 404)["code"] == "response_not_found"
            assert error_of(slow.http.delete(f"{PATH}/{response_id}"), 404)["code"] == "response_not_found"
        slow.wait_for_idle()
        assert slow.app.state.quire.responses._stored.keys().isdisjoint({done.id, running.id})
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model=MODEL, input="Go on", previous_response_id=done.id)
        assert "DELETE" in slow.http.put(f"{PATH}/{done.id}").headers["allow"]


def test_events_of_the_background(slow: RunningServer) -> None:
    """They go on without the client, and are read again from any of them on."""
    with slow.openai() as client:
        stream = client.responses.create(model=MODEL, input="Hi", background=True, stream=True, max_output_tokens=30)
        response_id = next(stream).response.id
        stream.close()
        whole = list(client.responses.retrieve(response_id, stream=True))
        order = [ORDER[0], "response.queued", *ORDER[1:-1], "response.incomplete"]
        assert list(dict.fromkeys(event.type for event in whole)) == order
        assert [event.response.status for event in whole[:3]] == ["queued", "queued", "in_progress"]
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=4))
        assert rest == whole[5:]
        for wrong in ("-1", "x", "1.5", "0" * 5000, "1" * 10):
            error = error_of(slow.http.get(f"{PATH}/{response_id}?stream=true&starting_after={wrong}"), 400)
            assert error["param"] == "starting_after"
        assert client.responses.retrieve(response_id).output_text == TOKENIZER.decode((ANSWER * 2)[:30])


def test_only_the_background_is_followed_and_cancelled(server: RunningServer, client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Hi")
    assert error_of(server.http.get(f"{PATH}/{response.id}?stream=true"), 400)["param"] == "stream"
    assert error_of(server.http.post(f"{PATH}/{response.id}/cancel"), 400)["param"] == "response_id"


@pytest.mark.parametrize("is_in_background", [False, True])
def test_an_engine_that_fails(is_in_background: bool) -> None:
    engine = EchoClient(ANSWER, step_seconds=0.02, max_model_len=MAX_MODEL_LEN)
    with RunningServer(engine) as server, server.openai() as client:
        stream = client.responses.create(model=MODEL, input="Hi", stream=True, background=is_in_background)
        response_id = next(stream).response.id
        server.run(server.client.die)
        *_, last = stream
        assert last.type == "response.failed"
        assert last.response.error.code == "server_error"
        assert client.responses.retrieve(response_id).status == "failed"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", None),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": MAX_MODEL_LEN}, "max_output_tokens", "context_length_exceeded"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", None),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text", None),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tools": FUNCTIONS}, "tools", "unsupported_field"),  # this server lets none be called
        ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input[0].content", "invalid_value"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id", "invalid_value"),
        ({"truncation": "auto"}, "truncation", "invalid_value"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_field"),
    ],
)
def test_refusals_name_the_field(server: RunningServer, fields, param, code) -> None:
    error = error_of(server.http.post(PATH, json={"input": "Hi", **fields}), 400)
    assert error["param"] == param
    assert code is None or error["code"] == code


def test_an_unknown_model(server: RunningServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.responses.create(model="gpt", input="Hi")


@pytest.fixture(scope="module")
def agent() -> Iterator[RunningServer]:
    """Thinks, says something, and calls a tool twice."""
    with answering(ANSWER_WITH_CALLS, enable_auto_tool_choice=True) as server:
        yield server


def asked(client: openai.OpenAI, is_streamed: bool, **fields: Any) -> Response:
    fields = {"model": MODEL, "input": "Will it rain?", "tools": FUNCTIONS, **fields}
    if not is_streamed:
        return client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        response = stream.get_final_response()
    check_items(events, response)
    return response


PARTS = {  # of an item: its events, and the field with the whole in a delta's end
    "reasoning": ("reasoning_text", "text"),
    "message": ("output_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
}


def check_items(events: list[Any], response: Response) -> None:
    """Each item is added, comes in pieces that join to the whole, and is done, before the next one."""
    for index, item in enumerate(response.output):
        name, whole = PARTS[item.type]
        own = [event for event in events if getattr(event, "output_index", None) == index]
        has_parts = item.type != "function_call"
        expected = [
            *("response.output_item.added", *["response.content_part.added"] * has_parts),
            *(f"response.{name}.delta", f"response.{name}.done"),
            *(*["response.content_part.done"] * has_parts, "response.output_item.done"),
        ]
        assert list(dict.fromkeys(event.type for event in own)) == expected
        deltas = "".join(event.delta for event in own if event.type.endswith(".delta"))
        (done,) = [event for event in own if event.type == f"response.{name}.done"]
        assert deltas == getattr(done, whole) == (item.content[0].text if has_parts else item.arguments)
        assert (own[-1].item.id, own[-1].item.status) == (item.id, item.status)


def shown(response: Response) -> list[tuple[str, ...]]:
    """The items of an answer, shortly."""
    found: list[tuple[str, ...]] = []
    for item in response.output:
        assert item.status == "completed"
        match item.type:
            case "function_call":
                found.append((item.type, item.name, item.arguments))
            case _:
                found.append((item.type, item.content[0].text))
    return found


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools_and_reasoning(agent: RunningServer, is_streamed: bool) -> None:
    with agent.openai() as client:
        response = asked(client, is_streamed)
        assert shown(response) == [
            ("reasoning", "Hm."),
            ("message", "I look."),
            ("function_call", "get_weather", '{"city": "Zürich", "days": 2}'),
            ("function_call", "get_weather", '{"city": "Zürich", "days": 3}'),
        ]
        assert (response.status, response.output_text, response.tool_choice) == ("completed", "I look.", "auto")
        assert [tool.name for tool in response.tools] == ["get_weather"]
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": f"sunny {number}"}
            for number, item in enumerate(response.output[2:])
        ]
        asked(client, False, input=results, previous_response_id=response.id)
        prompt = prompt_of(agent)
        assert prompt.startswith(
            "1 tools;<user>Will it rain?</><assistant>I look.get_weatherZürichget_weatherZürich</>"
        )
        assert prompt.endswith("<tool>sunny 0</><tool>sunny 1</><assistant>")
        history = [{"role": "user", "content": "Will it rain?"}, *(item.to_dict() for item in response.output)]
        asked(client, False, input=[*history, *results])
        assert prompt_of(agent) == prompt


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_tool_that_must_be_called(choice: Any, is_streamed: bool) -> None:
    text = (
        '{"city": "Bern"}' if isinstance(choice, dict) else '[{"name": "get_weather", "parameters": {"city": "Bern"}}]'
    )
    with answering(text) as server, server.openai() as client:
        response = asked(client, is_streamed, tool_choice=choice, parallel_tool_calls=False)
        assert shown(response) == [("function_call", "get_weather", '{"city": "Bern"}')]
        assert server.last_request().sampling_params.grammar is not None
        assert response.parallel_tool_calls is False


def test_a_call_that_is_cut(agent: RunningServer) -> None:
    with agent.openai() as client:
        response = client.responses.create(model=MODEL, input="Hi", tools=FUNCTIONS, max_output_tokens=50)
    assert (response.status, response.output[-1].type, response.output[-1].status) == (
        *("incomplete", "function_call"),
        "incomplete",
    )


def stored(number: int, text: str = "") -> StoredResponse:
    answer = ResponseObject(
        id=f"resp_{number}",
        created_at=0,
        status="completed",
        background=False,
        instructions=text,
        max_output_tokens=None,
        metadata={},
        model=MODEL,
        previous_response_id=None,
        reasoning=Reasoning(),
        store=True,
        temperature=1,
        text=TextConfig(),
        parallel_tool_calls=True,
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1,
    )
    return StoredResponse(answer, [])


def kept(store: ResponseStore) -> list[int]:
    return [int(name.removeprefix("resp_")) for name in store._stored]


async def test_the_memory_of_the_store_is_bounded() -> None:
    by_number = ResponseStore(max_responses=3)
    for number in range(5):
        by_number.keep(stored(number))
    assert kept(by_number) == [2, 3, 4]
    by_size = ResponseStore(max_bytes=10_000)
    for number in range(5):
        by_size.keep(stored(number, "x" * 4000))
    assert kept(by_size) == [3, 4]
    growing = stored(5)
    growing.run(asyncio.sleep(60))
    by_size.keep(growing)
    assert kept(by_size) == [3, 4, 5]
    for _ in range(20):
        growing.add_events(b"x" * 100 + b"\n\n")
        by_size.grow(growing, 102)
    assert kept(by_size) == [4, 5], "others leave while it grows"
    by_size.keep(growing)
    assert by_size._num_bytes == sum(each.measure() for each in by_size._stored.values())
    await growing.cancel()
    by_size.keep(stored(6, "x" * 20_000))
    assert kept(by_size) == []


def test_a_summary_of_the_reasoning_is_not_made(agent: RunningServer) -> None:
    """The request says so in its answer, and nothing is lost: all of the reasoning comes."""
    with agent.openai() as client:
        response = client.responses.with_raw_response.create(
            model=MODEL, input="Will it rain?", reasoning={"effort": "low", "summary": "auto"}
        )
        assert "reasoning.summary" in response.headers["x-quire-ignored-fields"]
        answer = response.parse()
        assert answer.reasoning is not None
        assert answer.reasoning.summary == "auto"
        reasoning = answer.output[0]
        assert isinstance(reasoning, ResponseReasoningItem)
        assert (reasoning.summary, shown(answer)[0]) == ([], ("reasoning", "Hm."))
    error = error_of(agent.http.post(PATH, json={"input": "Hi", "reasoning": {"summary": "none"}}), 400)
    assert error["param"] == "reasoning.summary"


THINK = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>", "analysis", "assistant")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("parser", "tags", "text", "thoughts"),
    [
        ("qwen3", THINK, "<think>Hm. 1 < 2</think>\n\nYes <think>", ["Hm. 1 < 2"]),
        ("qwen3", THINK, "<think>Hm. 1 < 2", ["Hm. 1 < 2<|im_end|>"]),
        ("qwen3", THINK, "Yes <think>Hm.</think>", []),
        ("deepseek_r1", THINK, "Hm.</think>Yes </think>", ["Hm."]),
        ("deepseek_r1", THINK, "<think>Hm.</think>Yes", ["Hm."]),
        (
            "openai_gptoss",
            HARMONY,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So?<|end|>"
            "<|start|>assistant<|channel|>final<|message|>The analysis<|return|>",
            ["Hm.", "So?"],
        ),
        ("qwen3", (), "<think>Hm.</think>Yes", []),  # the tags are texts, whose tokens are not counted
    ],
)
def test_tokens_of_the_reasoning(parser: str, tags: tuple[str, ...], text: str, thoughts: list[str], is_streamed: bool):
    """Those between the tags, if the tags are tokens."""
    backend = copy.deepcopy(TOKENIZER.backend)
    backend.add_tokens(list(tags))
    tokenizer = Tokenizer(backend, special_tokens=TOKENIZER.special_tokens)
    expected = sum(len(tokenizer.encode(thought, add_special_tokens=False)) for thought in thoughts)
    with answering(text, None, parser, tokenizer=tokenizer) as server, server.openai() as client:
        usage = asked(client, is_streamed, tools=[]).usage
    assert usage is not None
    assert usage.output_tokens_details.reasoning_tokens == expected
    assert usage.output_tokens == len(tokenizer.encode(text, add_special_tokens=False)) + 1
