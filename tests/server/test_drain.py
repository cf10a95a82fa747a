"""A server that is told to stop: it refuses, finishes running requests, and resets no connection."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from quire.config import ServerConfig
from quire.entry.listen import Listener
from quire.frontend.echo_client import EchoClient
from tests.server.serving import MAX_MODEL_LEN, RunningServer
from tests.server.test_guard import ask, head_of

BODY = b'{"prompt": "Hi", "max_tokens": 2}'
NUM_CLIENTS, NUM_STREAMS = 32, 4


def slow_server() -> RunningServer:
    """A token every 5 ms, without end."""
    client = EchoClient(None, step_seconds=0.005, max_model_len=MAX_MODEL_LEN)
    return RunningServer(client, drain_seconds=10.0)


class Knocking:
    """Clients that connect, ask and read the answer in a loop, until the port is closed."""

    def __init__(self, server: RunningServer) -> None:
        self._port = server.port
        self.seen: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._knock) for _ in range(NUM_CLIENTS)]

    def __enter__(self) -> Knocking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for thread in self._threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in self._threads)

    def _knock(self) -> None:
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", self._port), timeout=10)
            except ConnectionRefusedError:
                return
            except OSError as error:
                self.seen[f"connect: {type(error).__name__}"] += 1
                return
            with connection:
                try:
                    connection.sendall(head_of("/v1/completions", BODY) + BODY)
                    answer = b""
                    while b"}" not in answer[-3:] and (data := connection.recv(65536)):
                        answer += data
                    self.seen[answer[9:12].decode() or "no answer"] += 1
                except OSError as error:
                    self.seen[type(error).__name__] += 1


def test_no_client_is_reset():
    """32 clients in a loop while four streams run: each is answered, 200 before and 503 after; refused at the end."""
    with slow_server() as server:
        ends: list[dict] = []

        def stream() -> None:
            ends.append(server.events("/v1/completions", prompt="a", max_tokens=100, ignore_eos=True)[-1])

        streams = [threading.Thread(target=stream) for _ in range(NUM_STREAMS)]
        for thread in streams:
            thread.start()
        server.wait_for(lambda: server.client.num_requests == NUM_STREAMS, "the streams")
        with Knocking(server) as knocking:
            server.wait_for(lambda: knocking.seen["200"] > NUM_CLIENTS, "the first answers")
            server.drain()
            server.wait_for(lambda: knocking.seen["503"] > NUM_CLIENTS, "refusals")
            for thread in streams:
                thread.join(20)
        assert set(knocking.seen) == {"200", "503"}, knocking.seen
        assert [end["choices"][0]["finish_reason"] for end in ends] == ["length"] * NUM_STREAMS


def test_what_is_answered_meanwhile():
    with slow_server() as server, httpx.Client(base_url=server.url) as idle:
        assert idle.get("/livez").status_code == 200
        with server.http.stream(
            "POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 400}
        ) as one:
            lines = one.iter_lines()
            next(lines)
            server.drain()
            server.wait_for(lambda: server._server.servers[0].is_serving() and server._server.should_exit, "the drain")
            for path in ("/livez", "/health", "/metrics", "/version"):
                answer = server.http.get(path)
                assert (answer.status_code, answer.headers["connection"]) == (200, "close"), path
            refused = [
                server.http.get("/readyz"),
                idle.post("/v1/completions", content=b"no JSON, which nobody reads"),
                server.chat(),
                server.http.post("/tokenize", json={"prompt": "a"}),
            ]
            for answer in refused:
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
                assert answer.headers["connection"] == "close"
                assert int(answer.headers["retry-after"]) >= 1
            assert list(lines)[-2] == "data: [DONE]", "the stream was cut"


def test_streams_that_are_ended_say_why():
    """When the time is over or at a second signal the engine is shut down: that is no failure of the engine."""
    with slow_server() as server:
        server.drain()
        with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as refused:
            assert refused.status_code == 503
    with slow_server() as server:
        with server.http.stream(
            "POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 900}
        ) as one:
            lines = one.iter_lines()
            next(lines)
            server.run(server.engine.close)
            data = [line.removeprefix("data: ") for line in lines if line]
        assert data[-1] == "[DONE]"
        assert json.loads(data[-2])["error"]["code"] == "shutting_down"
        for answer in (server.chat(), server.http.get("/readyz"), server.http.get("/health")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


def test_the_time_of_a_drain_is_bounded():
    """A client that neither reads nor leaves is cut off."""
    client = EchoClient(None, tokens_per_step=64, max_model_len=2_000_000)
    with RunningServer(client, drain_seconds=0.3) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 1_900_000, "ignore_eos": True}).encode()
        connection.sendall(head_of("/v1/completions", body) + body)
        server.wait_for(lambda: client.num_requests == 1, "the request")
        server.drain()
        server._thread.join(8)
        assert not server._thread.is_alive(), "a client that does not read held up the end"


def test_an_idle_connection_ends_without_a_reset():
    """Also if a request is on its way into it: unread bytes would turn the end into a reset."""
    with slow_server() as server, socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        server.drain()
        assert connection.recv(65536) == b""
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        time.sleep(0.05)
        assert connection.recv(65536) == b""


def test_an_answer_before_the_body_is_not_lost_in_a_reset():
    """A connection that ends while its client still sends: the answer is read, however much comes after it."""
    with slow_server() as server:
        server.app.state.quire.is_draining = True
        answer = ask(server, head_of("/v1/completions", b"x" * 8_000_000) + b"x" * 3_000_000)
        assert answer.startswith(b"HTTP/1.1 503"), answer
        assert b'"code":"shutting_down"' in answer


@pytest.mark.parametrize("kind", ["port", "path"])
def test_turning_away(kind, tmp_path: Path):
    """Earlier connections are accepted; later ones are not."""
    config = ServerConfig(port=0) if kind == "port" else ServerConfig(uds=str(tmp_path / "s"))
    listener = Listener(config)
    try:
        listener.listen()
        address = listener.socket.getsockname()
        with socket.socket(listener.socket.family) as early, socket.socket(listener.socket.family) as late:
            early.connect(address)
            listener.turn_away()
            late.settimeout(0.3)
            with pytest.raises((TimeoutError, FileNotFoundError)):
                late.connect(address)
            accepted, _ = listener.socket.accept()
            with accepted:
                accepted.sendall(b"x")
                assert early.recv(1) == b"x"
    finally:
        listener.close()
