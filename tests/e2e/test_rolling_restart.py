"""Two servers behind a proxy are restarted in turns under load, and no request is lost."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.e2e.serving import LIGHT, SHORT, SMALL, Serve

pytestmark = pytest.mark.slow
NUM_CLIENTS = 4
MAX_TOKENS = 60


class Proxy:
    """Passes each connection to a server whose /readyz was 200 a moment ago, like a service of Kubernetes."""

    def __init__(self) -> None:
        self.ports: list[int] = []  # of all servers
        self._ready: list[int] = []
        self._turn = 0
        self._is_over = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._watcher = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _watch(self) -> None:
        async with httpx.AsyncClient() as client:
            while not self._is_over:
                ready = []
                for port in list(self.ports):
                    try:
                        answer = await client.get(f"http://127.0.0.1:{port}/readyz", timeout=1)
                    except httpx.HTTPError:
                        continue
                    if answer.status_code == 200:
                        ready.append(port)
                self._ready = ready
                await asyncio.sleep(0.05)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._turn += 1
        port = self._ready[self._turn % len(self._ready)]
        upstream, downstream = await asyncio.open_connection("127.0.0.1", port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            try:
                while chunk := await source.read(65536):
                    sink.write(chunk)
                    await sink.drain()
            except ConnectionError:
                pass
            finally:
                sink.close()

        await asyncio.gather(pump(reader, downstream), pump(upstream, writer))

    def is_ready(self, port: int) -> bool:
        return port in self._ready

    def close(self) -> None:
        self._is_over = True
        self._watcher.result(10)
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    running = Proxy()
    yield running
    running.close()


def _port(server: Serve) -> int:
    return int(server.url.rpartition(":")[2])


def _wait(condition, what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_a_rolling_restart_loses_no_request(proxy: Proxy) -> None:
    failures: list[str] = []
    answered = 0
    is_over = threading.Event()

    def ask() -> None:
        nonlocal answered
        body = {"prompt": "Hello", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
        while not is_over.is_set():
            try:  # each request on a connection of its own: the proxy chooses a server for it
                with httpx.stream("POST", f"{proxy.url}/v1/completions", json=body, timeout=20) as answer:
                    lines = [line for line in answer.iter_lines() if line]
                finish = json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
                if (answer.status_code, lines[-1], finish) != (200, "data: [DONE]", "length"):
                    failures.append(f"{answer.status_code} {lines[-3:]}")
            except httpx.HTTPError as error:
                failures.append(repr(error))
            answered += 1

    def replace(server: Serve, stack: ExitStack) -> None:
        """As the chart's Deployment does: one more server, ready, before the old one leaves."""
        before, port = answered, _port(server)
        new = stack.enter_context(Serve(*SMALL, *SHORT, program=LIGHT))
        proxy.ports.append(_port(new))
        _wait(lambda: proxy.is_ready(_port(new)), "the new server")
        proxy.ports.remove(port)
        _wait(lambda: not proxy.is_ready(port), "the proxy to forget the old one")  # preStop waits for it
        assert server.stop() == 0
        _wait(lambda: answered >= before + 3 * NUM_CLIENTS, "more answers")

    with ExitStack() as stack:
        servers = [stack.enter_context(Serve(*SMALL, *SHORT, program=LIGHT)) for _ in range(2)]
        proxy.ports = [_port(server) for server in servers]
        _wait(lambda: all(map(proxy.is_ready, proxy.ports)), "both servers")
        clients = [threading.Thread(target=ask) for _ in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        try:
            for server in servers:
                replace(server, stack)
        finally:
            is_over.set()
            for client in clients:
                client.join(30)
    assert failures == []
    assert answered >= 6 * NUM_CLIENTS
