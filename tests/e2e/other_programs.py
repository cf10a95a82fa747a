"""Servers of other projects, as processes of a test."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import httpx

from tests.e2e.serving import free_port

START_SECONDS = 120.0


@contextmanager
def running(
    command: Callable[[int], tuple[str, ...]], path: str, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The URL of a program that was given a free port, once it answers to GET `path`. It is ended with its children."""
    port = free_port()
    process = subprocess.Popen(
        command(port),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | dict(environment or {}),
        start_new_session=True,
    )
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while True:
            try:
                httpx.get(url + path)
                break
            except httpx.TransportError:
                assert process.poll() is None, f"{command(port)[0]} ended with {process.returncode}"
                assert time.monotonic() < end, f"{command(port)[0]} does not answer"
                time.sleep(0.05)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
