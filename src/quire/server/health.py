"""GET /livez, /readyz, /health (= /ping), /load, /version and /metrics: for probes, load balancers and Prometheus."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.errors import EngineDeadError, QuireError
from quire.server.auth import MAY_BE_TOLD
from quire.server.errors import HttpError, error_response
from quire.server.protocol.common import ErrorDetail
from quire.server.state import ServerState, state_of

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Starting(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The reason why the server is not ready: the phase of the start, and how much of it is done. Phases are download,
    load, pack and warm up; after a failure, restart comes before them. `failure` says why the last engine failed; only
    callers with a key see it."""

    error: ErrorDetail
    phase: str
    fraction: float
    detail: str
    failure: str | None = None


async def livez(request: Request) -> Response:
    """Answer 200 as long as this process runs."""
    return _json(b'{"status":"ok"}')


async def readyz(request: Request) -> Response:
    """Answer 200 if a real token has been produced and the server takes requests; before, 503 with the phase."""
    state = state_of(request)
    try:
        state.check_accepting()
        state.engine.check_running()
    except QuireError as error:
        return _unavailable(request, state, error)
    return _json(b'{"status":"ready"}')


def _unavailable(request: Request, state: ServerState, error: QuireError) -> Response:
    """The answer 503, with the phase if the engine is starting."""
    response = error_response(error)
    progress = state.engine.progress
    if state.engine.error is None and progress is not None:
        detail = ErrorDetail(message=error.message, type="service_unavailable_error", param=None, code=error.code)
        body = Starting(
            error=detail,
            phase=progress.phase,
            fraction=progress.fraction,
            detail=progress.detail,
            failure=state.engine.failure if request.scope.get(MAY_BE_TOLD) else None,
        )
        return Response(
            msgspec.json.encode(body), 503, {"retry-after": response.headers["retry-after"]}, "application/json"
        )
    return response


async def health(request: Request) -> Response:
    """Answer 200 while steps end in time; 503 if the engine is not ready yet, stuck or gone."""
    state = state_of(request)
    if state.engine.is_healthy:
        return _json(b'{"status":"ok"}')
    try:
        state.engine.check_running()
    except QuireError as error:
        return _unavailable(request, state, error)
    return error_response(EngineDeadError("The engine does not answer in time", fix="Retry in a few seconds"))


async def load(request: Request) -> Response:
    """Answer with the number of requests that wait or run here, for load balancers."""
    return _json(msgspec.json.encode({"server_load": state_of(request).engine.num_unfinished}))


async def version(request: Request) -> Response:
    return _json(msgspec.json.encode({"version": __version__}))


async def metrics(request: Request) -> Response:
    """Answer with all metrics in Prometheus' text format."""
    state = state_of(request)
    if state.metrics is None:
        raise HttpError(404, "metrics_disabled", "This server keeps no metrics")
    return Response(state.metrics.render(), headers={"content-type": METRICS_CONTENT_TYPE})


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
