"""A connection cannot cost more than its share: slow senders, slow readers, large headers, fan-out, other origins."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import time

import httpx
import pytest

from quire.config import ServerConfig
from quire.errors import ConfigError
from quire.frontend.echo_client import EchoClient
from quire.logs import RateLimited
from quire.server import http_protocol
from quire.server.http_protocol import ConnectionLimits
from tests.server.serving import LEAK, RunningServer
from tests.server.test_errors import MESSAGES, error_of

QUICK = ConnectionLimits(
    max_header_bytes=4000, max_headers=20, header_seconds=0.2, body_seconds=0.2, stalled_write_seconds=0.2
)


@pytest.fixture(scope="module")
def guarded():
    with RunningServer(EchoClient(None, max_model_len=2048), connection_limits=QUICK) as server:
        yield server
        server.wait_for_idle()


def head_of(path: str, body: bytes) -> bytes:
    """The head of a POST."""
    start = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{start}content-length: {len(body)}\r\n\r\n".encode()


def ask(server: RunningServer, request: bytes) -> bytes:
    """What the server says until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(65536):
            answer += data
        return answer


def check_error(answer: bytes, status: int, code: str) -> None:
    """The status and the same shape as of all errors, once, and nothing internal."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"x-request-id: " in head
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}
    assert not LEAK.search(body.decode())


@pytest.mark.parametrize(
    "request_text",
    [
        b"BREW /pot HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
    ],
)
def test_what_is_no_http(guarded, request_text):
    check_error(ask(guarded, request_text), 400, "bad_http")


def test_many_headers(guarded):
    headers = b"".join(b"x-%d: 1\r\n" % number for number in range(30))
    check_error(ask(guarded, b"GET /livez HTTP/1.1\r\n" + headers + b"\r\n"), 431, "headers_too_large")


@pytest.mark.parametrize("head", [b"GET /livez HTTP/1.1\r\nx: %s\r\n\r\n", b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_large_headers(guarded, head):
    check_error(ask(guarded, head % (b"a" * 5000)), 431, "headers_too_large")


def send_without_end(connection: socket.socket) -> None:
    for _ in range(100):
        connection.sendall(b"a" * 65536)
        time.sleep(0.005)


def test_endless_header(server):
    """A value without end is refused for its size, long before its time is over: it does not grow in memory."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nx: ")
        with pytest.raises(OSError):
            send_without_end(connection)


def test_connections_that_say_nothing_or_little_are_closed(guarded):
    assert ask(guarded, b"") == b""
    check_error(ask(guarded, b"GET /livez HTTP/1.1\r\nhost:"), 408, "headers_timeout")


def test_slowloris(guarded):
    """A byte now and then does not extend the time."""
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=10) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\n")
        connection.settimeout(0.02)
        answer = b""
        for _ in range(400):
            try:
                connection.sendall(b"x: 1\r\n"[:1])
                answer = connection.recv(65536)
                break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            raise AssertionError("the connection is still open")
        if answer:
            check_error(answer, 408, "headers_timeout")


def test_a_body_that_nobody_waits_for(guarded):
    """An answer before the body's end leaves the connection waiting for the rest, for a limited time."""
    head = b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    assert ask(guarded, head).startswith(b"HTTP/1.1 404")


def test_slow_reader_frees_everything():
    """A stream without a reader: its buffer is bounded, and then the connection and its request end."""
    client = EchoClient(None, tokens_per_step=64, max_model_len=2_000_000)
    with RunningServer(client, connection_limits=QUICK) as server:
        body = json.dumps({"messages": MESSAGES, "stream": True, "max_tokens": 1_900_000, "ignore_eos": True}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            head = head_of("/v1/chat/completions", body)
            connection.sendall(head + body)
            server.wait_for(lambda: client.num_requests == 1, "the request")
            server.wait_for(
                lambda: client.num_requests == 0, "the request of a client that does not read to be aborted"
            )
            assert client._step_id * 64 < 1_900_000, "the request was not aborted, it ended"
        server.wait_for_idle()
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 1
        assert server.chat(max_tokens=3).status_code == 200


def test_reset_connections_leave_nothing():
    client = EchoClient(None, step_seconds=0.002, max_model_len=2048)
    with RunningServer(client) as server:
        body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 2000, "ignore_eos": True}).encode()
        head = head_of("/v1/completions", body)
        for _ in range(20):
            connection = socket.create_connection(("127.0.0.1", server.port))
            connection.sendall(head + body)
            connection.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        server.wait_for_idle()


# One above each limit of one request; the limits themselves are accepted.
FAN_OUT = [
    pytest.param({"n": 129}, id="n"),
    pytest.param({"prompt": ["a"] * 1025}, id="prompts"),
    pytest.param({"prompt": ["a"] * 9, "n": 114}, id="sequences"),
    pytest.param({"prompt": ["a"] * 1025, "use_beam_search": True}, id="prompts of beams"),
    pytest.param({"stop": ["a"] * 17}, id="stops"),
    pytest.param({"stop": ["a" * 257]}, id="stop length"),
    pytest.param({"logit_bias": {str(i): 1 for i in range(1025)}}, id="logit_bias"),
    pytest.param({"logprobs": 21}, id="logprobs"),
    pytest.param({"prompt_logprobs": 21}, id="prompt_logprobs"),
    pytest.param({"logprob_token_ids": list(range(129))}, id="logprob_token_ids"),
    pytest.param({"messages": MESSAGES * 4097}, id="messages"),
    pytest.param({"messages": MESSAGES, "tools": [{"type": "function"}] * 129}, id="tools"),
    pytest.param({"messages": MESSAGES, "documents": [{"text": "a"}] * 1025}, id="documents"),
    pytest.param({"messages": MESSAGES, "n": 129}, id="chat n"),
    pytest.param({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, id="top_logprobs"),
]


@pytest.mark.parametrize("fields", FAN_OUT)
def test_fan_out_limits(server, fields):
    num_before = len(server.client.sent)
    response = server.chat(**fields) if "messages" in fields else server.complete(**fields)
    error_of(response, 400)
    assert len(server.client.sent) == num_before, "the engine was asked although the request was refused"


def test_fan_out_at_the_limit(echo):
    assert echo.complete(prompt=["a"] * 8, n=128, max_tokens=1).status_code == 200
    assert echo.complete(prompt=["a"] * 1024, max_tokens=1).status_code == 200
    assert echo.complete(stop=["z" * 256] * 16, max_tokens=1).status_code == 200
    assert echo.complete(logprobs=20, max_tokens=1).status_code == 200


PAGE = "https://page.example"


def test_no_cors_by_default(server):
    response = server.http.get("/v1/models", headers={"origin": PAGE})
    preflight = {"origin": PAGE, "access-control-request-method": "POST"}
    refused = server.http.request("OPTIONS", "/v1/chat/completions", headers=preflight)
    assert refused.status_code == 405
    for answer in (response, refused):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_cors_for_named_origins():
    running = RunningServer(allowed_origins=(PAGE,), api_keys=("key",))
    with running as server, httpx.Client(base_url=server.url) as browser:
        preflight = {
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        allowed = browser.request("OPTIONS", "/v1/chat/completions", headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == PAGE
        refused = browser.request("OPTIONS", "/v1/chat/completions", headers={**preflight, "origin": "https://x"})
        assert error_of(refused, 400)["code"] == "cors_refused"
        assert "access-control-allow-origin" not in refused.headers
        answer = server.http.get("/v1/models", headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        other = server.http.get("/v1/models", headers={"origin": "https://page.example.evil"})
        assert "access-control-allow-origin" not in other.headers
        assert browser.get("/v1/models", headers={"origin": PAGE}).status_code == 401, "CORS is not access"


def test_cors_settings():
    config = ServerConfig(allowed_origins=('["https://a", "https://b"]',), allowed_methods=("GET",))
    assert config.allowed_origins == ("https://a", "https://b")
    assert config.allowed_methods == ("GET",)
    assert ServerConfig().allowed_origins == ()
    with pytest.raises(ConfigError, match="in the name of"):
        ServerConfig(allowed_origins=("*",), allow_credentials=True)
    for wrong in ("[1]", "[", "[]"):
        with pytest.raises(ConfigError, match="allowed_origins"):
            ServerConfig(allowed_origins=(wrong,))


def post(coding: bytes, body: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: "
    return head + coding + b"\r\n\r\n" + body


CHUNKED = b'f\r\n{"prompt": "a"}\r\n0\r\n\r\n'


@pytest.mark.parametrize("coding", [b"gzip", b"identity", b"gzip, chunked", b"chunked, gzip", b"xchunked", b""])
def test_unknown_transfer_codings(server, coding):
    check_error(ask(server, post(coding, CHUNKED)), 400, "bad_http")


@pytest.mark.parametrize("size", [b"zz", b"-1", b"0xf", b"f" * 20, b"", b"f\n"])
def test_bad_chunk_sizes(server, size):
    """The request has been handed on when its body turns out to be none: it is answered, once."""
    check_error(ask(server, post(b"chunked", size + CHUNKED[1:])), 400, "bad_http")
    check_error(ask(server, post(b"chunked", CHUNKED[:-5] + size + b"\r\n\r\n")), 400, "bad_http")


def test_what_is_no_http_after_a_request_leaves_that_its_answer(server):
    body = b'{"prompt": "a", "max_tokens": 3}'
    answer = ask(server, head_of("/v1/completions", body) + body + b"BREW / HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert b'"finish_reason"' in answer
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("num_before", [1, 2])
def test_a_body_that_is_none_after_running_requests_leaves_them_their_answers(server, log, num_before):
    """The bad request waits behind them: they are answered whole, then the connection ends."""
    body = b'{"prompt": "a", "max_tokens": 3, "stream": true}'
    answer = ask(server, num_before * (head_of("/v1/completions", body) + body) + post(b"chunked", b"zz\r\n"))
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1 ") == num_before, answer
    assert answer.count(b"data: [DONE]") == num_before
    server.wait_for_idle()
    assert not [record for record in log.records if record.exc_info], log.text


def expecting(path: str, body: bytes) -> bytes:
    """The head of a POST whose client waits to be asked for the body."""
    return head_of(path, body).replace(b"\r\n\r\n", b"\r\nexpect: 100-Continue\r\n\r\n")


BODY = b'{"prompt": "a", "max_tokens": 3}'


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/livez", 405)])
def test_refused_before_its_body_was_asked_for(server, path, status):
    """It may never come, or still come: later bytes on this connection have no meaning."""
    answer = ask(server, expecting(path, BODY))
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close\r\n" in answer
    late = ask(server, expecting(path, BODY) + BODY + b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
    assert late.count(b"HTTP/1.1 ") == 1, late


def test_a_body_that_was_asked_for_keeps_the_connection(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        for _ in range(2):
            connection.sendall(expecting("/v1/completions", BODY))
            assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(BODY)
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert b"connection: close" not in answer
            while b"finish_reason" not in answer:
                answer += connection.recv(65536)


def test_answers_do_not_name_the_library(server):
    assert "server" not in server.http.get("/livez").headers


class Transport:
    """Takes what is written until its end, as an event loop's does."""

    def __init__(self) -> None:
        self.written, self.has_eof = b"", False

    def write(self, data: bytes) -> None:
        assert not self.has_eof, "written after the end"
        self.written += data

    def write_eof(self) -> None:
        self.has_eof = True

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return False

    def resume_reading(self) -> None:
        pass


def test_nothing_is_written_after_the_end():
    """A task that still writes has not heard of the end yet: this is no error."""
    loop = asyncio.new_event_loop()
    transport = Transport()
    connection = http_protocol._Connection(transport, loop, linger_seconds=1.0)
    connection.write(b"before")
    connection.close()
    connection.write(b"after")
    connection.on_lost()
    loop.close()
    assert transport.written == b"before"
    assert transport.has_eof


def test_malformed_requests_do_not_fill_the_log(server, log, monkeypatch):
    log.set_level(logging.WARNING, "uvicorn.error")
    monkeypatch.setattr(http_protocol, "_malformed_log", RateLimited(http_protocol.logger))
    for _ in range(20):
        ask(server, b"BREW / HTTP/1.1\r\n\r\n")
        ask(server, b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: websocket\r\n\r\n")
    records = {id(record): record.name for record in log.records}  # the fixture may hear of one twice
    assert list(records.values()) == ["quire.server.http_protocol"], log.text
