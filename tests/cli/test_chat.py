"""`quire chat` as a command: its arguments choose the model, the question, and the request to a server."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.chat.model import Piece
from quire.cli import chat, client
from quire.cli.main import main
from quire.config import EngineConfig
from quire.errors import ConfigError

ANSWER = ('data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}', ": a comment",
          'data: {"choices": [{"delta": {"content": "Hi "}}]}', 'data:{"choices": [{"delta": {"content": "you"}}]}',
          'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}', 'data: {"choices": [], "usage": {}}',
          "data: [DONE]")  # fmt: skip


class Server(ThreadingHTTPServer):
    """Lists its models and streams `lines` as the answer; keeps the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.models: Any = {"data": [{"id": "first"}, {"id": "second"}]}
        self.lines: Sequence[str] = ANSWER
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send(json.dumps(self.server.models))

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._send("".join(line + "\n\n" for line in self.server.lines))

    def _send(self, text: str) -> None:
        self.server.keys.append(self.headers["authorization"])
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


class LocalModel:
    """Stands for the engine, and keeps the arguments of its start."""

    name = "local"

    def __init__(self) -> None:
        self.defaults: dict[str, Any] = {}
        self.config: EngineConfig | None = None
        self.asked: list[str] = []
        self.hangup: Any = None  # what a SIGHUP did while it answered

    def start(self, engine: EngineConfig, *rest: object) -> LocalModel:
        self.config = engine
        return self

    def answer(self, messages: Sequence[Mapping[str, str]], parameters: Mapping[str, Any]) -> Iterator[Piece]:
        self.asked.append(messages[-1]["content"])
        self.hangup = signal.getsignal(signal.SIGHUP)
        yield Piece("from here", "stop")


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> LocalModel:
    """In place of the engine; nobody answers at the default address, and standard input is empty."""
    model = LocalModel()
    monkeypatch.setattr(chat, "_engine", model.start)
    monkeypatch.setattr(client, "DEFAULT_URL", "http://127.0.0.1:1/v1")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    return model


def test_a_server_that_is_named(server: Server, local: LocalModel, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--system-prompt", "Be brief.", "--api-key", "sesame", "--set", "temperature=0", "--set", "stop=END")
    assert main(["chat", "--url", server.url, *words, "-q", "Hello?"]) == 0
    assert capsys.readouterr() == ("Hi you\n", "")
    (body,) = server.bodies
    assert (body["model"], body["stream"], body["temperature"], body["stop"]) == ("first", True, 0, "END")
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello?"},
    ]
    assert server.keys == ["Bearer sesame"] * 2
    assert local.config is None


@pytest.mark.parametrize("words", [["--model-name", "second"], ["second"]])
def test_a_model_of_the_server(words: list[str], server: Server) -> None:
    assert main(["run", *words, "--url", server.url, "-q", "Hello?"]) == 0
    assert [body["model"] for body in server.bodies] == ["second"]


def test_nobody_is_named(
    server: Server, local: LocalModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server at the default address if there is one, else the demo model; either is said."""
    assert main(["chat", "-q", "Hello?"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "from here\n"
    assert "no server answers" in captured.err
    assert "the bundled demo model answers" in captured.err
    assert local.config is not None
    assert local.config.model is None
    monkeypatch.setattr(client, "DEFAULT_URL", server.url)
    for models in ({"data": []}, ["a page"]):  # something else listens there
        server.models = models
        assert main(["chat", "-q", "Hello?"]) == 0
        assert capsys.readouterr().out == "from here\n"
    server.models = {"data": [{"id": "first"}]}
    assert main(["chat", "-q", "Hello?"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hi you\n"
    assert len(captured.err.splitlines()) == 1
    assert "answers" in captured.err


@pytest.mark.parametrize(("status", "fix"), [(401, "with --api-key, or set VLLM_API_KEY"), (503, "")])
def test_a_server_that_nobody_has_named_refuses(
    status: int, fix: str, server: Server, local: LocalModel, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Its error is shown, and no other model answers in its place; a 404 is something else at that address."""
    monkeypatch.setattr(client, "DEFAULT_URL", server.url)
    server.status, server.models = status, {"error": {"message": "Not you"}}
    assert main(["chat", "-q", "Hello?"]) == 1
    captured = capsys.readouterr()
    assert f"quire: Not you. Got {status}." in captured.err
    assert fix in captured.err
    assert "no server answers" not in captured.err
    assert (captured.out, local.config) == ("", None)
    server.status = 404
    assert main(["chat", "-q", "Hello?"]) == 0
    assert capsys.readouterr().out == "from here\n"


@pytest.mark.parametrize("words", [["some/model"], ["--model", "some/model"], ["--max-model-len", "1k"]])
def test_a_model_here(
    words: list[str], server: Server, local: LocalModel, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The default server is not asked."""
    monkeypatch.setattr(client, "DEFAULT_URL", server.url)
    assert main(["run", *words, "-q", "Hello?"]) == 0
    assert capsys.readouterr() == ("from here\n", "")
    assert server.keys == []
    assert local.config is not None
    assert (local.config.model or local.config.max_model_len) in ("some/model", 1000)


@pytest.mark.parametrize(
    ("words", "stdin", "question"),
    [
        (["m", "What", "is", "it?"], b"", "What is it?"),
        (["m", "What", "--seed", "1", "is", "it?"], b"", "What is it?"),
        (["--seed", "1", "m", "What is it?"], b"", "What is it?"),
        (["m"], b"What is it?\n", "What is it?"),
        (["m", "What is it?"], "a\n\nbé\n".encode(), "a\n\nbé\n\nWhat is it?"),
        (["m", "-q", "What is it?"], b"not read", "What is it?"),
    ],
)
def test_the_question(
    words: list[str], stdin: bytes, question: str, local: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    assert main(["run", *words]) == 0
    assert local.asked == [question]


@pytest.mark.parametrize(
    ("words", "stdin", "part"),
    [
        (["m"], b" \n", "There is no question"),
        (["m"], b"\xff", "Standard input is no text"),
        (["m", "-q", "x", "--set", "temperature"], b"", "--set has no value"),
        (["m", "-q", "x", "--set", "temperature=9"], b"", "temperature is out of range"),
        (["--url", "localhost:8000", "-q", "x"], b"", "The URL is not one of an API"),
        (["--url", "http://h:port/v1", "-q", "x"], b"", "The URL is not one of an API"),
        (["a", "--model-name", "b", "-q", "x"], b"", "Two models are named"),
        (["--url", "http://h/v1", "--max-model-len", "1k", "-q", "x"], b"", "--max-model-len set up a model"),
    ],
)
def test_wrong_usage(
    words: list[str], stdin: bytes, part: str, local: LocalModel, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    assert main(["chat", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"quire: {part}")
    assert (captured.out, local.asked) == ("", [])


@pytest.mark.parametrize(
    ("status", "lines", "part"),
    [
        (400, ['{"error": {"message": "No such \\u001b[31mmodel"}}'], "quire: No such \\x1b[31mmodel. Got 400."),
        (500, ["<html>"], "quire: The server refused the request. Got 500."),
        (200, ['data: {"error": {"message": "it broke"}}'], "quire: it broke."),
        (200, ["data: {"], "quire: The server's stream has a line that is not a JSON object"),
        (200, ["data: " + "[" * 100_000], "quire: The server's stream has a line that is not a JSON object"),
        (200, ["data: [1]"], "quire: The server's stream has a line that is not a JSON object"),
        (
            200,
            ['data: {"choices": [{"text": "x"}]}'],
            "quire: The server's stream has an object that is not a part of a chat",
        ),
        (200, ['data: {"choices": 5}'], "quire: The server's stream has an object that is not a part of a chat"),
    ],
)
def test_what_a_server_may_say(
    status: int, lines: list[str], part: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and nothing that a terminal would obey."""
    server.status, server.lines = status, lines
    assert main(["chat", "--url", server.url, "--model-name", "m", "-q", "Hello?"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(part), error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_nohup(before: signal.Handlers, local: LocalModel) -> None:
    """A terminal that is closed ends a chat, unless the chat shall outlive it."""
    earlier = signal.signal(signal.SIGHUP, before)
    try:
        assert main(["chat", "some/model", "-q", "Hello?"]) == 0
        assert (local.hangup is signal.SIG_IGN) == (before is signal.SIG_IGN)
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_a_chat_plans_memory_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is planned for one conversation, unless a flag says otherwise."""
    monkeypatch.undo()
    seen: list[int | None] = []

    class NoModel:
        def __init__(self, config: EngineConfig, *rest: object) -> None:
            seen.append(config.max_num_seqs)
            raise ConfigError("not started")

    monkeypatch.setattr("quire.chat.engine.EngineModel", NoModel)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    for flags in ([], ["--max-num-seqs", "3"]):
        assert main(["chat", "some/model", *flags, "-q", "Hello?"]) == 2
    assert seen == [1, 3]
