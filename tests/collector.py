"""An OTLP collector in this process, over HTTP and gRPC, for tests of traces."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

REQUEST = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 2}  # to /v1/completions, beside its prompt


class Collector(TraceServiceServicer):  # type: ignore[misc]
    """`with Collector() as collector`: keeps all spans.

    Attributes:
        http, grpc: its endpoints.
        spans: each as (attributes of its resource, name of its scope, span).
    """

    def __init__(self) -> None:
        self.spans: list[tuple[dict[str, Any], str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.add(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Silent."""

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.http = f"http://127.0.0.1:{self._http.server_address[1]}/v1/traces"
        self._grpc = grpc.server(ThreadPoolExecutor(1))
        add_TraceServiceServicer_to_server(self, self._grpc)
        self.grpc = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
        self.add(request)
        return ExportTraceServiceResponse()

    def add(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                known = attributes(resource.resource)
                self.spans += [(known, scope.scope.name, span) for span in scope.spans]

    def __enter__(self) -> Collector:
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()
        self._grpc.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self._grpc.stop(0).wait()

    def wait_for_spans(self, number: int) -> list[tuple[dict[str, Any], str, Any]]:
        deadline = time.monotonic() + 10
        while len(self.spans) < number:
            assert time.monotonic() < deadline, f"{len(self.spans)} spans of {number}"
            time.sleep(0.01)
        return self.spans


def genai_attributes(model: str, finish_reasons: list[str], num_prompt: int, num_completion: int) -> dict[str, Any]:
    """The attributes of REQUEST's span under vLLM's names, without its id and its times."""
    return {
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": finish_reasons,
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": num_prompt,
        "gen_ai.usage.cached_tokens": 0,
        "gen_ai.usage.completion_tokens": num_completion,
    }


def attributes(owner: Any) -> dict[str, Any]:
    """The attributes of a span or a resource as plain values."""
    return {entry.key: _plain(entry.value) for entry in owner.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
