"""A client that leaves frees its request in the engine, in every phase of the request."""

from __future__ import annotations

import json
import socket

import pytest

from quire.frontend.echo_client import EchoClient
from quire.messages import Abort
from tests.server.serving import RunningServer

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1900, "ignore_eos": True}
PROMPTS = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 1900, "ignore_eos": True}
REQUESTS = [
    pytest.param("/v1/chat/completions", CHAT, 1, id="chat"),
    pytest.param("/v1/completions", PROMPTS, 6, id="prompts"),
]


@pytest.fixture
def slow(log):
    """Endless answers, in steps long enough to leave in between."""
    client = EchoClient(None, step_seconds=0.005, max_model_len=2048)
    with RunningServer(client) as server:
        yield server
    assert not log.get_records("call") + log.records, "a client that leaves is no error"


def send(server: RunningServer, path: str, body: dict, times: int = 1) -> socket.socket:
    """A connection on which a request was sent, once or several times without waiting for an answer."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    connection.sendall(times * (head.encode() + content))
    return connection


def check_aborted(server: RunningServer, count: int) -> None:
    server.wait_for_idle()
    aborted = [
        request_id for message in server.client.sent if isinstance(message, Abort) for request_id in message.request_ids
    ]
    assert len(aborted) == count
    assert server.metric("vllm:request_success_total", finished_reason="abort") == count
    assert server.chat(max_tokens=3).status_code == 200


@pytest.mark.parametrize(("path", "body", "count"), REQUESTS)
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_it_runs(slow, path, body, count, stream):
    with send(slow, path, {**body, "stream": stream}) as connection:
        if stream:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        slow.wait_for(lambda: slow.client.num_requests == count and slow.client._step_id > 2, "the request to run")
    check_aborted(slow, count)


def test_leaving_with_requests_behind_the_one_that_runs(slow):
    """Two more on the same connection wait for its answer: none of them begins.

    Only of a stream: while requests wait, nothing is read from the connection, so only a write sees that it is gone.
    """
    body = {**CHAT, "stream": True}
    with send(slow, "/v1/chat/completions", body, times=3):
        slow.wait_for(lambda: slow.client.num_requests == 1 and slow.client._step_id > 2, "the first one to run")
    check_aborted(slow, 1)


def test_the_answer_that_is_being_sent_is_the_last_of_its_connection(slow):
    """Connections that are still in use when the server ends."""
    body = {**CHAT, "max_tokens": 60, "stream": True}
    with send(slow, "/v1/chat/completions", body, times=3) as connection:
        answer = connection.recv(65536)
        slow.run(lambda: [each.shutdown() for each in slow._server._connections()])
        answer += read_all(connection)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), answer[-100:]
    assert slow.chat(max_tokens=3).status_code == 200


@pytest.mark.parametrize(("path", "body", "count"), REQUESTS)
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_before_the_first_token(slow, path, body, count, stream):
    slow.run(lambda: setattr(slow.client, "is_paused", True))
    with send(slow, path, {**body, "stream": stream}):
        slow.wait_for(lambda: slow.client.num_requests == count, "the request to arrive")
    slow.wait_for(lambda: slow.client.num_requests == 0, "the request to be aborted")
    slow.run(lambda: (setattr(slow.client, "is_paused", False), slow.client._wake.set()))
    check_aborted(slow, count)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_during_beam_search(slow, stream):
    with send(slow, "/v1/chat/completions", {**CHAT, "use_beam_search": True, "n": 2, "stream": stream}):
        slow.wait_for(lambda: slow.client._step_id > 2, "the search to run")
    slow.wait_for_idle()
    steps = slow.client._step_id
    assert slow.chat(max_tokens=3).status_code == 200
    assert slow.client._step_id <= steps + 5, "the search went on after its client had left"


def test_leaving_in_the_middle_of_the_body(slow):
    with socket.create_connection(("127.0.0.1", slow.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
            b"content-type: application/json\r\ncontent-length: 500\r\n\r\n{"
        )
    assert slow.chat(max_tokens=3).status_code == 200


def test_closing_the_openai_stream(slow):
    stream = slow.openai().chat.completions.create(
        model="alias", messages=CHAT["messages"], max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    stream.close()
    slow.wait_for_idle()


def read_all(connection: socket.socket) -> bytes:
    answer = b""
    while data := connection.recv(65536):
        answer += data
    return answer


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_only_stops_sending_is_answered(slow, stream):
    """Its connection looks like one whose client has left until bytes are sent to it."""
    with send(slow, "/v1/completions", {**PROMPTS, "max_tokens": 60, "stream": stream}) as connection:
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer[:100]
    assert b"\r\nconnection: close\r\n" in answer
    assert answer.count(b'"finish_reason":"length"') == 6
    slow.wait_for_idle()
    assert not [message for message in slow.client.sent if isinstance(message, Abort)]


def test_a_client_that_leaves_after_it_has_stopped_sending(slow):
    with send(slow, *REQUESTS[0].values[:2]) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"H"
        slow.wait_for(lambda: slow.client._step_id > 2, "the request to run")
    check_aborted(slow, 1)


def test_half_a_request_and_no_more(slow):
    """Nothing can be answered, and the connection ends."""
    with socket.create_connection(("127.0.0.1", slow.port), timeout=10) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost")
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""
