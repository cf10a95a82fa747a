"""Probes tell the truth about start, work, hanging and end; and the small routes."""

from __future__ import annotations

import socket
import time

import httpx
import pytest

from quire import __version__
from quire.errors import ConfigError
from quire.frontend.echo_client import EchoClient
from quire.messages import EngineProgress
from quire.server.state import AppSettings
from tests.server.serving import MAX_MODEL_LEN, MODEL, RunningServer


def test_start():
    client = EchoClient(is_ready=False, max_model_len=1024)
    with RunningServer(client, waits_for_engine=False) as server:
        assert server.http.get("/livez").status_code == 200
        assert server.http.get("/readyz").json()["error"]["code"] == "not_ready"
        server.run(lambda: client.push(EngineProgress("load", 0.25, "model.safetensors")))
        server.wait_for(lambda: server.engine.progress is not None, "the progress message")
        response = server.http.get("/readyz")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "not_ready"
        assert {key: response.json()[key] for key in ("phase", "fraction", "detail")} == {
            "phase": "load",
            "fraction": 0.25,
            "detail": "model.safetensors",
        }
        assert response.headers["retry-after"]
        assert server.http.get("/health").status_code == 503
        refused = server.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert refused.headers["retry-after"]
        assert "max_model_len" not in server.http.get("/v1/models").json()["data"][0]
        server.run(client.make_ready)
        server.wait_for(lambda: server.engine.is_ready, "the engine")
        assert server.http.get("/readyz").status_code == 200
        assert server.http.get("/health").status_code == 200
        assert server.chat(max_tokens=1).status_code == 200
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 1024


def test_why_an_engine_was_lost_is_told_to_those_with_a_key():
    """It names processes and machines."""
    with RunningServer(EchoClient(is_ready=False), waits_for_engine=False, api_keys=("key",)) as server:
        server.run(lambda: server.client.push(EngineProgress("load", 0.25)))
        server.wait_for(lambda: server.engine.progress is not None, "the progress message")
        server.engine.replicas[0].failure = "Rank 1 of 2 (process 7 on here) hangs"
        for path in ("/health", "/readyz"):
            assert server.http.get(path).json()["failure"] == "Rank 1 of 2 (process 7 on here) hangs"
            assert "failure" not in httpx.get(server.url + path).json()


def test_failed_start():
    client = EchoClient(is_ready=False)
    with RunningServer(client, waits_for_engine=False) as server:
        server.run(lambda: client.die("The weights are missing"))
        server.wait_for(lambda: server.engine.error is not None, "the failure")
        response = server.http.get("/readyz")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"
        assert "The weights are missing" in response.json()["error"]["message"]


def test_stuck_engine_is_not_healthy():
    offset = 0.0
    client = EchoClient(None)
    with RunningServer(client, clock=lambda: time.monotonic() + offset) as server:
        assert server.chat(max_tokens=2).status_code == 200
        offset = 1000.0
        assert server.http.get("/health").status_code == 200, "an idle engine is healthy"
        server.run(lambda: setattr(client, "is_paused", True))
        with _Unanswered(server):
            assert server.http.get("/health").status_code == 200
            offset = 2000.0
            response = server.http.get("/health")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
            assert server.http.get("/readyz").status_code == 200


class _Unanswered:
    """A request that waits in the engine."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server

    def __enter__(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self._server.port))
        self._socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n"
            b'{"prompt": "x"}'
        )
        self._server.wait_for(lambda: self._server.client.num_requests == 1, "the request")

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()


def test_models(server):
    models = server.openai().models.list().data
    assert [model.id for model in models] == [MODEL, "alias"]
    assert models[0].object == "model"
    card = server.http.get("/v1/models").json()["data"][0]
    assert (card["max_model_len"], card["root"], card["parent"]) == (MAX_MODEL_LEN, MODEL, None)
    assert server.openai().models.retrieve("alias").id == "alias"


def test_version(server):
    assert server.http.get("/version").json() == {"version": __version__}


def test_a_server_needs_a_name():
    with pytest.raises(ConfigError, match="name"):
        AppSettings(())


def test_invalid_template_is_told_at_start():
    with pytest.raises(ConfigError, match="template"):
        RunningServer(chat_template="{% if %}")
