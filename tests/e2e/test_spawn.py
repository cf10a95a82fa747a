"""An idle engine process: it loads before its launch comes, takes pages of the KV cache ahead of use, and ends if no
launch comes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from quire.config import EngineConfig
from quire.entry.spawn import spawn_engine, spawned_engines
from tests.e2e.serving import Serve

SECONDS = 60


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_loads_before_it_is_told_what_to_serve() -> None:
    with spawned_engines(EngineConfig()) as (interpreter,):
        deadline = time.monotonic() + SECONDS
        while not has_torch(interpreter.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert has_torch(interpreter.pid)
        assert interpreter.poll() is None, "it did not wait"
    assert interpreter.poll() is not None, "it outlived the block"


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_ends_when_nothing_comes(seconds: float) -> None:
    with spawn_engine(EngineConfig()) as interpreter:
        time.sleep(seconds)
        assert interpreter.stdin is not None
        interpreter.stdin.close()
        assert interpreter.wait(SECONDS) == 0


def test_an_error_in_the_settings_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quire", "serve", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        _, text = process.communicate(timeout=SECONDS)
    assert process.returncode == 2, text
    assert [other for other in psutil.pids() if _session(other) == process.pid] == []


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # ended meanwhile
        return None


@pytest.mark.skipif(sys.platform != "linux", reason="madvise with MADV_POPULATE_WRITE")
def test_an_idle_engine_takes_pages_ahead() -> None:
    """The whole cache, which is smaller than the lead. Nothing else writes to it: there is no request."""
    with Serve("--kv-cache-memory-bytes", "512M", "--num-threads", "1") as server:
        server.wait_for(lambda: server.engine.memory_info().rss > 512_000_000, "pages")
