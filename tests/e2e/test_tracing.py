"""`quire serve --otlp-traces-endpoint` as a process: spans over gRPC, and an end that waits for no collector."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.collector import Collector, attributes
from tests.e2e.serving import LIGHT, SHORT, SMALL, Serve, free_port


def test_a_collector_over_grpc_gets_the_span_of_each_request() -> None:
    with Collector() as collector:
        flags = ("--otlp-traces-endpoint", collector.grpc, "--served-model-name", "served")
        with Serve(*SMALL, *SHORT, *flags, program=LIGHT) as server:
            for _ in range(2):
                body = {"prompt": "Hello", "max_tokens": 3}
                assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).status_code == 200
            assert server.stop() == 0
        assert [attributes(span)["gen_ai.response.model"] for _, _, span in collector.spans] == ["served", "served"]


def test_a_collector_that_is_not_there_stops_nothing() -> None:
    flags = ("--otlp-traces-endpoint", "http://127.0.0.1:9")
    with Serve(*SMALL, *SHORT, *flags, program=LIGHT) as server:
        body = {"prompt": "Hello", "max_tokens": 3}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).status_code == 200
        assert server.stop() == 0


CONFIG = """
receivers: {otlp: {protocols: {grpc: {endpoint: "127.0.0.1:GRPC"}, http: {endpoint: "127.0.0.1:HTTP"}}}}
exporters: {debug: {verbosity: detailed}}
service:
  telemetry: {metrics: {level: none}}
  pipelines: {traces: {receivers: [otlp], exporters: [debug]}}
"""


@contextmanager
def opentelemetrys_collector(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Its ports for gRPC and for HTTP, and the file in which it says what it gets."""
    grpc_port, http_port, said = free_port(), free_port(), folder / "said.txt"
    (folder / "config.yaml").write_text(CONFIG.replace("GRPC", str(grpc_port)).replace("HTTP", str(http_port)))
    with said.open("wb") as file:
        process = subprocess.Popen(["otelcol", f"--config={folder / 'config.yaml'}"], stdout=file, stderr=file)
        try:
            wait_for(said, "Everything is ready")
            yield grpc_port, http_port, said
        finally:
            process.terminate()
            process.wait()


def wait_for(said: Path, text: str, count: int = 1) -> None:
    end = time.monotonic() + 30
    while said.read_text().count(text) < count:
        assert time.monotonic() < end, said.read_text()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("otelcol") is None, reason="otelcol, OpenTelemetry's collector, is not installed")
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_opentelemetrys_own_collector_reads_the_spans(tmp_path: Path, protocol: str) -> None:
    with opentelemetrys_collector(tmp_path) as (grpc_port, http_port, said):
        endpoint = f"http://127.0.0.1:{grpc_port}" if protocol == "grpc" else f"http://127.0.0.1:{http_port}/v1/traces"
        flags = ("--otlp-traces-endpoint", endpoint, "--served-model-name", "served")
        environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol, "OTEL_SERVICE_NAME": "the-service"}
        with Serve(*SMALL, *SHORT, *flags, program=LIGHT, environment=environment) as server:
            parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
            body = {"prompt": "Hello", "max_tokens": 3}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=parent, timeout=20)
            assert answer.status_code == 200
            assert server.stop() == 0
        wait_for(said, "-> gen_ai.response.model: Str(served)")
        text = said.read_text()
    for pattern in (
        r"service\.name: Str\(the-service\)",
        r"Trace ID\s*: 0af7651916cd43dd8448eb211c80319c",
        r"Parent ID\s*: b7ad6b7169203331",
        r"Name\s*: llm_request",
        r"gen_ai\.usage\.completion_tokens: Int\(3\)",
        r"gen_ai\.request\.max_tokens: Int\(3\)",
        r"gen_ai\.latency\.time_to_first_token: Double\(",
    ):
        assert re.search(pattern, text), (pattern, text)
