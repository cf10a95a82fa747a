"""`quire serve --otlp-traces-endpoint` as a process: spans over gRPC, and an end that waits for no collector.

With the extra `collector`, MLflow is asked for its spans.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.collector import REQUEST, Collector, attributes, genai_attributes
from tests.e2e.other_programs import running
from tests.e2e.serving import LIGHT, SHORT, SMALL, Serve

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


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


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an MLflow, which takes traces over HTTP for its experiment 0."""
    pytest.importorskip("mlflow", reason="MLflow is in the extra `collector`")
    folder = tmp_path_factory.mktemp("mlflow")
    flags = ("--backend-store-uri", f"sqlite:///{folder}/traces.db", "--default-artifact-root", str(folder))

    def command(port: int) -> tuple[str, ...]:
        return (sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1", *flags)

    # MLflow tells its makers of its use, unless it is told not to.
    with running(command, "/health", {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}) as url:
        yield url


@pytest.mark.slow
def test_mlflow_shows_the_span_of_a_request(mlflow: str) -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-mlflow-experiment-id=0",
        "OTEL_BSP_SCHEDULE_DELAY": "10",
    }
    flags = ("--otlp-traces-endpoint", f"{mlflow}/v1/traces", "--served-model-name", "served")
    with Serve(*SMALL, *flags, environment=environment) as server:
        body = {"prompt": "Once upon a time", **REQUEST}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=20).json()

        def asked() -> Any:
            query = {"trace_id": f"tr-{TRACE}"}
            return httpx.get(f"{mlflow}/api/3.0/mlflow/traces/get", params=query, timeout=20).json()

        server.wait_for(lambda: "trace" in asked(), "the span in MLflow", 60)
        assert server.stop() == 0
    usage, found = answer["usage"], asked()
    (span,) = found["trace"]["spans"]
    assert (span["name"], base64.b64decode(span["parent_span_id"]).hex()) == ("llm_request", PARENT)
    told = {each["key"]: _plain(each["value"]) for each in span["attributes"]}
    assert told["gen_ai.request.id"].startswith(f"{answer['id']}-")
    reasons = [each["finish_reason"] for each in answer["choices"]]
    expected = genai_attributes("served", reasons, usage["prompt_tokens"], usage["completion_tokens"])
    expected["gen_ai.request.id"] = told["gen_ai.request.id"]
    assert {
        name: value for name, value in told.items() if name.startswith("gen_ai.") and "latency" not in name
    } == expected
    assert {name for name in told if "latency" in name} == {
        f"gen_ai.latency.{name}"
        for name in (
            *("time_in_queue", "time_to_first_token", "e2e"),
            *("time_in_model_prefill", "time_in_model_decode", "time_in_model_inference"),
        )
    }
    assert 0 < told["gen_ai.latency.time_to_first_token"] < told["gen_ai.latency.e2e"]
    # What MLflow makes of it by itself.
    assert told["mlflow.llm.model"] == "served"
    assert found["trace"]["trace_info"]["tags"]["service.name"] == "quire"


def _plain(value: dict[str, Any]) -> Any:
    """A value of protobuf's JSON."""
    ((kind, inner),) = value.items()
    return [_plain(each) for each in inner["values"]] if kind == "array_value" else inner
