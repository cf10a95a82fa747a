"""`quire serve` as a real process: started with flags, watched through its standard error, stopped with signals.

Its process and its engine's are forks of a nursery (tests/nursery.py), unless the program is INTERPRETER.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import psutil

from tests.nursery import LightPopen, TorchPopen

START_SECONDS = 60.0
STOP_SECONDS = 20.0
# Marks of engines: their command lines, or the names of forks, which have 15 letters.
ENGINE = re.compile(r"engine\.process|light_engine|abotaged_engine")
READY = r"ready     ((?:http|unix)\S+)"
SMALL = ("--kv-cache-memory-bytes", "32M", "--num-threads", "1", "--dtype", "float32")
# The light engine has no end of an answer: it comes to the end of the context.
SHORT = ("--max-model-len", "128")


class Program(NamedTuple):
    """Arguments of the interpreter that run something, and the function that starts them."""

    arguments: tuple[str, ...]
    popen: type[subprocess.Popen[Any]] = TorchPopen

    def run(
        self, *arguments: str, timeout: float = START_SECONDS, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """To its end. `text`: what it reads."""
        command = [sys.executable, *self.arguments, *arguments]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with self.popen(command, **pipes, text=True) as process:
            try:
                output, errors = process.communicate(text, timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, output, errors)


QUIRE = Program(("-m", "quire"))
# As users start it, where the start itself is looked at.
INTERPRETER = Program(("-m", "quire"), subprocess.Popen)
# With an engine process without a model and without torch, for tests that do not depend on the answers.
LIGHT_ENGINE = str(Path(__file__).with_name("light_engine.py"))
LIGHT = Program(
    (
        "-c",
        "import sys; from quire.entry import spawn; from quire.cli.main import main\n"
        "spawn.ENGINE_PROGRAM = (sys.argv.pop(1),)\n"
        "sys.exit(main())",
        LIGHT_ENGINE,
    ),
    LightPopen,
)


def quire(
    *arguments: str, timeout: float = START_SECONDS, program: Program = QUIRE
) -> subprocess.CompletedProcess[str]:
    """A `quire` command run to its end."""
    return program.run(*arguments, timeout=timeout)


def free_port() -> int:
    """A free port, for a program that cannot choose one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Serve:
    """`with Serve("--flag", ...) as server`: ready when entered, unless `waits` is False. Killed at the end."""

    def __init__(
        self,
        *flags: str,
        waits: bool = True,
        environment: Mapping[str, str] | None = None,
        program: Program = QUIRE,
    ) -> None:
        self._command = [sys.executable, *program.arguments, "serve", "--port", "0", *flags]
        self._popen = program.popen
        self._waits, self._environment = waits, os.environ | dict(environment or {})
        self._lines: list[str] = []
        self.url = ""

    def __enter__(self) -> Serve:
        self.process = self._popen(
            self._command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=self._environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            if self._waits:
                self.wait_ready()
        except BaseException:
            self._end()
            raise
        return self

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def _end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(STOP_SECONDS)
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def log(self) -> str:
        """Everything on standard error so far."""
        return "".join(self._lines)

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = STOP_SECONDS) -> None:
        """Poll until true; fails naming what was waited for, with the log."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}:\n{self.log}"
            time.sleep(0.01)

    def wait_ready(self) -> None:
        """Until the first screen is there, which names the address."""
        self.wait_for(
            lambda: re.search(READY, self.log) is not None or self.process.poll() is not None,
            "readiness",
            START_SECONDS,
        )
        found = re.search(READY, self.log)
        assert found is not None, self.log
        self.url = found[1]

    @property
    def engines(self) -> list[psutil.Process]:
        """The engine processes."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if ENGINE.search(f"{child.name()} {child.cmdline()}")]

    def has_engine(self) -> bool:
        return len(self.engines) == 1

    @property
    def engine(self) -> psutil.Process:
        """The engine process."""
        (engine,) = self.engines
        return engine

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; answers with the exit code."""
        self.process.send_signal(number)
        return self.wait_exit()

    def wait_exit(self) -> int:
        self.wait_for(lambda: self.process.poll() is not None, "the server to end")
        self._reader.join(STOP_SECONDS)
        assert self.process.returncode is not None
        return self.process.returncode

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10)

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=30)
