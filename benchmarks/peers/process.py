"""Another engine in a process of its own, for benchmarks that ask several engines in turns."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from typing import Any


class Peer:
    """A command that answers each line of JSON with a line of JSON. Its process is stopped between two questions.

    Args:
        command: the command. Its first line has the key "ready".
    """

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._answer("ready")
        os.killpg(self._process.pid, signal.SIGSTOP)

    def _answer(self, key: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # the engine may print other lines too
            if line.startswith("{") and key in (found := json.loads(line)):
                return found
        raise SystemExit(f"{shlex.join(map(str, self._process.args))} ended without {key!r}")  # type: ignore[arg-type]

    def ask(self, question: dict[str, Any], key: str) -> Any:
        """Ask a question, and return the answer's value for the key."""
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._answer(key)[key]
        os.killpg(self._process.pid, signal.SIGSTOP)
        return answer

    def close(self) -> None:
        with self._process:  # closes the pipes and waits for the end of the process
            os.killpg(self._process.pid, signal.SIGCONT)
            os.killpg(self._process.pid, signal.SIGTERM)
