"""With keys set, every route but the health probes needs one, however the path or the host is written."""

from __future__ import annotations

import socket

import httpx
import pytest
from starlette.routing import Route

from quire.errors import ConfigError
from quire.frontend.echo_client import EchoClient
from quire.server import page
from quire.server.auth import PUBLIC_PATHS, check_api_keys
from tests.server.serving import RunningServer
from tests.server.test_guard import ask, expecting

KEYS = ("first-key", "second-key-ü")


@pytest.fixture(scope="module")
def locked():
    with RunningServer(EchoClient(None, max_model_len=2048), api_keys=KEYS) as server:
        yield server


def test_every_route_needs_the_key_but_the_probes(locked):
    paths = [
        route.path.replace("{model:path}", "x").replace("{request_id}", "x")
        for route in locked.app.routes
        if isinstance(route, Route)
    ]
    assert len(paths) == len(locked.app.routes), "a route of another kind is not covered by this test"
    assert set(paths) >= PUBLIC_PATHS == {"/", "/health", "/livez", "/ping", "/readyz", *page.FILES}
    assert all(path.startswith("/playground/") for path in page.FILES)
    with httpx.Client(base_url=locked.url) as anonymous:
        for path in paths:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
                status = anonymous.request(method, path).status_code
                if path in PUBLIC_PATHS:
                    assert status != 401, (method, path)
                else:
                    assert status == 401, (method, path)
        for path in PUBLIC_PATHS:
            assert anonymous.get(path).status_code == 200


def test_no_route_exists_for_the_unauthorized(locked):
    with httpx.Client(base_url=locked.url) as anonymous:
        response = anonymous.get("/v1/no-such-route")
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["x-request-id"]


def test_no_body_is_asked_for_without_a_key(locked):
    """Its client waits to be asked: the connection ends, for the body may never come."""
    body = b'{"prompt": "a"}'
    answer = ask(locked, expecting("/v1/completions", body))
    assert answer.startswith(b"HTTP/1.1 401"), answer
    assert b"connection: close\r\n" in answer


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(locked, key):
    header = {b"authorization": f"Bearer {key}".encode()}
    assert httpx.get(f"{locked.url}/v1/models", headers=header).status_code == 200
    assert httpx.get(f"{locked.url}/v1/models", headers={b"x-api-key": key.encode()}).status_code == 200
    header = {b"authorization": b"Bearer none", b"x-api-key": key.encode()}
    assert httpx.get(f"{locked.url}/v1/models", headers=header).status_code == 200
    header = {b"authorization": f"bearer  {key}".encode()}
    assert httpx.get(f"{locked.url}/v1/models", headers=header).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "first-key")],
        [("authorization", "Basic first-key")],
        [("authorization", "Bearer first-ke")],
        [("authorization", "Bearer first-keyx")],
        [("authorization", "Bearer FIRST-KEY")],
        [("authorization", "Bearer wrong"), ("authorization", "Bearer first-key")],
        [("authorization", "Bearer first-key"), ("authorization", "Bearer first-key")],
        [("x-api-key", "Bearer first-key")],
        [("x-api-key", "first-key, first-key")],
        [("x-api-key", "")],
        [("x-api-key", "wrong"), ("authorization", "Bearer wrong")],
        [("x-api-key", "first-key"), ("x-api-key", "first-key")],
        [("x-api-key", "first-key"), ("x-api-key", "wrong"), ("authorization", "Bearer first-key")],
        [("cookie", "authorization=Bearer first-key")],
    ],
)
def test_wrong_keys(locked, headers):
    assert httpx.get(f"{locked.url}/v1/models?key=first-key", headers=headers).status_code == 401


def raw_status(port: int, request: str) -> bytes:
    """Status line of a request sent byte by byte as written."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request.encode("latin-1") + b"connection: close\r\n\r\n")
        answer = b""
        while data := connection.recv(65536):
            answer += data
    return answer.split(b"\r\n")[0]


TARGETS = """
    /v1/models //v1/models /v1//models /V1/models /v1/models/ /v1/%6dodels /%76%31/models /health/../v1/models
    /health%2f..%2fv1/models /v1/models?/health /v1/models#/health /v1/models;/health /health/ /HEALTH /livez/x
    /health?x http://x/v1/models http://x/health/../v1/models * /. /metrics /health%00
"""


@pytest.mark.parametrize("target", TARGETS.split())
@pytest.mark.parametrize("host", ["127.0.0.1", "a/?x=", "x/docs?", "/#", "h/health", "x@y", ""])
def test_path_and_host_tricks(locked, target, host):
    status = raw_status(
        locked.port,
        f"GET {target} HTTP/1.1\r\nhost: {host}\r\nx-forwarded-prefix: /health\r\nx-original-url: /health\r\n",
    )
    assert status.split()[1] in ((b"200",) if target == "/health?x" else (b"401", b"400")), status


def test_public_metrics_are_public_and_nothing_else():
    with RunningServer(
        api_keys=KEYS, prometheus_public=True, enable_tokenizer_info_endpoint=True, allowed_hosts=("127.0.0.1",)
    ) as server:
        with httpx.Client(base_url=server.url) as anonymous:
            assert anonymous.get("/metrics").status_code == 200
            assert anonymous.get("/metrics", headers={"host": "evil.example"}).status_code == 403
            paths = {route.path for route in server.app.routes} - PUBLIC_PATHS - {"/metrics"}
            assert {"/tokenizer_info", "/chat/completions", "/completions"} <= paths
            for path in paths:
                assert anonymous.get(path).status_code == 401, path
        for target in (
            "/metrics/",
            "//metrics",
            "/metrics%2f",
            "/METRICS",
            "/metrics/../v1/models",
            "/metrics;/health",
        ):
            status = raw_status(server.port, f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\n")
            assert status.split()[1] == b"401", target
        access = server.http.get("/openapi.json").json()["paths"]
        assert access["/metrics"]["get"]["security"] == []
        assert access["/tokenizer_info"]["get"]["security"] != []


def test_keys_do_not_show(locked):
    response = locked.http.get("/metrics")
    assert response.status_code == 200
    assert "first-key" not in response.text + str(response.headers)


@pytest.mark.parametrize("key", ["", " ", " key", "key\n", "k\x00y"])
def test_keys_no_client_could_send(key):
    with pytest.raises(ConfigError, match="API key"):
        check_api_keys(("good", key))


def test_allowed_hosts():
    with RunningServer(allowed_hosts=("localhost", "127.0.0.1", "::1")) as server:
        for host in ("localhost", "LocalHost:8000", "127.0.0.1:1", "[::1]:80", "[::1]"):
            assert raw_status(server.port, f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\n").split()[1] == b"200", host
        for host in (
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:80",
            "",
            "localhost, evil",
            "[::2]",
            "a/?x=",
            "x/docs?",
            "/#",
            "localhost/",
            "localhost#evil",
            "localhost?",
            "evil@localhost",
            "localhost@evil",
            "localhost:80:80",
            "localhost:evil",
            "localhost evil",
            "localhost.",
            "0x7f.1",
            "127.1",
            "2130706433",
            "127.0.0.1\r\nhost: evil.example",
            "evil.example\r\nx-forwarded-host: localhost",
            "evil.example\r\nforwarded: host=localhost",
        ):
            assert raw_status(server.port, f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\n").split()[1] == b"403", host
        assert raw_status(server.port, "GET /health HTTP/1.1\r\nhost: probe.example\r\n").split()[1] == b"200"
