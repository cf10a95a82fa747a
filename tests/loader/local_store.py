"""As much of S3's protocol as reading a folder uses, on this machine, with the faults of a bad network."""

from __future__ import annotations

import hashlib
import io
import re
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.loader.local_server import LocalServer

SECRET = "a-secret-of-this-test"
# What a fault does to one answer: the request's number for its object -> its name, or None.
Fault = Callable[[int], str | None]


class Store(LocalServer):
    """Objects by key, in the bucket `models`.

    Attributes:
        faults: the fault of each object, by key.
        reads: (key, Range header) of every request for an object.
        signed: the reads by a signed URL.
        signed_fault: the fault of all signed reads; None: there is none.
        modified: the time at which all objects were written.
        knows_ranges: whether parts of objects can be read. If not, every answer is the whole object.
        num_connections: the number of connections that were made.
    """

    def __init__(self, objects: Mapping[str, bytes], pems: tuple[Path, Path] | None = None) -> None:
        super().__init__(StoreHandler, pems)
        self.objects = dict(objects)
        self.etags: dict[str, str] = {}
        self.faults: dict[str, Fault] = {}
        self.reads: list[tuple[str, str | None]] = []
        self.signed: list[tuple[str, str | None]] = []
        self.signed_fault: str | None = None
        self.modified = "2026-01-01T00:00:00.000Z"
        self.is_open, self.has_etags, self.knows_ranges = True, True, True
        self.num_connections = 0
        self.is_waiting, self.is_left = threading.Event(), threading.Event()  # an answer waits; answers end

    def environment(self, cache: Path) -> dict[str, str]:
        """The environment variables by which a reader finds this store."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "an-access-key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "QUIRE_CACHE_DIR": str(cache),
        }

    def etag(self, key: str) -> str:
        return self.etags.get(key) or hashlib.md5(self.objects[key]).hexdigest()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.num_connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is no error."""


class StoreHandler(BaseHTTPRequestHandler):
    server: Store
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def respond(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body) if length is None else length), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        key = unquote(url.path).removeprefix("/models/")
        if not self.server.is_open:
            self.respond(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif "list-type" in url.query:
            self.list(parse_qs(url.query)["prefix"][0])
        elif key not in self.server.objects:
            self.respond(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self.send(key)

    def list(self, prefix: str) -> None:
        found = [key for key in self.server.objects if key.startswith(prefix)]
        files = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{self.server.modified}</LastModified>"
            + f'<ETag>"{self.server.etag(key)}"</ETag>' * self.server.has_etags
            + f"<Size>{len(self.server.objects[key])}</Size></Contents>"
            for key in found
            if "/" not in key.removeprefix(prefix)
        )
        text = f"<ListBucketResult><Name>models</Name><Prefix>{prefix}</Prefix><KeyCount>{len(found)}</KeyCount>"
        self.respond(200, f"{text}<IsTruncated>false</IsTruncated>{files}</ListBucketResult>".encode())

    def send(self, key: str) -> None:
        wanted = self.headers.get("Range")
        self.server.reads.append((key, wanted))
        number = sum(each == key for each, _ in self.server.reads) - 1
        fault = self.server.faults[key](number) if key in self.server.faults else None
        if "?" in self.path:
            self.server.signed.append((key, wanted))
            fault = self.server.signed_fault or fault
        data, etag = self.server.objects[key], f'"{self.server.etag(key)}"'
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted or "")
        begin, end = (int(match[1]), min(int(match[2]) + 1, len(data))) if match else (0, len(data))
        piece = data[begin:end]
        headers = {
            "ETag": etag,
            "Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            "Content_Range": f"bytes {begin}-{end - 1}/{len(data)}",
        }
        if not self.server.has_etags:
            del headers["ETag"]
        if not self.server.knows_ranges:
            self.respond(200, data, ETag=etag)
            return
        match fault:
            case "503":
                self.respond(503, b"<Error><Code>SlowDown</Code></Error>")
            case "403":
                self.respond(403, b"<Error><Code>AccessDenied</Code></Error>")
            case "200":
                self.respond(200, piece, **headers)
            case "redirect":
                self.respond(307, Location=f"{self.server.url}/models/elsewhere")
            case "range":
                self.respond(206, piece, **headers | {"Content_Range": f"bytes {begin + 1}-{end}/{len(data)}"})
            case "slow":
                self.respond(206, piece[:1], length=len(piece), **headers)
                self.server.is_waiting.set()
                self.server.is_left.wait(10)
                self.close_connection = True
            case "together":
                connection, self.wfile = self.wfile, io.BytesIO()
                self.respond(206, piece, **headers)
                connection.write(self.wfile.getvalue())
                self.wfile = connection
            case "last":
                self.respond(206, piece, **headers | {"Connection": "close"})
            case _ if fault == "changed" or self.headers.get("If-Match") not in (None, etag):
                self.respond(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            case "cut":
                self.respond(206, piece[: len(piece) // 2], length=len(piece), **headers)
                self.close_connection = True
            case "short":
                self.respond(206, piece[:-1], **headers)
            case "damaged":
                self.respond(206, bytes([piece[0] ^ number + 1]) + piece[1:], **headers)
            case "another":
                self.respond(206, piece, **headers | {"ETag": '"another"'})
            case "endless":
                self.send_response(206)
                for name, value in {**headers, "Content_Length": str(1 << 60)}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                while True:  # until the client closes the connection
                    self.wfile.write(bytes(1 << 16))
            case _:
                self.respond(206, piece, **headers)
