"""A small streaming client of an OpenAI-compatible server for the terminal, over the standard library's HTTP."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from quire import envs
from quire.errors import QuireError

TIMEOUT_SECONDS = 600.0


class ServerUnreachableError(QuireError):
    """No server answers at the address."""

    code, status = "server_unreachable", 503


class ServerAnswerError(QuireError):
    """The server answered with an error."""

    code, status = "server_error", 502


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://localhost:8000/v1", help="base URL of the API (default: %(default)s)")
    parser.add_argument("--model-name", help="model to ask (default: the first one served)")
    parser.add_argument("--api-key", help="API key (default: VLLM_API_KEY)")


class Client:
    """Talks to one server; every call opens its own connection."""

    def __init__(self, args: argparse.Namespace) -> None:
        parts = urlsplit(args.url)
        self._make = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port, self._path = parts.hostname or "localhost", parts.port, parts.path.rstrip("/")
        self._url = args.url
        key = args.api_key or envs.API_KEY.get()
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.model: str = args.model_name or self._first_model()

    def _first_model(self) -> str:
        models = json.loads(b"".join(self._lines("GET", "/models", None)))
        return str(models["data"][0]["id"])

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed completion."""
        request = {"model": self.model, "stream": True} | body
        for line in self._lines("POST", path, json.dumps(request).encode()):
            data = line.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]":
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerAnswerError(chunk["error"]["message"])
                yield chunk

    def _lines(self, method: str, path: str, body: bytes | None) -> Iterator[bytes]:
        connection = self._make(self._host, self._port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ServerAnswerError(_error_message(response.read()), value=response.status)
            yield from response
        except (OSError, HTTPException) as error:
            raise ServerUnreachableError(
                "No server answers", value=self._url, fix="Start one with `quire serve`, or name it with --url"
            ) from error
        finally:
            connection.close()


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "The server refused the request"
