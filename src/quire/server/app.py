"""The ASGI application: routes, middleware, start and end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import QueueFullError, QuireError
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tracing import TRACE_HEADERS
from quire.logs import current_request_id, get_logger
from quire.metrics import log_line
from quire.metrics.prometheus import PrometheusMetrics
from quire.server import (
    chat_batch,
    config_api,
    development,
    health,
    invocations,
    loop_lag,
    lora_admin,
    messages,
    models,
    openapi,
    page,
    responses,
    steps,
    timeline,
    tokenization,
)
from quire.server.auth import PUBLIC_PATHS, AccessControl, check_api_keys
from quire.server.chat import chat_completions, render_chat
from quire.server.completions import completions
from quire.server.cors import cors_middleware
from quire.server.errors import error_response, internal_error_body, on_http_exception, on_quire_error
from quire.server.http_metrics import CountRequests
from quire.server.state import (
    REQUEST_ID_KEY,
    AppSettings,
    ServerState,
    new_request_id,
    sane_request_id,
    trace_headers,
)

logger = get_logger(__name__)

# The endpoints that generate. Requests to them pass the queue of the door.
GENERATION = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/chat/completions/batch": chat_batch.batch,
    "/invocations": invocations.invocations,
    "/v1/messages": messages.messages,
    "/v1/responses": responses.create,
}


def create_app(
    engine: AsyncEngine, tokenizer: Tokenizer | None, settings: AppSettings, metrics: PrometheusMetrics | None = None
) -> Starlette:
    """The server for one engine.

    Args:
        engine: it need not be started or ready. /readyz says when it is ready.
        tokenizer: the tokenizer of the engine; None: prompts and outputs are only token ids.
        metrics: the object that the engine's output processor has too; None: there is no /metrics and no statistics
            line.
    Raises:
        ConfigError: the chat template is not valid, or a setting is illegal.
    """
    check_api_keys(settings.api_keys)
    state = ServerState(engine, tokenizer, settings, metrics)
    routes = _routes(state)
    middleware = [
        Middleware(RequestContext, state=state),
        *cors_middleware(settings.server),
        Middleware(
            AccessControl,
            api_keys=settings.api_keys,
            allowed_hosts=settings.allowed_hosts,
            keyless_paths=["/metrics"] if settings.server.prometheus_public else [],
        ),
        Middleware(Door, state=state, queued_paths={*GENERATION, *openapi.ALIASES}),
    ]
    if metrics is not None:
        middleware.insert(0, Middleware(CountRequests, metrics=metrics.http, routes=routes))
    if root_path := settings.server.root_path:
        middleware.insert(0, Middleware(StripPrefix, prefix=root_path))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            QuireError: on_quire_error,
            HTTPException: on_http_exception,
            ClientDisconnect: _on_disconnect,
        },
        lifespan=_lifespan(state),
    )
    app.router.redirect_slashes = False
    app.state.quire = state
    return app


def _routes(state: ServerState) -> list[Route]:
    settings = state.settings
    routes = [
        *page.routes(settings.server.root_path),
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in GENERATION.items()),
        *(Route(alias, GENERATION[path], methods=["POST"]) for alias, path in openapi.ALIASES.items()),
        Route("/v1/chat/completions/render", render_chat, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
        Route("/v1/responses/input_tokens", responses.count_tokens, methods=["POST"]),
        Route("/v1/responses/{response_id}", responses.stored, methods=["GET", "DELETE"]),
        Route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/models", models.list_models, methods=["GET"]),
        Route("/v1/config", config_api.config, methods=["GET", "POST"]),
        Route("/v1/steps", steps.get_steps, methods=["GET"]),
        Route("/v1/models/{model:path}", models.get_model, methods=["GET"]),
        Route("/v1/requests/{request_id}/timeline", timeline.get_timeline, methods=["GET"]),
        Route("/tokenize", tokenization.tokenize, methods=["POST"]),
        Route("/detokenize", tokenization.detokenize, methods=["POST"]),
        Route("/ping", health.health, methods=["GET", "POST"]),
        Route("/load", health.load, methods=["GET"]),
        Route("/health", health.health, methods=["GET"]),
        Route("/livez", health.livez, methods=["GET"]),
        Route("/readyz", health.readyz, methods=["GET"]),
        Route("/metrics", health.metrics, methods=["GET"]),
        Route("/version", health.version, methods=["GET"]),
        *openapi.routes(state),
    ]
    if settings.changes_adapters:
        routes += lora_admin.routes()
    if settings.is_development:
        routes += development.routes()
    if settings.server.enable_tokenizer_info_endpoint:
        routes.append(Route("/tokenizer_info", tokenization.tokenizer_info, methods=["GET"]))
    return routes


class StripPrefix:
    """ASGI middleware around everything. It removes a proxy's prefix from the path, so that all parts see one path.

    Access control must see this path too: it and the routes must never disagree about the path of a request.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, prefix = scope.get("path", ""), self._prefix
        if path == prefix or path.startswith(prefix + "/"):
            scope = {**scope, "path": path[len(prefix) :] or "/"}
            scope.pop("raw_path", None)  # an optional key, which may spell the prefix otherwise
        await self._app(scope, receive, send)


class RequestContext:
    """ASGI middleware around everything. It gives every request an id, and answers every unexpected exception.

    It also closes some connections after an answer. While the server drains, it closes all of them. Otherwise it closes
    a connection if the client expects 100-continue and got its answer before its body was asked for. Then the body may
    still come or not, so the meaning of the next bytes is unknown.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))  # if several headers have one name, the first one counts
        given = headers.get(b"x-request-id")
        request_id = sane_request_id(None if given is None else given.decode("latin-1")) or new_request_id()
        scope[REQUEST_ID_KEY] = request_id
        current_request_id.set(request_id)
        trace_headers.set(
            {name: headers[name.encode()].decode("latin-1") for name in TRACE_HEADERS if name.encode() in headers}
        )
        id_header = (b"x-request-id", request_id.encode())
        is_body_held = (b"expect", b"100-continue") in ((name, value.lower()) for name, value in scope["headers"])
        has_started = False

        async def receive_body() -> Message:
            nonlocal is_body_held
            is_body_held = False
            return await receive()

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message["headers"], id_header]
                if self._state.is_draining or is_body_held:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            await self._app(scope, receive_body, send_with_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            if not has_started:
                response = Response(internal_error_body(request_id, scope["path"]), 500, media_type="application/json")
                await response(scope, receive, send_with_id)


class Door:
    """ASGI middleware that refuses a request before its body is read, if the server has no room for it.

    The rest of a refused body is read and dropped, so that the connection can be used again.
    """

    def __init__(self, app: ASGIApp, state: ServerState, queued_paths: Collection[str]) -> None:
        self._app, self._state, self._queued_paths = app, state, queued_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] not in PUBLIC_PATHS:
            try:
                self._state.check_accepting()
                if scope["path"] in self._queued_paths:
                    self._state.engine.check_room()
            except QuireError as error:
                if isinstance(error, QueueFullError):
                    await asyncio.sleep(self._state.engine.refusals.delay(time.monotonic()))
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """Answer a client that has left. No client reads this answer; 499 is nginx's status for this case."""
    return Response(status_code=499)


def _lifespan(state: ServerState) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if state.settings.owns_engine:
            state.engine.start()
        tasks = []
        if state.metrics is not None:
            series = state.metrics.engines
            tasks.append(asyncio.create_task(loop_lag.watch(series[0].on_event_loop_lag)))
            if state.settings.log_stats_interval > 0:
                lines = [engine.stats_line for engine in series]
                tasks.append(asyncio.create_task(log_line.log_forever(lines, state.settings.log_stats_interval)))
        try:
            yield
        finally:
            state.is_draining = True
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
            await state.close()
            if state.settings.owns_engine:
                await state.engine.shutdown()

    return lifespan
