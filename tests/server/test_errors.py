"""Errors have OpenAI's shape, name the field, show nothing internal, and leave the server healthy."""

from __future__ import annotations

import gzip
import json
import socket
import threading

import openai
import pytest

from quire.errors import EngineDeadError, InvalidRequestError
from quire.frontend.echo_client import EchoClient
from quire.messages import AddRequest
from quire.server.limits import Limits
from tests.server.serving import LEAK, MODEL, TEXT, RunningServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
JSON = {"content-type": "application/json"}


def error_of(response, status):
    """The error object, checked for its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    is_anthropic = response.request.url.path.startswith("/v1/messages")
    assert set(response.json()) == {"error", "type"} if is_anthropic else {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


def test_unknown_routes_and_wrong_methods(server):
    assert error_of(server.http.get("/v1/nothing"), 404)["code"] == "unknown_route"
    response = server.http.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    error_of(server.http.post("/v1/models", json={}), 405)
    both = server.http.delete("/v1/config")
    assert set(both.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}
    assert "POST" in error_of(both, 405)["message"]
    error_of(server.http.get("/v1/models/"), 404)
    error_of(server.http.request("PATCH", CHAT), 405)


def test_model_cards_by_name(server):
    assert server.http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert error_of(server.http.get("/v1/models/other"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_content_type(server, content_type):
    response = server.http.post(CHAT, content=b"{}", headers={"content-type": content_type})
    assert error_of(response, 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("encoding", ["gzip", "br, identity"])
def test_a_compressed_body(server, encoding):
    """The error does not call it malformed JSON."""
    headers = {"content-type": "application/json", "content-encoding": encoding}
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}'
    error = error_of(server.http.post(CHAT, content=gzip.compress(body), headers=headers), 415)
    assert error["code"] == "unsupported_media_type"
    assert "content-encoding" in error["message"]
    assert server.http.post(CHAT, content=body, headers=headers | {"content-encoding": "Identity"}).status_code == 200


def test_content_type_with_parameters(server):
    body = json.dumps({"messages": MESSAGES}).encode()
    assert (
        server.http.post(CHAT, content=body, headers={"content-type": "Application/JSON; charset=utf-8"}).status_code
        == 200
    )


def test_body_size():
    with RunningServer(limits=Limits(max_body_bytes=1000)) as server:
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 1000}]}).encode()
        assert error_of(server.http.post(CHAT, content=body, headers=JSON), 413)["code"] == "body_too_large"

        def chunks():
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        assert error_of(server.http.post(CHAT, content=chunks(), headers=JSON), 413)["code"] == "body_too_large"
        assert server.chat().status_code == 200


def test_slow_body():
    with (
        RunningServer(limits=Limits(body_timeout_seconds=0.1)) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection,
    ):
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n"
            "content-type: application/json\r\ncontent-length: 100\r\n\r\n{".encode()
        )
        answer = b""
        while b"body_timeout" not in answer and (part := connection.recv(65536)):
            answer += part
        assert answer.startswith(b"HTTP/1.1 408"), answer
        assert b"body_timeout" in answer, answer


def test_large_body_is_decoded(server):
    filler = "word " * 80_000  # above the size that is decoded in a thread
    error = error_of(server.chat(messages=[{"role": "user", "content": filler}]), 400)
    assert error["code"] == "context_length_exceeded"


def test_deep_body(server):
    deep = "[" * 65 + "]" * 65
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "metadata": {deep}}}'
    response = server.http.post(CHAT, content=body.encode(), headers=JSON)
    assert "nested too deeply" in error_of(response, 400)["message"]


def test_openai_client_raises_its_own_errors(server):
    client = server.openai()
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as guided:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"guided_json": {"type": "object"}})
    assert guided.value.code == "unsupported_field"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9, stream=True)


def test_queue_full():
    client = EchoClient(None, max_num_seqs=1, max_num_queued_reqs=0)
    with RunningServer(client) as server:
        server.run(lambda: setattr(client, "is_paused", True))
        body = {"messages": MESSAGES, "max_tokens": 5, "stream": True}
        with _Background(server, body) as running:
            server.wait_for(lambda: client.num_requests == 1, "the first request")
            with _Background(server, {**body, "stream": False}) as refused:
                server.wait_for(lambda: len(client._refused) == 1, "the second to be refused")
                server.run(lambda: (setattr(client, "is_paused", False), client._wake.set()))
                response = refused.result()
                assert error_of(response, 429)["code"] == "queue_full"
                assert response.headers["retry-after"] == "1"
            assert running.result().status_code == 200


class _Background:
    """A request in a thread."""

    def __init__(self, server, body):
        self._response = None
        self._thread = threading.Thread(target=self._run, args=(server, body))

    def _run(self, server, body):
        self._response = server.http.post(CHAT, json=body)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._thread.join(10)

    def result(self):
        self._thread.join(10)
        assert self._response is not None
        return self._response


@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"n": 2}, {"stream": True, "n": 2}])
def test_engine_refuses_before_the_first_token(fields):
    """Streamed or not: the status tells."""
    client = EchoClient(None, error_of=lambda request: InvalidRequestError("The engine says no", param="prompt"))
    with RunningServer(client) as server:
        assert "The engine says no" in error_of(server.chat(**fields), 400)["message"]
        assert "The engine says no" in error_of(server.complete(prompt=["a", "b"], **fields), 400)["message"]
        server.wait_for_idle()


def stream_until_text(server, path, body):
    """An open stream whose first text has arrived, and the iterator over its lines."""
    request = server.http.stream("POST", path, json={"stream": True, "max_tokens": 1000, "ignore_eos": True, **body})
    return request


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": ["a", "b"]})])
def test_error_while_streaming(path, body):
    client = EchoClient(None, step_seconds=0.002)
    with RunningServer(client) as server, stream_until_text(server, path, body) as response:
        assert response.status_code == 200
        lines = filter(None, response.iter_lines())
        next(lines)
        request = server.last_request()
        server.run(lambda: client.fail_request(request.request_id, InvalidRequestError("The row failed")))
        *_, error, done = lines
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["message"].startswith("The row failed")
        server.wait_for_idle()


def test_openai_client_sees_errors_while_streaming():
    client = EchoClient(None, step_seconds=0.002)
    with RunningServer(client) as server:
        stream = server.openai().chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        server.run(lambda: client.fail_request(server.last_request().request_id, InvalidRequestError("The row failed")))
        with pytest.raises(openai.APIError, match="The row failed"):
            list(stream)


def test_dead_engine():
    client = EchoClient(None, step_seconds=0.002)
    with RunningServer(client) as server, stream_until_text(server, CHAT, {"messages": MESSAGES}) as response:
        lines = filter(None, response.iter_lines())
        next(lines)
        server.run(client.die)
        *_, error, done = lines
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_dead"
        for path in ("/health", "/readyz"):
            assert error_of(server.http.get(path), 503)["code"] == "engine_dead"
        assert error_of(server.chat(), 503)["code"] == "engine_dead"
        assert server.http.get("/livez").status_code == 200


def test_unexpected_exception(server, monkeypatch, log):
    async def broken(*args, **kwargs):
        raise RuntimeError("secret at 0xdeadbeef00 in /root/file")

    monkeypatch.setattr(server.engine, "add_request", broken)
    for fields in ({}, {"stream": True}):
        response = server.chat(**fields)
        error = error_of(response, 500)
        assert error["code"] == "internal_error"
        assert response.headers["x-request-id"] in error["message"]
        assert response.headers["x-request-id"] in log.text
    assert "secret" in log.text
    monkeypatch.undo()
    assert server.chat().status_code == 200


def test_unexpected_exception_while_streaming(server, monkeypatch, log):
    from quire.server import chat

    original = chat.ChatWriter._deltas

    def broken(self, completion):
        if completion.finish_reason:
            raise RuntimeError("secret at 0xdeadbeef00")
        return original(self, completion)

    monkeypatch.setattr(chat.ChatWriter, "_deltas", broken)
    monkeypatch.setattr(server.client, "step_seconds", 0.002)
    events = server.events(CHAT, messages=MESSAGES)
    error = events[-1]["error"]
    assert error["code"] == "internal_error"
    assert not LEAK.search(json.dumps(events))
    assert "secret" in log.text
    monkeypatch.undo()
    server.wait_for_idle()
    assert server.chat().json()["choices"][0]["message"]["content"] == TEXT


def test_same_request_id_twice_at_once(server):
    """The client's id is its own business: the engine's ids are unique."""
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(server.chat(request_id="same").status_code)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [200] * 8
    ids = [message.request_id for message in server.client.sent if isinstance(message, AddRequest)]
    assert len(ids) == len(set(ids))


def test_engine_error_keeps_its_status():
    client = EchoClient(None, error_of=lambda request: EngineDeadError("gone"))
    with RunningServer(client) as server:
        assert error_of(server.chat(), 503)["type"] == "service_unavailable_error"
