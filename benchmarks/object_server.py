"""A server of S3's protocol for benchmarks: one model whose header is real and whose weights are zeros.

It takes little of the processor: the system sends zeros from its page cache. It may be as slow as a network. With TLS
the zeros are encrypted in this process, by the same cores.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

FOLDER = "s3://models/shape"
ZEROS = bytes(8 << 20)  # are sent again and again
PACED = 256 << 10  # the bytes between two looks at the clock
BURST_SECONDS = 0.002  # after a delay, the network sends faster until it has made up for this time
# Layers, hidden size, size of the MLP, outputs of q, outputs of k, and whether the head is the embedding.
SHAPES = {
    "Qwen3-0.6B": (28, 1024, 3072, 2048, 1024, True),
    "Qwen3-8B": (36, 4096, 12288, 4096, 1024, False),
}
VOCAB = 151_936


def shapes_of(model: str) -> dict[str, list[int]]:
    """The shape of each tensor by its name, in the order of the names, as transformers writes a checkpoint."""
    layers, hidden, mlp, q, kv, is_tied = SHAPES[model]
    found = {"model.embed_tokens.weight": [VOCAB, hidden], "model.norm.weight": [hidden]}
    found |= {} if is_tied else {"lm_head.weight": [VOCAB, hidden]}
    for layer in range(layers):
        for name, shape in {
            "input_layernorm": [hidden],
            "mlp.down_proj": [hidden, mlp],
            "mlp.gate_proj": [mlp, hidden],
            "mlp.up_proj": [mlp, hidden],
            "post_attention_layernorm": [hidden],
            "self_attn.k_norm": [128],
            "self_attn.k_proj": [kv, hidden],
            "self_attn.o_proj": [hidden, q],
            "self_attn.q_norm": [128],
            "self_attn.q_proj": [q, hidden],
            "self_attn.v_proj": [kv, hidden],
        }.items():
            found[f"model.layers.{layer}.{name}.weight"] = shape
    return dict(sorted(found.items()))


def header_of(model: str) -> tuple[bytes, int]:
    """The header of a file of safetensors in bfloat16, and the length of the file in bytes."""
    table, end = {}, 0
    for name, shape in shapes_of(model).items():
        begin, count = end, 2
        for each in shape:
            count *= each
        end += count
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, len(header) + end


class _Link:
    """A network that all connections share, with a limit in bytes per second; 0: there is no limit."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        self._due = 0.0

    def wait(self, num_bytes: int) -> None:
        if not self.rate:
            return
        with self._lock:
            now = time.perf_counter()
            self._due = max(self._due, now - BURST_SECONDS) + num_bytes / self.rate
            seconds = self._due - now
        if seconds > 0:
            time.sleep(seconds)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, model: str, gbits: float, zeros: IO[bytes], context: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.header, self.size = header_of(model)
        self.link, self.zeros, self.context = _Link(gbits * 1e9 / 8), zeros, context

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        if self.context:  # shakes hands when the thread of the connection reads
            connection = self.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing, because a client that has left is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        sizes = {"config.json": 2, "model.safetensors": self.server.size}
        name = self.path.partition("?")[0].rpartition("/")[2]
        if "list-type" in self.path:
            files = "".join(
                f"<Contents><Key>shape/{each}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f'<ETag>"a-version"</ETag><Size>{size}</Size></Contents>'
                for each, size in sizes.items()
            )
            self._answer(f"<ListBucketResult><Name>models</Name>{files}</ListBucketResult>".encode())
        elif name == "config.json":
            self._answer(b"{}", "bytes 0-1/2")
        else:
            self._weights()

    def _answer(self, body: bytes, content_range: str | None = None) -> None:
        self._begin(len(body), content_range)
        self.wfile.write(body)

    def _begin(self, length: int, content_range: str | None) -> None:
        self.send_response(206 if content_range and "Range" in self.headers else 200)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", '"a-version"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()

    def _weights(self) -> None:
        header, size = self.server.header, self.server.size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)
        self._begin(end - begin, f"bytes {begin}-{end - 1}/{size}")
        if begin < len(header):
            self.wfile.write(header[begin:end])
            begin = min(len(header), end)
        while begin < end:
            at = begin % len(ZEROS)
            count = min(end - begin, len(ZEROS) - at, PACED if self.server.link.rate else len(ZEROS))
            self.server.link.wait(count)
            if self.server.context:
                begin += self.connection.send(memoryview(ZEROS)[at : at + count])
            else:
                begin += os.sendfile(self.connection.fileno(), self.server.zeros.fileno(), at, count)


@contextmanager
def serving(model: str, gbits: float, *, with_tls: bool) -> Iterator[dict[str, str]]:
    """A server in a process of its own.

    Yields the environment variables that give a client the server's address and certificate.

    Args:
        model: a name of SHAPES.
        gbits: the rate of the network in Gbit/s; 0: there is no limit.
        with_tls: whether the server has TLS, with a certificate that is made for it.
    """
    with tempfile.TemporaryDirectory() as folder:
        certificate = _make_certificate(Path(folder)) if with_tls else None
        words = [sys.executable, __file__, model, str(gbits), *([str(certificate)] if certificate else [])]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield {
                "AWS_ENDPOINT_URL": process.stdout.readline().strip(),
                "AWS_ACCESS_KEY_ID": "an-access-key",
                "AWS_SECRET_ACCESS_KEY": "a-secret",
                "AWS_REGION": "us-east-1",
            } | ({"SSL_CERT_FILE": str(certificate)} if certificate else {})
        finally:
            process.terminate()
            process.wait()


def _make_certificate(folder: Path) -> Path:
    """A self-signed certificate for this machine's own address, and its key in the same file."""
    path = folder / "server.pem"
    extensions = (
        "subjectAltName=IP:127.0.0.1",
        "basicConstraints=CA:FALSE",
    )
    words = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", "2", "-subj", "/CN=benchmark", "-addext", extensions[0], "-addext", extensions[1]),
        *("-keyout", f"{folder}/key", "-out", f"{folder}/certificate"),
    ]
    subprocess.run(words, check=True, capture_output=True)
    path.write_bytes((folder / "certificate").read_bytes() + (folder / "key").read_bytes())
    return path


def main() -> None:
    model, gbits, *certificate = sys.argv[1:]
    context = None
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate[0])
    with tempfile.TemporaryFile() as zeros:
        zeros.write(ZEROS)
        zeros.flush()
        server = _Server(model, float(gbits), zeros, context)
        print(f"http{'s' * bool(context)}://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
