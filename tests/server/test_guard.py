"""A connection cannot cost more than its share: slow senders, slow readers, large headers, fan-out, other origins."""

from __future__ import annotations

import json
import socket
import struct
import time

import httpx
import pytest

from quire.config import ServerConfig
from quire.errors import ConfigError
from quire.frontend.echo_client import EchoClient
from quire.server.cors import CorsRules
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
    """A stream nobody reads: what is buffered is bounded, and then the connection and its request end."""
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
    pytest.param({"prompt": ["a"] * 257}, id="prompts"),
    pytest.param({"prompt": ["a"] * 5, "n": 52}, id="sequences"),
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
    assert echo.complete(n=128, max_tokens=1).status_code == 200
    assert echo.complete(prompt=["a"] * 256, max_tokens=1).status_code == 200
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
    rules = CorsRules(origins=(PAGE,))
    with RunningServer(cors=rules, api_keys=("key",)) as server, httpx.Client(base_url=server.url) as browser:
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
