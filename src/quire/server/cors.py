"""Cross-origin requests (CORS): which web pages may call this server from a browser. By default, none may."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from quire.server.errors import HttpError, error_response
from quire.settings import ServerSettings

EXPOSED_HEADERS = ("retry-after", "x-quire-ignored-fields", "x-request-id")


def cors_middleware(settings: ServerSettings) -> list[Middleware]:
    """The middleware for CORS; none without allowed origins. Then no answer has a CORS header, and browsers refuse."""
    if not settings.allowed_origins:
        return []
    rules = Middleware(
        _Cors,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=EXPOSED_HEADERS,
    )
    return [rules]


class _Cors(CORSMiddleware):
    """Starlette's CORS middleware, but its refusals have the shape of all other errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        error = HttpError(
            400,
            "cors_refused",
            "A page of this origin may not send this request",
            fix="Start the server with --allowed-origins, --allowed-methods and --allowed-headers that admit it",
        )
        refusal = error_response(error)
        refusal.headers["vary"] = response.headers.get("vary", "Origin")
        return refusal
