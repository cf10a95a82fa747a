"""A real server on a free loopback port in a thread, over an EchoClient, for the tests of the HTTP side."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import count
from typing import Any, TypeVar

import httptools
import httpx
import openai
import uvloop
from prometheus_client.parser import text_string_to_metric_families

import quire.demo
from quire.config import ServerConfig
from quire.entry.listen import Listener
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.echo_client import EchoClient
from quire.frontend.input_processor import InputProcessor, ModelLimits
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.replica import Replica
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tracing import RequestTracer
from quire.lora.modules import LoraModule
from quire.messages import AddRequest
from quire.metrics.prometheus import PrometheusMetrics
from quire.option import options
from quire.outputs import SpecDecodeMetrics
from quire.server.app import create_app
from quire.server.http_protocol import ConnectionLimits, guarded_protocol
from quire.server.http_server import HttpServer, http_config
from quire.server.state import AppSettings
from quire.settings import ServerSettings

T = TypeVar("T")

MODEL = "echo/model-1"
MAX_MODEL_LEN = 2048
TEXT = "Hello, wörld 😀! The answer is: 42 naïve cafés.\nSecond line"
TOKENIZER = Tokenizer.from_folder(quire.demo.path("target"))
LIMITS = ModelLimits(MAX_MODEL_LEN, TOKENIZER.vocab_size)
ANSWER = TOKENIZER.encode(TEXT, add_special_tokens=False)

# Texts that no body may show: addresses, paths of the machine, tracebacks.
LEAK = re.compile(r"0x[0-9a-f]{6,}|Traceback|File \"|site-packages|/src/quire|/(?:home|root|usr|opt|var|tmp)/")


def check_no_leak(response: httpx.Response) -> None:
    """httpx hook: reads the body unless it is a stream of events."""
    assert response.headers.get("x-request-id"), f"{response.request.url} has no x-request-id"
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return
    leak = LEAK.search(response.read().decode())
    assert leak is None, f"{response.request.url} shows internals: {leak}"


class QuickServer(HttpServer):
    """Notices that it shall end within 10 ms, where uvicorn takes up to 100."""

    async def main_loop(self) -> None:
        for tick in count():
            if await self.on_tick(tick):
                return
            await asyncio.sleep(0.01)


class PlainConnection:
    """To a server on this machine: one request after the other."""

    def __init__(self, port: int) -> None:
        self._port, self._url = port, httpx.URL(f"http://127.0.0.1:{port}")
        self._socket: socket.socket | None = None

    def ask(self, method: str, path: str, content: bytes, headers: dict[str, str]) -> httpx.Response:
        """Send a request and read the whole answer."""
        lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=20)
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + content)
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        while not answer.is_whole:
            data = self._socket.recv(1 << 16)
            assert data, "the server closed the connection before the end of its answer"
            parser.feed_data(data)
            if method == "HEAD" and answer.has_headers:
                break
        if method == "HEAD" or not parser.should_keep_alive():
            self.close()
        request = httpx.Request(method, self._url.copy_with(raw_path=path.encode("latin-1")))
        return httpx.Response(parser.get_status_code(), headers=answer.headers, content=answer.body, request=request)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _Answer:
    """What httptools has read of it."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.has_headers = self.is_whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() != b"transfer-encoding":
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.has_headers = True

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_whole = True


class RunningServer:
    """`with RunningServer(...) as server`. The engine echoes `answer`, or the prompt without end if that is None."""

    def __init__(
        self,
        client: EchoClient | None = None,
        *,
        answer: list[int] | None = ANSWER,
        tokenizer: Tokenizer | None = TOKENIZER,
        waits_for_engine: bool = True,
        clock: Callable[[], float] = time.monotonic,
        connection_limits: ConnectionLimits = ConnectionLimits(),
        drain_seconds: float = 2.0,
        max_draft: int = 0,
        has_adapters: bool = False,
        new_draft_metrics: Callable[[], SpecDecodeMetrics] | None = None,
        tracer: RequestTracer | None = None,
        **settings: Any,
    ) -> None:
        self.client = EchoClient(answer, max_model_len=MAX_MODEL_LEN) if client is None else client
        self._waits_for_engine = waits_for_engine
        self.metrics = PrometheusMetrics(MODEL, MAX_MODEL_LEN, max_draft=max_draft, has_adapters=has_adapters)
        inputs = InputProcessor(tokenizer, LIMITS, eos_token_ids=[TOKENIZER.eos_token_id])
        outputs = OutputProcessor(
            tokenizer, self.metrics.engines[0], new_draft_metrics=new_draft_metrics, tracer=tracer
        )
        modules: tuple[LoraModule, ...] | None = () if has_adapters else None
        self.engine = AsyncEngine(
            [Replica(self.client, outputs, clock=clock)], inputs, modules=modules, clock=clock, tracer=tracer
        )
        if has_adapters:
            self.metrics.show_adapters(self.engine.adapter_names)
        own = {f.name for f in options(ServerConfig)} - {f.name for f in fields(AppSettings)}
        server = ServerSettings(**{name: settings.pop(name) for name in [*settings] if name in own})
        app_settings = AppSettings((MODEL, "alias"), server, log_stats_interval=0.0)
        self.settings = replace(app_settings, **settings)
        self.app = create_app(self.engine, tokenizer, self.settings, self.metrics)
        self._listener = Listener(ServerConfig(port=0))
        self._listener.listen()
        self.port: int = self._listener.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = http_config(self.app, guarded_protocol(connection_limits), lifespan="on", log_level="critical")
        self._server = QuickServer(config, drain_seconds, self._listener.turn_away)
        self._thread = threading.Thread(target=self._run, name="server")
        self.loop: asyncio.AbstractEventLoop | None = None
        headers = {"authorization": f"Bearer {settings['api_keys'][0]}"} if settings.get("api_keys") else {}
        self._plain_http: PlainConnection | None = None
        self.http = httpx.Client(
            base_url=self.url, timeout=20, headers=headers, event_hooks={"response": [check_no_leak]}
        )

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self.loop = runner.get_loop()
            runner.run(self._server.serve(sockets=[self._listener.socket]))

    def __enter__(self) -> RunningServer:
        self._thread.start()
        self.wait_for(lambda: self._server.started, "the server to start")
        if self._waits_for_engine:
            self.wait_for(lambda: self.engine.is_ready, "the engine to be ready")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.http.close()
        if self._plain_http is not None:
            self._plain_http.close()
        self.drain()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the server did not stop"

    def drain(self) -> None:
        """What the first signal does."""
        self.app.state.quire.is_draining = True
        self._server.should_exit = True

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
        """Poll until true; fails naming what was waited for."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
            time.sleep(0.002)

    def run(self, function: Callable[[], T]) -> T:
        """Call a function on the server's event loop."""

        async def call() -> T:
            return function()

        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)

    def wait_for_idle(self) -> None:
        """Until no request is left in the front end and in the engine."""
        self.wait_for(lambda: self.engine.num_unfinished == 0 and self.client.num_requests == 0, "all requests to end")

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=20, **options)

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=20)

    def chat(self, **fields: Any) -> httpx.Response:
        """POST a chat with one short message unless `messages` is given."""
        body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def ask(self, method: str, path: str, content: bytes, **headers: str) -> httpx.Response:
        """The answer of `http` to JSON, but sooner: for tests with thousands of requests."""
        if self._plain_http is None:
            self._plain_http = PlainConnection(self.port)
        response = self._plain_http.ask(method, path, content, {"content-type": "application/json", **headers})
        check_no_leak(response)
        return response

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "Hi", **fields})

    def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer, which must end with [DONE]."""
        body = {"stream": True, **fields}
        with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines), lines
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def named_events(self, path: str, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
        """The events of an answer streamed as events with names: (name, data)."""
        with self.http.stream("POST", path, json={"stream": True, **fields}) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line]
        names = [line.removeprefix("event: ") for line in lines[::2]]
        return list(zip(names, (json.loads(line.removeprefix("data: ")) for line in lines[1::2]), strict=True))

    def last_request(self) -> AddRequest:
        """What the engine was last asked for."""
        return next(message for message in reversed(self.client.sent) if isinstance(message, AddRequest))

    def metric(self, name: str, **labels: str | None) -> float:
        """One sample of /metrics, of the first engine; `engine=None`: of the API process."""
        wanted = {name: value for name, value in {"model_name": MODEL, "engine": "0", **labels}.items() if value}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and sample.labels == wanted:
                    return sample.value
        raise AssertionError(f"no sample {name} {wanted}")
