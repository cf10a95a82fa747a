"""A program under a pseudo-terminal, and the screen after its output."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Mapping

from tests import nursery
from tests.e2e.serving import QUIRE, Program

_PART = re.compile(r"\x1b\[(?P<parameters>[0-9;]*)(?P<command>[A-Za-z])|(?P<text>[^\x1b])")
SECONDS = 60.0


def screen(written: str, columns: int = 80) -> list[str]:
    """The lines a terminal shows for text, CR, LF and "erase to the end of the line"; longer lines wrap."""
    lines, row, column = [""], 0, 0
    for part in _PART.finditer(written):
        text = part["text"]
        if part["command"] == "K":
            lines[row] = lines[row][:column]
        elif part["command"] is not None:
            assert part["command"] == "m", f"an escape sequence this terminal does not know: {part[0]!r}"
        elif text == "\r":
            column = 0
        elif text == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        else:
            if column == columns:
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            lines[row] = f"{lines[row]:<{column}}"[:column] + text + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


class Terminal:
    """`with Terminal("serve", ...) as terminal`: `quire` with a terminal of its own. Killed at the end.

    Args:
        columns: width.
        environment: added to this process's, colours being as a user has them.
        program: runs with the arguments.
    """

    def __init__(
        self,
        *arguments: str,
        columns: int = 80,
        environment: Mapping[str, str] | None = None,
        program: Program = QUIRE,
    ) -> None:
        self.columns = columns
        self._command, self._popen = [sys.executable, *program.arguments, *arguments], program.popen
        self._environment = {**os.environ, "TERM": "xterm", **(environment or {})}
        for name in ("NO_COLOR", "FORCE_COLOR"):
            if name not in (environment or {}):
                self._environment.pop(name, None)
        self.written = ""

    def __enter__(self) -> Terminal:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, self.columns, 0, 0))
        # In a session of its own the terminal is its controlling one: a Ctrl-C written to it becomes a SIGINT. Forks of
        # a nursery see to that themselves.
        take = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        command = [] if issubclass(self._popen, nursery.Popen) else [sys.executable, "-c", take]
        self.process = self._popen(
            [*command, *self._command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=self._environment,
        )
        os.close(slave)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def read_until(self, words: str) -> None:
        """Until the program has written `words`; fails with its output if it never does."""
        deadline = time.monotonic() + SECONDS
        while words not in self.written:
            assert time.monotonic() < deadline, f"waited {SECONDS} s for {words!r}:\n{self.written}"
            assert self._read(), f"ended before {words!r}:\n{self.written}"

    def read_to_end(self) -> int:
        """Until the program has ended. Answers with its exit code."""
        deadline = time.monotonic() + SECONDS
        while self._read():
            assert time.monotonic() < deadline, f"the program does not end:\n{self.written}"
        return self.process.wait(SECONDS)

    def _read(self) -> bool:
        """False once nobody can write any more."""
        if not select.select([self._master], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # Linux says so when the last writer has gone
            return False
        self.written += data.decode()
        return bool(data)

    def press_ctrl_c(self) -> None:
        self.type("\x03")

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def lines(self) -> list[str]:
        """What is on the screen."""
        return screen(self.written, self.columns)
