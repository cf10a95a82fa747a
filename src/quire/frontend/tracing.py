"""OTLP traces: a span for each request, with the name and the attributes that vLLM gives it. Needs `quire[otel]`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from threading import Thread
from typing import TYPE_CHECKING

from quire import __version__, envs
from quire.config import EngineConfig
from quire.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from quire.frontend.request_state import RequestState

TRACE_HEADERS = ("traceparent", "tracestate")  # W3C Trace Context
SPAN_NAME = "llm_request"
CLOSE_SECONDS = 2.0


def check_installed(config: EngineConfig) -> None:
    """Raise ConfigError if traces are asked for, and OpenTelemetry is not there."""
    kind = "grpc" if envs.OTLP_TRACES_PROTOCOL.get() == "grpc" else "http"
    packages = ("opentelemetry.sdk", f"opentelemetry.exporter.otlp.proto.{kind}")
    if config.otlp_traces_endpoint is not None and not all(map(_is_there, packages)):
        raise ConfigError(
            "Traces need OpenTelemetry, which is not installed",
            value=config.otlp_traces_endpoint,
            expected=f"the packages {' and '.join(packages)}",
            fix='Install them: pip install "quire[otel]"',
            param="otlp_traces_endpoint",
        )


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it is missing too
        return False


def request_tracer(config: EngineConfig, model_name: str) -> RequestTracer | None:
    """The tracer that the setting asks for."""
    endpoint = config.otlp_traces_endpoint
    names = config.served_model_name or (model_name,)
    return None if endpoint is None else RequestTracer(endpoint, names[0])


class RequestTracer:
    """Sends spans to a collector, in batches and in a thread of its own.

    A span that cannot be sent is dropped with a warning.

    OpenTelemetry's own variables hold here: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER,
    OTEL_EXPORTER_OTLP_HEADERS and the others of its SDK.

    Args:
        endpoint: the endpoint of the collector: `http://host:4317` for gRPC, `http://host:4318/v1/traces` for HTTP.
        model_name: the name of the base model.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model_name, self._trace = model_name, trace
        resource = Resource.create({SERVICE_NAME: "quire"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("quire", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def on_ended(self, request: RequestState) -> None:
        """Every continuation of the request has ended."""
        processed, times = request.processed, request.metrics
        parent = self._propagator.extract(dict(processed.trace_headers)) if processed.trace_headers else None
        start = request.timeline.arrived_at
        span = self._tracer.start_span(
            SPAN_NAME,
            parent,
            self._trace.SpanKind.SERVER,
            _attributes(request, self._model_name),
            start_time=_ns(start),
        )
        if any(child.finish_reason == "error" for child in request.continuations):
            span.set_status(self._trace.StatusCode.ERROR)
        assert times.finished_time is not None
        span.end(_ns(start + times.finished_time - times.arrival_time))

    def close(self) -> None:
        """Send what waits; a collector that does not answer in time is left alone."""
        sending = Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        sending.start()
        sending.join(CLOSE_SECONDS)


def _exporter(endpoint: str) -> SpanExporter:
    if envs.OTLP_TRACES_PROTOCOL.get() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint, insecure=True if endpoint.startswith("http://") else None)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint)


def _attributes(request: RequestState, model_name: str) -> Mapping[str, str | int | float | list[str]]:
    """The attributes of a span: sizes in tokens, times in seconds. Times that a request did not reach are left out."""
    processed, times = request.processed, request.metrics
    params = processed.sampling_params
    known: dict[str, str | int | float | list[str] | None] = {
        "gen_ai.response.model": model_name if processed.adapter is None else processed.adapter.name,
        "gen_ai.response.finish_reasons": [child.finish_reason or "abort" for child in request.continuations],
        "gen_ai.request.id": processed.request_id,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": processed.requests[0].max_tokens,
        "gen_ai.usage.num_sequences": len(request.continuations),
        "gen_ai.usage.prompt_tokens": len(processed.prompt_token_ids),
        "gen_ai.usage.cached_tokens": request.num_cached_tokens,
        "gen_ai.usage.completion_tokens": sum(child.num_tokens for child in request.continuations),
    }
    arrival, scheduled, first = times.arrival_time, times.first_scheduled_time, times.first_token_time
    for name, since, until in (
        ("time_in_queue", arrival, scheduled),
        ("time_to_first_token", arrival, first),
        ("e2e", arrival, times.finished_time),
        ("time_in_model_prefill", scheduled, first),
        ("time_in_model_decode", first, times.last_token_time),
        ("time_in_model_inference", scheduled, times.last_token_time),
    ):
        known[f"gen_ai.latency.{name}"] = None if since is None or until is None else max(until - since, 0.0)
    return {name: value for name, value in known.items() if value is not None}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
