"""A small streaming client of an OpenAI-compatible server for the terminal, over the standard library's HTTP."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from quire import envs
from quire.chat.model import Piece
from quire.cli.flags import Parser
from quire.errors import ConfigError, QuireError
from quire.screen.terminal import without_controls

DEFAULT_URL = "http://localhost:8000/v1"
TIMEOUT_SECONDS = 600.0
_KEY_STATUS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_KEY_FIX = "Give the server's key with --api-key, or set VLLM_API_KEY"


class ServerUnreachableError(QuireError):
    """No server answers at the address."""

    code, status = "server_unreachable", 503


class ServerAnswerError(QuireError):
    """The server answered with an error."""

    code, status = "server_error", 502


class NoApiError(ServerAnswerError):
    """A program answers at the address, but it does not serve models."""


def add_client_flags(parser: Parser) -> None:
    parser.add_argument("--url", help=f"base URL of the API (default: {DEFAULT_URL})")
    parser.add_argument("--model-name", help="model to ask (default: the first one served)")
    parser.add_argument("--api-key", dest="client_key", help="API key (default: VLLM_API_KEY)")
    parser.secret_names.add("client_key")


class Client:
    """A client of one server. Every call opens its own connection.

    Args:
        url: the base URL of the API; None: the default URL.
        model: the name of a model of the server; None: its first model.
        api_key: the key; None: the value of VLLM_API_KEY.
        patience: the seconds in which the server must name its models, if it is asked for them.

    Raises:
        ConfigError: the URL is malformed.
        NoApiError: the server does not list models.
        ServerUnreachableError: no server answers.
        ServerAnswerError: the server refuses.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        model: str | None = None,
        api_key: str | None = None,
        patience: float = TIMEOUT_SECONDS,
    ) -> None:
        self._url = url or DEFAULT_URL
        parts, port = _split(self._url)
        self._make = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port, self._path = parts.hostname or "", port, parts.path.rstrip("/")
        key = api_key or envs.API_KEY.get()
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.name = model or self._first_model(patience)

    def _first_model(self, patience: float) -> str:
        no_api = NoApiError(
            "The server at this URL does not list its models", value=self._url, expected="an OpenAI-compatible API"
        )
        try:
            return str(json.loads(b"".join(self._lines("GET", "/models", None, patience)))["data"][0]["id"])
        except ServerAnswerError as error:
            raise (no_api if error.value == HTTPStatus.NOT_FOUND else error) from None
        except (ValueError, LookupError, TypeError, RecursionError):
            raise no_api from None

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Nothing: only the server knows the defaults."""
        return {}

    def answer(
        self, messages: Sequence[Mapping[str, str]], parameters: Mapping[str, Any]
    ) -> Generator[Piece, None, None]:
        """See ChatModel. Closing the generator closes the connection, so the server stops."""
        with closing(self.stream("/chat/completions", {"messages": messages, **parameters})) as chunks:
            for chunk in chunks:
                yield from _pieces(chunk)

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of a streamed completion."""
        request = {"model": self.name, "stream": True} | body
        with closing(self._lines("POST", path, json.dumps(request).encode(), TIMEOUT_SECONDS)) as lines:
            for line in lines:
                field, _, data = line.partition(b":")
                if field == b"data" and data.strip() != b"[DONE]":
                    yield _chunk(data)

    def _lines(self, method: str, path: str, body: bytes | None, timeout: float) -> Generator[bytes, None, None]:
        connection = self._make(self._host, self._port, timeout=timeout)
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                fix = _KEY_FIX if response.status in _KEY_STATUS else None
                raise ServerAnswerError(_error_message(response.read()), value=response.status, fix=fix)
            yield from response
        except (OSError, HTTPException) as error:
            raise ServerUnreachableError(
                "No server answers", value=self._url, fix="Start one with `quire serve`, or name it with --url"
            ) from error
        finally:
            connection.close()


def _split(url: str) -> tuple[SplitResult, int | None]:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts, parts.port
    except ValueError:  # the port or the brackets of the URL are wrong
        pass
    raise ConfigError("The URL is not one of an API", value=url, expected=f"such as {DEFAULT_URL}", param="url")


def _chunk(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        chunk = None
    if not isinstance(chunk, dict):
        raise ServerAnswerError("The server's stream has a line that is not a JSON object", value=data)
    if "error" in chunk:
        raise ServerAnswerError(_error_message(data))
    return chunk


def _pieces(chunk: dict[str, Any]) -> list[Piece]:
    try:
        choices = chunk.get("choices") or ()  # the last chunk, which has the usage, has no choices
        return [Piece(choice["delta"].get("content") or "", choice.get("finish_reason")) for choice in choices]
    except (LookupError, TypeError, AttributeError):
        raise ServerAnswerError("The server's stream has an object that is not a part of a chat", value=chunk) from None


def _error_message(body: bytes) -> str:
    try:
        return without_controls(str(json.loads(body)["error"]["message"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return "The server refused the request"
