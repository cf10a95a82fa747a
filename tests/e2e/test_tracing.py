"""`quire serve --otlp-traces-endpoint` as a process: spans over gRPC, and an end that waits for no collector."""

from __future__ import annotations

import httpx

from tests.collector import Collector, attributes
from tests.e2e.serving import LIGHT, SHORT, SMALL, Serve


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
