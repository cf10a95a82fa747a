"""Seconds from `quire serve` to /readyz and to a first token over HTTP, with and without the cache of packed weights.

Starts alternate. The model's files and the cache are in the file cache of the system. The cache has its own folder,
which is removed at the end. The start that writes it is reported too.

    python benchmarks/server_start.py [MODEL] [--rounds 5] [--save HARDWARE]

MODEL: a folder with weights; the default is the bundled demo model. --save writes
benchmarks/results/HARDWARE/server_start_DATE.md and .json.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from quire.measure import report

PROBE_SECONDS = 0.005
WAYS = {"as it is": (), "--packed-weights-cache": ("--packed-weights-cache",)}


def start(model: str | None, flags: tuple[str, ...], cache: str) -> dict[str, float]:
    """Start a server, wait for its first token, and end it. Returns the seconds since the command."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-P", "-m", "quire", "serve", *([model] if model else []), "--port", str(port), *flags]
    started = time.monotonic()
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"QUIRE_CACHE_DIR": cache})
    try:
        while not _is_ready(url):
            if server.poll() is not None:
                sys.exit(f"the server ended with {server.returncode}: {command}")
            time.sleep(PROBE_SECONDS)
        ready = time.monotonic() - started
        body = {"prompt": "Hello", "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        first_token = time.monotonic() - started
        while flags and not list(Path(cache).rglob("*.packed")):  # the file gets this name when it is on the disk
            time.sleep(0.1)
        return {"ready": ready, "first_token": first_token}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def markdown(result: dict[str, Any]) -> str:
    lines = [
        *report.heading("From `quire serve` to a first token", result),
        f"- {len(result['rounds'])} rounds in turns, files in the file cache; medians (least, most), seconds.",
        f"- The start that writes the cache: {result['writing']['first_token']:.2f} s.",
        "",
        "| | /readyz | first token over HTTP |",
        "|---|---|---|",
    ]
    for way in WAYS:
        cells = []
        for key in ("ready", "first_token"):
            seconds = [each[way][key] for each in result["rounds"]]
            cells.append(f"{statistics.median(seconds):.2f} ({min(seconds):.2f}, {max(seconds):.2f})")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    environment = report.environment("python", "benchmarks/server_start.py")
    with tempfile.TemporaryDirectory() as cache:
        writing = start(arguments.model, WAYS["--packed-weights-cache"], cache)
        rounds = [
            {way: start(arguments.model, flags, cache) for way, flags in WAYS.items()} for _ in range(arguments.rounds)
        ]
    result = {**environment, "writing": writing, "rounds": rounds}
    report.publish(__file__, arguments.save, "server_start", result, markdown(result))


if __name__ == "__main__":
    main()
