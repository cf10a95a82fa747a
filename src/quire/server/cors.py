"""Cross-origin requests: which web pages may call this server from a browser. None, unless the operator names them."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from quire.server.errors import HttpError, error_response

EXPOSED_HEADERS = ("retry-after", "x-quire-ignored-fields", "x-request-id")


@dataclass(frozen=True)
class CorsRules:
    """What pages of other origins may do; "*" stands for any."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False

    def middleware(self) -> list[Middleware]:
        """Nothing unless there are origins: then no answer has a CORS header, and browsers keep pages out."""
        if not self.origins:
            return []
        rules = Middleware(
            _Cors,
            allow_origins=self.origins,
            allow_methods=self.methods,
            allow_headers=self.headers,
            allow_credentials=self.allow_credentials,
            expose_headers=EXPOSED_HEADERS,
        )
        return [rules]


class _Cors(CORSMiddleware):
    """Starlette's, with refusals in the shape of every other error."""

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
