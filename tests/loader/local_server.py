"""A server on this machine that answers while a `with` lasts."""

from __future__ import annotations

import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self


class LocalServer(ThreadingHTTPServer):
    """On a free port.

    Args:
        pems: (certificate, key): it speaks https://.
    """

    daemon_threads = True
    request_queue_size = 64  # readers connect at once; a connection that finds no place in a queue of 5 comes after 1 s

    def __init__(self, handler: type[BaseHTTPRequestHandler], pems: tuple[Path, Path] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._tls = None
        if pems:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(*pems)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, True
        )  # else a body waits 40 ms behind its headers
        if self._tls:  # shakes hands when its thread reads
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.server_address[1]}"
