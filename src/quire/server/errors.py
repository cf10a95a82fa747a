"""Every error in the shape of its API: status, type and code from the exception, nothing internal in the text."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import (
    EngineRestartedError,
    NotReadyError,
    OutOfMemoryError,
    ProcessLostError,
    QueueFullError,
    QuireError,
    ShuttingDownError,
)
from quire.server.protocol.common import ErrorBody, ErrorDetail
from quire.server.protocol.messages import MessagesError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = {**_TYPES, 413: "request_too_large", 503: "overloaded_error"}
# Codes of the HTTP layer itself, with their statuses; the others belong to the classes of quire.errors.
HTTP_CODES = {
    "bad_http": 400,
    "cors_refused": 400,
    "invalid_api_key": 401,
    "host_not_allowed": 403,
    "unknown_route": 404,
    "request_not_found": 404,
    "response_not_found": 404,
    "metrics_disabled": 404,
    "method_not_allowed": 405,
    "body_timeout": 408,
    "headers_timeout": 408,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "headers_too_large": 431,
}
_NOT_READY_RETRY_SECONDS = 5
_JSON = "application/json"


class HttpError(QuireError):
    """An error of the HTTP layer itself. The code that raises it gives its status and its code."""

    def __init__(
        self, status: int, code: str, what: str, *, expected: str | None = None, fix: str | None = None
    ) -> None:
        assert HTTP_CODES.get(code) == status, f"{code} with status {status} is not in the table"
        super().__init__(what, expected=expected, fix=fix)
        self.http_status, self.http_code = status, code


def is_anthropic(path: str) -> bool:
    """Whether the errors of a route have Anthropic's shape."""
    return path.startswith("/v1/messages")


def error_body(error: QuireError, path: str = "") -> bytes:
    """The JSON body for an error. `path`: the path of the request; it decides the shape."""
    status, code = _status_and_code(error)
    return _encode(path, status, code, error.message, error.param)


def error_response(error: QuireError, path: str = "") -> Response:
    status, _ = _status_and_code(error)
    headers = {}
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(error.retry_after_seconds or 1)
    elif isinstance(
        error, (NotReadyError, EngineRestartedError, ShuttingDownError, OutOfMemoryError, ProcessLostError)
    ):
        headers["retry-after"] = str(_NOT_READY_RETRY_SECONDS)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error, path), status, headers, _JSON)


def internal_error_body(request_id: str, path: str) -> bytes:
    """The body for an unexpected exception. It names the id of the request, under which the log has the exception."""
    message = f"Internal error. The server's log has it under request id {request_id}."
    return _encode(path, 500, "internal_error", message, None)


async def on_quire_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    return error_response(error, request.scope["path"])


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answer Starlette's own errors: an unknown route or a wrong method. There are no others."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        code = "unknown_route"
        message = "No such route. GET /docs lists all routes. One is POST /v1/chat/completions."
    elif error.status_code == 405:
        code = "method_not_allowed"
        message = f"This route does not take this method. Use {(error.headers or {}).get('Allow', 'another method')}."
    else:
        raise error
    body = _encode(request.scope["path"], error.status_code, code, message, None)
    return Response(body, error.status_code, error.headers, _JSON)


def _status_and_code(error: QuireError) -> tuple[int, str]:
    if isinstance(error, HttpError):
        return error.http_status, error.http_code
    return error.status, error.code


def _encode(path: str, status: int, code: str, message: str, param: str | None) -> bytes:
    if is_anthropic(path):
        kind = _ANTHROPIC_TYPES.get(status, "api_error")
        return msgspec.json.encode(MessagesError(error=ErrorDetail(message=message, type=kind, param=param, code=code)))
    kind = _TYPES.get(status, "server_error")
    return msgspec.json.encode(ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code)))
