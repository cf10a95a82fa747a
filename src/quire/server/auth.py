"""Access control: API keys for every route except the page and the probes, and the allowed host names."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import ConfigError
from quire.server import page
from quire.server.errors import HttpError, error_response

# All other paths need the key, also paths that do not exist. So a route that is added later is guarded too.
# The page at / and its files are the same for everybody and hold no data: it asks its reader for the key.
PUBLIC_PATHS = frozenset(("/", "/health", "/livez", "/ping", "/readyz", *page.FILES))
MAY_BE_TOLD = "quire.may_be_told"  # the key in the scope of such a path: whether the caller may open the other paths


def check_api_keys(api_keys: Sequence[str]) -> None:
    """Raise ConfigError for a key that no client could send."""
    if any(not key or key != key.strip() or not key.isprintable() for key in api_keys):
        raise ConfigError(
            "An API key is empty, or has spaces around it or control characters",
            fix="Set --api-key anew",
            param="api_key",
        )


class AccessControl:
    """ASGI middleware for access control. It uses the raw path of the scope, never a URL that headers could change."""

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
        keyless_paths: Sequence[str] = (),
    ) -> None:
        """Guard `app`.

        Args:
            api_keys: each of them opens every route. Without keys, the server is open.
            allowed_hosts: the host names (without port) that a request may have; empty: all. This protects against web
                pages that make a browser talk to a loopback server under their own name (DNS rebinding).
            keyless_paths: paths that need no key if the operator wants that. Unlike PUBLIC_PATHS, they show facts about
                the server.
        """
        self._app = app
        self._key_hashes = [_hash(key.encode()) for key in api_keys]
        self._keyless_paths = frozenset(keyless_paths)
        self._allowed_hosts = frozenset(host.lower().strip("[]") for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] in PUBLIC_PATHS:
            headers = scope["headers"]
            scope[MAY_BE_TOLD] = self._is_host_allowed(headers) and self._has_key(headers)
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # there is no such route
        elif not self._is_host_allowed(scope["headers"]):
            error = HttpError(
                403,
                "host_not_allowed",
                "The Host header names a host for which this server does not answer",
                expected="one of " + ", ".join(sorted(self._allowed_hosts)),
            )
            await error_response(error, scope["path"])(scope, receive, send)
        elif scope["path"] not in self._keyless_paths and not self._has_key(scope["headers"]):
            error = HttpError(
                401,
                "invalid_api_key",
                "The API key is missing or wrong",
                expected="the header Authorization: Bearer <key>, or x-api-key: <key>",
            )
            await error_response(error, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _has_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        if not self._key_hashes:
            return True
        given: dict[bytes, bytes] = {}
        for name, value in headers:
            if name in (b"authorization", b"x-api-key"):
                if name in given:
                    return False
                given[name] = value
        scheme, _, bearer = given.get(b"authorization", b"").partition(b" ")
        keys = [bearer if scheme.lower() == b"bearer" else b"", given.get(b"x-api-key", b"")]
        # All keys are compared, so that the time of the comparison tells nothing about the keys.
        matches = [hmac.compare_digest(_hash(key.strip()), known) for key in keys for known in self._key_hashes]
        return any(matches)

    def _is_host_allowed(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        if not self._allowed_hosts:
            return True
        given = [value for name, value in headers if name == b"host"]
        return len(given) == 1 and _host_name(given[0].decode("latin-1")) in self._allowed_hosts


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _host_name(host: str) -> str:
    """The name in a Host header, without the port and without the brackets of an IPv6 address."""
    name, separator, port = host.rpartition(":")
    return (name if separator and port.isdigit() else host).lower().strip("[]")
