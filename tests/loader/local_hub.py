"""As much of the hub's protocol as a snapshot download uses, on this machine: one model, `small/model`."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from tests.loader.local_server import LocalServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BUFFER_BYTES = 1 << 16  # asked for, per connection; the system doubles it


class Hub(LocalServer):
    """As much of the hub's protocol as a snapshot download uses."""

    def __init__(self, files: Mapping[str, bytes], chunk_bytes: int = 1 << 30, chunk_seconds: float = 0.0) -> None:
        super().__init__(HubHandler)
        self.files, self.chunk_bytes, self.chunk_seconds = files, chunk_bytes, chunk_seconds
        self.paths: list[str] = []
        self.knows_ranges = True
        self.num_bytes = 0  # of files, sent or in the buffers of a connection
        self._lock = threading.Lock()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)  # of every connection

    def count(self, num_bytes: int) -> None:
        with self._lock:  # every request has a thread
            self.num_bytes += num_bytes


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def respond(self, status: int, body: bytes = b"", is_file: bool = False, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            for start in range(0, len(body), self.server.chunk_bytes):
                chunk = body[start : start + self.server.chunk_bytes]
                self.server.count(len(chunk) if is_file else 0)
                try:
                    self.wfile.write(chunk)
                except ConnectionError:  # the client has what it wants
                    return
                time.sleep(self.server.chunk_seconds)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.paths.append(f"{self.command} {path}")
        if "/gated" in path:
            self.respond(403, b"{}", X_Error_Code="GatedRepo", X_Error_Message="Access restricted")
        elif "small/model" not in path:
            self.respond(404, b"{}", X_Error_Code="RepoNotFound")
        elif path.startswith("/api/") and "/revision/" in path and not path.endswith("/revision/main"):
            self.respond(404, b"{}", X_Error_Code="RevisionNotFound")
        elif path.startswith("/api/") and "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in self.server.files.items()
            ]
            self.respond(200, json.dumps(tree).encode(), Content_Type="application/json")
        elif path.startswith("/api/"):
            info = {"id": "small/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.server.files]}
            self.respond(200, json.dumps(info).encode(), Content_Type="application/json")
        else:
            data = self.server.files[re.split(rf"/resolve/(?:{COMMIT}|main)/", path)[1]]
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range") or "")
            if wanted is not None and self.command == "GET" and self.server.knows_ranges:
                piece = data[int(wanted[1]) : int(wanted[2]) + 1]
                self.respond(206, piece, is_file=True, Content_Range=f"bytes {wanted[1]}-{wanted[2]}/{len(data)}")
                return
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            self.respond(200, data, is_file=True, ETag=etag, X_Repo_Commit=COMMIT)

    do_HEAD = do_GET
