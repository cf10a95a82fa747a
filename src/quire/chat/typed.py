"""Input from a person: lines with editing and history, messages of several lines, and commands."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire import envs, logs

logger = logs.get_logger(__name__)

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
MAX_HISTORY_LINES = 1000

ReadLine = Callable[[str], str]


@dataclass(frozen=True)
class Typed:
    """One message, or one command if it begins with a slash outside of quotes."""

    text: str
    is_command: bool = False


def read_typed(read_line: ReadLine) -> Typed:
    """The next input: a line, lines between three quotes, or lines that end with a backslash and the line after them.

    The argument of a command may stand between three quotes too, for example after `/set system`.

    Args:
        read_line: shows its argument and returns a line. Its exceptions (EOFError, KeyboardInterrupt) end the message.
    """
    line = read_line(PROMPT)
    is_command = line.startswith("/")
    start = line.find(QUOTES) if is_command or line.lstrip().startswith(QUOTES) else -1
    if start >= 0:
        lines = [line[start + len(QUOTES) :]]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(read_line(MORE))
        return Typed(line[:start] * is_command + "\n".join(lines).rstrip().removesuffix(QUOTES), is_command)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(read_line(MORE))
    return Typed("\n".join(lines), is_command)


def line_reader() -> ReadLine:
    """A function like `input`. If Python has readline, its keys work, and the lines of earlier chats are there."""
    try:
        import readline
    except ImportError:
        return input
    readline.parse_and_bind("set enable-bracketed-paste on")  # several pasted lines are one message
    readline.set_auto_history(False)
    readline.set_history_length(MAX_HISTORY_LINES)
    path = _history_file()
    if path is not None:
        with suppress(OSError):  # there may be no file yet, or a file in the form of libedit
            readline.read_history_file(path)
    last = ""

    def read_line(prompt: str) -> str:
        nonlocal last
        line = input(prompt)
        if line.strip() and line != last:
            last = line
            readline.add_history(line)
            if path is not None:
                with suppress(OSError):  # a full disk stops no chat
                    readline.append_history_file(1, path)
        return line

    return read_line


def _history_file() -> Path | None:
    """A file that only its owner can read; None if no place for it can be found."""
    try:
        path = Path(envs.XDG_STATE_HOME.get() or Path.home() / ".local" / "state") / "quire" / "chat_history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except (OSError, RuntimeError) as error:
        logger.debug("the history of lines is not kept: %s", error)
        return None
    return path
