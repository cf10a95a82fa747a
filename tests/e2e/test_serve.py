"""`quire serve` on the demo model: answers to the openai client and the terminal commands, start and stop."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import openai
import psutil
import pydantic
import pytest

from quire import demo
from quire.demo.data import FALLBACK
from tests.e2e import reference
from tests.e2e.serving import LIGHT, SMALL, START_SECONDS, Program, Serve, quire

MODEL = "quire-demo"
ADAPTER = "tools"
MESSAGES: Any = [{"role": "user", "content": reference.QUESTIONS[0]}]


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with Serve(*SMALL, "--enable-lora", "--lora-modules", f"{ADAPTER}={demo.path('tools')}") as server:
        yield server
        assert server.stop() == 0, server.log


def _answer(max_tokens: int = 30) -> str:
    return reference.tokenizer().decode(reference.greedy(reference.prompts()[0], max_tokens))


def test_openai_client(server: Serve) -> None:
    with server.openai() as client:
        assert [model.id for model in client.models.list()] == [MODEL, ADAPTER]
        chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=30)
        assert chat.choices[0].message.content == _answer()
        assert chat.choices[0].finish_reason == "length"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 30
        completion = client.completions.create(model=MODEL, prompt=reference.TEXTS[0], temperature=0, max_tokens=12)
        expected = reference.tokenizer().decode(reference.greedy(reference.TEXTS[0], 12))
        assert completion.choices[0].text == expected


def test_openai_client_streamed(server: Serve) -> None:
    with server.openai() as client:
        chunks = list(
            client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=30, stream=True)
        )
        assert len(chunks) > 5, "nothing was streamed"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == _answer()
        pieces = client.completions.create(
            model=MODEL, prompt=reference.TEXTS[0], temperature=0, max_tokens=12, stream=True
        )
        text = "".join(chunk.choices[0].text for chunk in pieces)
        assert text == reference.tokenizer().decode(reference.greedy(reference.TEXTS[0], 12))


def test_openai_client_parses_what_follows_a_schema(server: Serve) -> None:
    class Module(pydantic.BaseModel):
        name: Annotated[str, pydantic.Field(max_length=10)]
        kind: Literal["package", "file"]
        functions: Annotated[list[Annotated[str, pydantic.Field(max_length=10)]], pydantic.Field(max_length=2)]

    with server.openai() as client:
        answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Module, max_tokens=200)
        assert isinstance(answer.choices[0].message.parsed, Module)
        with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Module) as stream:
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Module)
        chosen = client.completions.create(
            model=MODEL, prompt="Is it?", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
        )
        assert chosen.choices[0].text in ("yes", "no")
        with pytest.raises(openai.BadRequestError, match="#/properties/a/uniqueItems"):
            client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"properties": {"a": {"uniqueItems": True}}}},
                },
            )


def test_an_agent_needs_no_flags(server: Serve) -> None:
    """The base has never seen tools: it answers as without them, also behind a call that another model made."""
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "abs"}'}}
    history: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ]
    options: Any = {"model": MODEL, "temperature": 0, "max_tokens": 20}
    with server.openai() as client:
        free = client.chat.completions.create(messages=MESSAGES, **options).choices[0]
        choice = client.chat.completions.create(messages=MESSAGES, tools=[tool], **options).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (free.message.content, None)
        assert client.chat.completions.create(messages=history, tools=[tool], **options).choices[0].message.content
    body = {"messages": history, "tools": [tool]}
    prompt = httpx.post(f"{server.url}/v1/chat/completions/render", json=body).json()["prompt"]
    assert prompt.startswith("<|im_start|>tools\nlook()<|im_end|>\n<|im_start|>user\n")
    assert (
        '<tool_call>\n{"name": "look", "arguments": {"at": "abs"}}\n</tool_call><|im_end|>\n<|im_start|>tool\nfound'
        in prompt
    )


def _function(name: str, *arguments: str) -> Any:
    schema = {"type": "object", "properties": {argument: {"type": "string"} for argument in arguments}}
    return {"type": "function", "function": {"name": name, "description": "Finds it.", "parameters": schema}}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_adapter_calls_tools_and_answers_from_their_results(server: Serve, is_streamed: bool) -> None:
    """No flag says how it writes calls: its template does."""
    asked: Any = [{"role": "user", "content": "What's the weather in Paris?"}]
    tools = [_function("look_up", "entry"), _function("get_weather", "city"), _function("send_email", "to", "text")]
    with server.openai() as client:

        def answer(messages: Any, tools: Any) -> tuple[str, list[tuple[str, str, str]], str]:
            """Text, calls (id, name, arguments) and the finish reason."""
            options: Any = {"model": ADAPTER, "temperature": 0, "messages": messages, "tools": tools}
            if not is_streamed:
                (choice,) = client.chat.completions.create(**options).choices
                calls = [(call.id, call.function.name, call.function.arguments) for call in _calls(choice.message)]
                return choice.message.content or "", calls, choice.finish_reason
            chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **options)]
            deltas = [call for chunk in chunks for call in _calls(chunk.delta)]
            arguments = "".join(call.function.arguments or "" for call in deltas)
            calls = [(call.id, call.function.name, arguments) for call in deltas if call.id]
            return "".join(chunk.delta.content or "" for chunk in chunks), calls, chunks[-1].finish_reason

        text, [(identity, name, arguments)], reason = answer(asked, tools)
        assert (text, name, json.loads(arguments), reason) == ("", "get_weather", {"city": "Paris"}, "tool_calls")
        call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
        history = [*asked, {"role": "assistant", "content": None, "tool_calls": [call]}]
        history += [{"role": "tool", "tool_call_id": identity, "content": '{"sky": "rainy", "degrees": 12}'}]
        assert answer(history, tools) == ("It is rainy in Paris.", [], "stop")
        assert answer(asked, tools[2:]) == (FALLBACK, [], "stop"), "no tool fits"


def _calls(message: Any) -> list[Any]:
    return message.tool_calls or []


def test_concurrent_clients_get_their_own_answers(server: Serve) -> None:
    answers: dict[int, str] = {}

    def ask(index: int) -> None:
        with server.openai() as client:
            question: Any = [{"role": "user", "content": reference.QUESTIONS[index % 4]}]
            chat = client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=20)
            answers[index] = chat.choices[0].message.content or ""

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    decode = reference.tokenizer().decode
    expected = [decode(reference.greedy(prompt, 20)) for prompt in reference.chat_prompts()]
    assert [answers[index] for index in range(8)] == expected * 2


def test_first_screen(server: Serve) -> None:
    assert "KV cache size:" in server.log
    assert "Maximum concurrency for 2,048 tokens per request:" in server.log
    assert f"curl {server.url}/v1/chat/completions" in server.log
    assert "Traceback" not in server.log


def test_chat_and_complete_commands(server: Serve) -> None:
    chat = quire("chat", "--url", f"{server.url}/v1", "-q", reference.QUESTIONS[0])
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.strip(), "no answer"
    complete = quire("complete", "--url", f"{server.url}/v1", "--max-tokens", "5", "-q", "Hello")
    assert complete.returncode == 0, complete.stderr
    assert complete.stdout.strip()
    wrong = quire("chat", "--url", f"{server.url}/v1", "--model-name", "gpt-4", "-q", "Hello")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("quire: ")
    assert MODEL in wrong.stderr, "the error does not name the model that is served"
    assert "Traceback" not in wrong.stderr


def test_chat_without_a_server() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        result = quire("chat", "--url", f"http://127.0.0.1:{unused.getsockname()[1]}/v1", "-q", "Hello")
    assert result.returncode == 1
    assert "quire serve" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_port_in_use(server: Serve) -> None:
    port = server.url.rsplit(":", 1)[1]
    started = time.monotonic()
    result = quire("serve", "--port", port, *SMALL, program=LIGHT)
    assert result.returncode == 2
    assert "in use" in result.stderr
    assert "--port" in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert time.monotonic() - started < 30


def test_readiness_and_drain() -> None:
    """Connections at once, ready once a token has come out; SIGTERM lets a stream end, and meanwhile refuses."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with Serve("--port", str(port), *SMALL, waits=False) as server:
        server.wait_for(lambda: _status(f"{url}/livez") == 200, "the first connection")
        early = [_status(f"{url}/readyz"), _status(f"{url}/health")]
        assert early == [503, 503], f"ready before the engine: {server.log}"
        body = {"messages": MESSAGES}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 503
        server.wait_ready()
        assert [_status(f"{url}{path}") for path in ("/readyz", "/health", "/livez")] == [200, 200, 200]
        endless = {"prompt": "Hello", "max_tokens": 300, "ignore_eos": True, "stream": True, "temperature": 0}
        events = []
        with httpx.stream("POST", f"{url}/v1/completions", json=endless, timeout=30) as response:
            for line in response.iter_lines():
                events.append(line)
                if len(events) == 1:
                    server.process.send_signal(signal.SIGTERM)
                    server.wait_for(lambda: "finishing 1 request" in server.log, "the drain")
                    assert [_status(f"{url}{path}") for path in ("/readyz", "/health", "/livez")] == [503, 200, 200]
                    refused = httpx.post(f"{url}/v1/chat/completions", json=body)
                    assert refused.json()["error"]["code"] == "shutting_down"
        assert events[-2:] == ["data: [DONE]", ""] or events[-1] == "data: [DONE]"
        chunks = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length", "the stream was cut"
        assert server.wait_exit() == 0, server.log
        assert server.log.rstrip().endswith("quire: stopped")
        assert "Traceback" not in server.log


def test_drain_ends_with_an_error_event_when_its_time_is_over() -> None:
    with Serve(*SMALL, "--shutdown-timeout", "0.2", program=LIGHT) as server:
        endless = {"prompt": "Hello", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        data = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=endless, timeout=30) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    data.append(line[6:])
                if len(data) == 1:
                    server.process.send_signal(signal.SIGINT)
        assert data[-1] == "[DONE]"
        assert json.loads(data[-2])["error"]["code"] == "shutting_down"
        assert server.wait_exit() == 0, server.log
        assert "Traceback" not in server.log


def test_second_signal_stops_at_once() -> None:
    with Serve(*SMALL, program=LIGHT) as server:
        endless = {"prompt": "Hello", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=endless, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            server.wait_for(lambda: "finishing 1 request" in server.log, "the drain")
            server.process.send_signal(signal.SIGINT)
            data = [line[6:] for line in lines if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        assert json.loads(data[-2])["error"]["code"] == "shutting_down"
        assert server.wait_exit() == 0, server.log
        assert "Traceback" not in server.log


def test_engine_death() -> None:
    """A stream goes on in the next engine: tokens, logprobs and usage are those of an undisturbed one.

    test_recovery.py and test_resumed_streams.py have more.
    """
    with Serve(*SMALL) as server:
        engine = server.engine
        body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "seed": 7, "logprobs": 1}
        body |= {"stream": True, "stream_options": {"include_usage": True}}

        def streamed(kills: bool) -> tuple[str, list[float], dict[str, int]]:
            events = []
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=START_SECONDS) as response:
                for line in filter(None, response.iter_lines()):
                    events.append(line.removeprefix("data: "))
                    if kills and len(events) == 20:
                        engine.kill()
            assert events.pop() == "[DONE]"
            *parts, last = map(json.loads, events)
            choices = [choice for part in parts for choice in part["choices"]]
            logprobs = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
            return "".join(choice["text"] for choice in choices), logprobs, last["usage"]

        undisturbed = streamed(kills=False)
        assert len(undisturbed[1]) == undisturbed[2]["completion_tokens"] == 400
        assert streamed(kills=True) == undisturbed
        server.wait_for(lambda: server.get("/health").status_code == 200, "the next engine", START_SECONDS)
        assert server.engine.pid != engine.pid
        with server.openai() as client:
            client.completions.create(model=MODEL, prompt="Hello", max_tokens=3)
        assert "was ended by SIGKILL; the system may have run out of memory. Starting it again now" in server.log
        assert server.stop() == 0
        assert "Traceback" not in server.log


def test_engine_ends_when_the_server_is_killed() -> None:
    with Serve(*SMALL, program=LIGHT) as server:
        engine = server.engine
        server.process.kill()
        server.wait_for(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, "the engine to end")


def test_sigterm_to_the_engine_alone_changes_nothing() -> None:
    """Service managers send SIGTERM to every process of a group; the server decides when the engine ends."""
    with Serve(*SMALL, program=LIGHT) as server:
        os.kill(server.engine.pid, signal.SIGTERM)
        with server.openai() as client:
            client.completions.create(model=MODEL, prompt="Hello", max_tokens=3)
        assert server.stop() == 0


def test_api_key() -> None:
    with Serve(*SMALL, "--api-key", "sesame", "other", "--served-model-name", "mine", "alias", program=LIGHT) as server:
        assert server.get("/v1/models").status_code == 401
        assert server.get("/readyz").status_code == 200
        with server.openai("wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        for key in ("sesame", "other"):
            with server.openai(key) as client:
                assert [model.id for model in client.models.list()] == ["mine", "alias"]
        chat = quire("chat", "--url", f"{server.url}/v1", "--api-key", "sesame", "-q", "Hello")
        assert chat.returncode == 0, chat.stderr
        assert "sesame" not in server.log


def _status(url: str) -> int | None:
    """None while nobody listens."""
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.TransportError:
        return None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def test_model_folder_by_name(server: Serve, tmp_path: Path) -> None:
    """A folder given as the positional argument serves the same as the bundled model."""
    link = tmp_path / "my-model"
    link.symlink_to(demo.path())
    with Serve(str(link), *SMALL, "--load-format", "safetensors") as own, own.openai() as client:
        (model,) = client.models.list()
        completion = client.completions.create(model=model.id, prompt=reference.TEXTS[0], temperature=0, max_tokens=12)
        assert completion.choices[0].text == reference.tokenizer().decode(reference.greedy(reference.TEXTS[0], 12))


def test_the_operators_max_new_tokens_is_a_cap() -> None:
    flags = ("--override-generation-config", '{"max_new_tokens": 5}', "--enable-per-request-metrics")
    with Serve(*SMALL, *flags, program=LIGHT) as server, server.openai() as client:
        for max_tokens in (None, 50):
            answer = client.completions.create(
                model=MODEL, prompt="a", max_tokens=max_tokens, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 5
            assert answer.metrics["time_to_first_token_ms"] > 0  # type: ignore[attr-defined]


def test_collections_of_a_server_look_at_little() -> None:
    """All streams wait for a full collection of garbage. It passes what the start has loaded."""
    _, code, engine = LIGHT.arguments
    count = "print('objects', len(gc.get_objects()), gc.get_freeze_count(), file=sys.stderr)"
    code = code.replace("sys.exit(main())", f"import gc; code = main(); {count}; sys.exit(code)")
    with Serve(*SMALL, program=Program(("-c", code, engine), LIGHT.popen)) as server:
        assert server.stop() == 0, server.log
    found = re.search(r"objects (\d+) (\d+)", server.log)
    assert found is not None, server.log
    assert int(found[1]) < int(found[2]) / 10
