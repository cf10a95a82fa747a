"""Every error code has a section in docs/errors.md and a request or call here that provokes it; there are no others."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

import quire.cli
from quire.cli.client import Client
from quire.config import ServerConfig
from quire.errors import (
    AdapterError,
    CompilerLostError,
    ConfigError,
    ConstraintError,
    EngineRestartedError,
    ModelNotFoundError,
    OutOfMemoryError,
    QueueFullError,
    QuireError,
    RendererLostError,
    VocabularyError,
)
from quire.frontend.admission import Admission
from quire.frontend.echo_client import EchoClient
from quire.lora.adapter import AdapterFile
from quire.lora.adapter_config import parse_config
from quire.lora.loader import AdapterLoader
from quire.lora.paths import allowed_folder
from quire.messages import EngineFailed, SetLimits
from quire.model_config import load_model_config
from quire.server.errors import HTTP_CODES, HttpError
from quire.server.http_protocol import ConnectionLimits
from quire.server.limits import Limits
from tests.frontend.test_admission import record
from tests.server.serving import RunningServer
from tests.server.test_guard import ask

DOCUMENT = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
SECTIONS = re.split(r"^## ", DOCUMENT, flags=re.MULTILINE)[1:]
JSON = {"content-type": "application/json"}


def all_codes() -> set[str]:
    for module in pkgutil.iter_modules(quire.cli.__path__):
        importlib.import_module(f"quire.cli.{module.name}")
    kinds, todo = set(), [QuireError]
    while todo:
        kind = todo.pop()
        kinds.add(kind)
        todo += kind.__subclasses__()
    return {kind.code for kind in kinds if kind is not HttpError} | set(HTTP_CODES)


def code_of(answer: httpx.Response | bytes) -> str:
    if isinstance(answer, bytes):
        answer = httpx.Response(int(answer.split()[1]), content=answer.partition(b"\r\n\r\n")[2])
    code: str = answer.json()["error"]["code"]
    assert HTTP_CODES.get(code, answer.status_code) == answer.status_code
    return code


# One line per code: what a client sends to a running server.
REQUESTS: dict[str, Callable[[RunningServer], httpx.Response | bytes]] = {
    "invalid_value": lambda server: server.chat(temperature=9),
    "unsupported_field": lambda server: server.chat(guided_json={}),
    "context_length_exceeded": lambda server: server.complete(max_tokens=10**6),
    "model_not_found": lambda server: server.chat(model="gpt-4"),
    "unknown_route": lambda server: server.http.get("/nothing"),
    "request_not_found": lambda server: server.http.get("/v1/requests/x/timeline"),
    "response_not_found": lambda server: server.http.get("/v1/responses/x"),
    "method_not_allowed": lambda server: server.http.get("/v1/completions"),
    "unsupported_media_type": lambda server: server.http.post("/v1/completions", content=b"{}"),
    "host_not_allowed": lambda server: server.http.get("/version", headers={"host": "evil.example"}),
    "invalid_api_key": lambda server: httpx.get(f"{server.url}/version"),
    "body_too_large": lambda server: server.http.post("/v1/completions", content=b"x" * 70_000, headers=JSON),
    "cors_refused": lambda server: server.http.request(
        "OPTIONS", "/version", headers={"origin": "https://b", "access-control-request-method": "GET"}
    ),
    "body_timeout": lambda server: ask(
        server,
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer key\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: 9\r\n\r\n{",
    ),
    "bad_http": lambda server: ask(server, b"BREW / HTTP/1.1\r\n\r\n"),
    "headers_timeout": lambda server: ask(server, b"GET / HTTP/1.1\r\nhost:"),
    "headers_too_large": lambda server: ask(server, b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000 + b"\r\n\r\n"),
}


@pytest.fixture(scope="module")
def strict():
    with RunningServer(
        EchoClient(None, max_model_len=2048),
        api_keys=("key",),
        allowed_hosts=("localhost", "127.0.0.1"),
        allowed_origins=("https://a",),
        limits=Limits(max_body_bytes=65_000, body_timeout_seconds=0.1),
        connection_limits=ConnectionLimits(header_seconds=0.2),
    ) as server:
        yield server


@pytest.mark.parametrize("code", REQUESTS)
def test_requests(strict, code):
    assert code_of(REQUESTS[code](strict)) == code


def metrics_disabled() -> str:
    with RunningServer() as server:
        server.run(lambda: setattr(server.app.state.quire, "metrics", None))
        return code_of(server.http.get("/metrics"))


def queue_full() -> str:
    client = EchoClient(None, error_of=lambda request: QueueFullError("Full"))
    with RunningServer(client) as server:
        return code_of(server.chat())


def not_ready() -> str:
    with RunningServer(EchoClient(None, is_ready=False), waits_for_engine=False) as server:
        return code_of(server.chat())


def engine_dead() -> str:
    client = EchoClient(None)
    with RunningServer(client) as server:
        server.run(client.die)
        server.wait_for(lambda: server.engine.error is not None, "the engine's death to be noticed")
        return code_of(server.chat())


def shutting_down() -> str:
    with RunningServer() as server:
        server.app.state.quire.is_draining = True
        return code_of(server.chat())


def engine_restarted() -> str:
    client = EchoClient(None, error_of=lambda request: EngineRestartedError("The engine failed"))
    with RunningServer(client) as server:
        return code_of(server.chat())


def out_of_memory() -> str:
    client = EchoClient(None, error_of=lambda request: OutOfMemoryError("No memory left"))
    with RunningServer(client) as server:
        return code_of(server.chat())


def constraint_failed() -> str:
    client = EchoClient(None, error_of=lambda request: ConstraintError("No token is left"))
    with RunningServer(client) as server:
        answer = server.chat()
        assert answer.status_code == 400
        return code_of(answer)


def renderer_lost() -> str:
    async def render(asked: object) -> str:
        raise RendererLostError("The process that renders chats ended")

    with RunningServer() as server:
        server.run(lambda: setattr(server.app.state.quire.renderer, "render", render))
        return code_of(server.chat())


def compiler_lost() -> str:
    async def text(asked: object) -> str:
        raise CompilerLostError("The process that compiles constraints ended")

    with RunningServer() as server:
        server.run(lambda: setattr(server.engine.grammars, "grammar", text))
        return code_of(server.chat(response_format={"type": "json_object"}))


def no_constraints() -> str:
    async def text(asked: object) -> str:
        raise VocabularyError("The tokenizer of this model cannot be used for constraints")

    with RunningServer() as server:
        server.run(lambda: setattr(server.engine.grammars, "grammar", text))
        return code_of(server.chat(response_format={"type": "json_object"}))


def refuse_late(admission: Admission) -> None:
    """As if a step of two seconds ran."""
    admission.on_step(record(1, 0, predicted_seconds=2.0))
    admission.check()


def ttft_target() -> str:
    with RunningServer() as server:
        admission = server.engine.replicas[0].admission
        admission.on_limits(SetLimits(slo_ttft=1.0))
        server.run(lambda: setattr(server.engine.replicas[0], "check_room", lambda *_: refuse_late(admission)))
        return code_of(server.chat())


def internal_error() -> str:
    with RunningServer() as server:
        server.run(lambda: setattr(server.engine, "add_request", None))
        return code_of(server.chat())


def failed_start(code: str) -> str:
    """An error of the engine process arrives with the same code."""
    with RunningServer(EchoClient(None, is_ready=False), waits_for_engine=False) as server:
        server.run(lambda: server.client.push(EngineFailed("It cannot start", code)))
        server.wait_for(lambda: server.engine.error is not None, "the failed start to be noticed")
        return server.engine.error.code


def bad_config() -> str:
    with pytest.raises(ConfigError) as error:
        ServerConfig(port=-1)
    return error.value.code


def bad_model_config() -> str:
    with pytest.raises(ConfigError) as error:
        load_model_config(Path(__file__).parent)
    return error.value.code


def client_of(url: str, model: str | None) -> Client:
    return Client(url, model=model)


def server_unreachable() -> str:
    with pytest.raises(QuireError) as error:
        client_of("http://127.0.0.1:9/v1", None)
    return error.value.code


def server_error() -> str:
    with RunningServer() as server, pytest.raises(QuireError) as error:
        list(client_of(f"{server.url}/v1", "no-such-model").stream("/completions", {"prompt": "a"}))
    return error.value.code


def bad_adapter() -> str:
    with pytest.raises(QuireError) as error:
        parse_config(b"[]")
    return error.value.code


def adapter_not_found() -> str:
    with pytest.raises(QuireError) as error:
        allowed_folder("../secret", [Path(__file__).parent])
    return error.value.code


def adapter_changed() -> str:
    def gone(folder: Path) -> AbstractContextManager[AdapterFile]:
        raise AdapterError("The adapter has no adapter_model.safetensors")

    loader = AdapterLoader(gone, lambda file: file)
    error = loader.load(Path(), "digest").exception()
    assert isinstance(error, QuireError)
    return error.code


CALLS: dict[str, Callable[[], str]] = {
    "metrics_disabled": metrics_disabled,
    "constraint_failed": constraint_failed,
    "queue_full": queue_full,
    "ttft_target": ttft_target,
    "not_ready": not_ready,
    "engine_dead": engine_dead,
    "engine_restarted": engine_restarted,
    "shutting_down": shutting_down,
    "out_of_memory": out_of_memory,
    "renderer_lost": renderer_lost,
    "compiler_lost": compiler_lost,
    "no_constraints": no_constraints,
    "bad_adapter": bad_adapter,
    "adapter_not_found": adapter_not_found,
    "adapter_changed": adapter_changed,
    "internal_error": internal_error,
    "bad_config": bad_config,
    "bad_model_config": bad_model_config,
    "bad_weights": lambda: failed_start("bad_weights"),
    "out_of_memory_plan": lambda: failed_start("out_of_memory_plan"),
    "server_unreachable": server_unreachable,
    "server_error": server_error,
}


@pytest.mark.parametrize("code", CALLS)
def test_calls(code):
    assert CALLS[code]() == code


def test_every_code_is_provoked_here():
    assert {*REQUESTS, *CALLS} == all_codes()


def test_every_code_has_a_section():
    titles = [section.split("\n", 1)[0].strip("`") for section in SECTIONS]
    assert len(titles) == len(set(titles))
    assert set(titles) == all_codes()
    for section in SECTIONS:
        assert "Fix:" in section or "see the server's log" in section, f"no way out: {section[:60]}"


def test_http_statuses_are_those_of_the_document():
    statuses = {section.split("`")[1]: re.search(r"\n\n(\d{3}): ", section) for section in SECTIONS}
    for code, status in HTTP_CODES.items():
        assert statuses[code] is not None, code
        assert int(statuses[code][1]) == status, code
    assert int(statuses["model_not_found"][1]) == ModelNotFoundError.status


def test_a_code_that_is_not_in_the_table_cannot_be_raised():
    with pytest.raises(AssertionError):
        HttpError(404, "new_code", "Something")
