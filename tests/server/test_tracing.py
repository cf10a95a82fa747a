"""OTLP traces: the span of each request at a collector, and its trace."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from quire import logs
from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError
from quire.frontend import tracing
from quire.frontend.echo_client import EchoClient
from quire.frontend.tracing import RequestTracer
from tests.collector import REQUEST, Collector, attributes, genai_attributes
from tests.server.serving import ANSWER, MAX_MODEL_LEN, MODEL, RunningServer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with Collector() as running:
        yield running


def test_a_span_says_what_vllms_says(collector: Collector) -> None:
    tracer = RequestTracer(collector.http, MODEL)
    client = EchoClient(ANSWER, step_seconds=0.002, max_model_len=MAX_MODEL_LEN)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "x-request-id": "mine"}
    with RunningServer(client, tracer=tracer) as server:
        answer = server.http.post("/v1/completions", json={"prompt": "Hi", **REQUEST}, headers=headers)
        usage = answer.json()["usage"]
        ((resource, scope, span),) = collector.wait_for_spans(1)
    assert (resource["service.name"], scope, span.name, span.kind) == ("quire", "quire", "llm_request", 2)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "vendor=1")
    found = attributes(span)
    times = {name.rpartition(".")[2]: found.pop(name) for name in list(found) if ".latency." in name}
    assert answer.headers["x-request-id"] == "mine"
    assert found.pop("gen_ai.request.id").startswith(f"{answer.json()['id']}-")
    assert found == genai_attributes(MODEL, ["length", "length"], usage["prompt_tokens"], 10)
    assert times["time_in_queue"] + times["time_in_model_prefill"] == pytest.approx(times["time_to_first_token"])
    assert times["time_in_model_inference"] == pytest.approx(
        times["time_in_model_prefill"] + times["time_in_model_decode"]
    )
    assert 0 < times["time_to_first_token"] < times["e2e"]
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(times["e2e"], abs=1e-5)


def test_a_client_that_leaves_and_a_failure(collector: Collector) -> None:
    client = EchoClient(ANSWER * 100, step_seconds=0.002, max_model_len=MAX_MODEL_LEN)
    with RunningServer(client, tracer=RequestTracer(collector.http, MODEL)) as server:
        with server.http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True, "max_tokens": 900}):
            server.wait_for(lambda: server.engine.num_unfinished == 1, "the request")
        server.wait_for_idle()
        ((_, _, left),) = collector.wait_for_spans(1)
        assert attributes(left)["gen_ai.response.finish_reasons"] == ["abort"]
        assert (left.parent_span_id, left.status.code) == (b"", 0)
        client.die()
        server.wait_for(lambda: server.engine.error is not None, "the end of the engine")
    assert len(collector.spans) == 1, "nothing ran"


def test_what_waits_is_sent_at_the_end(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    with RunningServer(tracer=RequestTracer(collector.http, MODEL)) as server:
        server.complete(max_tokens=1)
        assert not collector.spans
    assert len(collector.spans) == 1


def test_lines_of_a_request_have_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, str]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((logs.JsonFormatter().format(record), logs.TextFormatter().format(record)))

    def check() -> None:
        logs.get_logger("quire.test").warning("it\nfails")
        raise QuireError("it fails")

    handler = Handler()
    logging.getLogger("quire.test").addHandler(handler)
    with RunningServer() as server:
        monkeypatch.setattr(server.app.state.quire, "check_accepting", check)
        assert server.http.get("/readyz", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    logging.getLogger("quire.test").removeHandler(handler)
    ((as_json, as_text),) = lines
    assert json.loads(as_json)["request_id"] == "mine"
    assert as_text.endswith("it (request mine)\n    fails")


def test_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    tracing.check_installed(EngineConfig())
    with pytest.raises(ConfigError, match=r"pip install \"quire\[otel\]\""):
        tracing.check_installed(EngineConfig(otlp_traces_endpoint="http://127.0.0.1:4317"))
