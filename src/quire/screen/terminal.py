"""The abilities of a stream: whether it is a terminal, its width, its colours, and safe text for it."""

from __future__ import annotations

import os
import sys
import unicodedata
from typing import IO, Any

from quire import envs

CLEAR_LINE = "\r\x1b[K"
DEFAULT_COLUMNS = 80

# SGR parameters of ECMA-48
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_DIRECTIONS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")  # Unicode's explicit ones (UAX #9)


def is_terminal(stream: IO[Any] | None) -> bool:
    """Whether a line of the stream can be drawn again, because it is a terminal without `TERM=dumb`."""
    return stream is not None and stream.isatty() and envs.TERM.get() != "dumb"


def clear_line() -> None:
    """Clear the line of standard error if it is a terminal, because Ctrl-C has written ^C there."""
    if is_terminal(sys.stderr):
        print(CLEAR_LINE, end="", file=sys.stderr, flush=True)


def has_colour(stream: IO[Any] | None) -> bool:
    """Whether to use colour, by CPython's rule: NO_COLOR (no-color.org) forbids it, FORCE_COLOR forces it."""
    if envs.NO_COLOR.get():
        return False
    return bool(envs.FORCE_COLOR.get()) or is_terminal(stream)


def num_columns(stream: IO[Any] | None) -> int:
    """The width of the terminal in columns; 80 without a terminal."""
    try:
        return (os.get_terminal_size(stream.fileno()).columns if stream is not None else 0) or DEFAULT_COLUMNS
    except OSError:
        return DEFAULT_COLUMNS


def without_controls(text: str) -> str:
    """Foreign text made safe for a terminal: characters that move the cursor or turn the direction are spelled out.

    Line feeds and tabs stay. The joiners that emoji and many scripts need stay too.
    """
    return text if text.isprintable() else "".join(repr(c)[1:-1] if _is_control(c) else c for c in text)


def write_answer(text: str, end: str = "") -> None:
    """Write a model's text to standard output at once. A terminal gets no control characters."""
    print(without_controls(text) if sys.stdout.isatty() else text, end=end, flush=True)


def _is_control(character: str) -> bool:
    if character.isprintable() or character in "\n\t":
        return False
    # Cc: C0 and C1. Cs: half a character; no encoding has it.
    return unicodedata.category(character) in ("Cc", "Cs") or unicodedata.bidirectional(character) in _DIRECTIONS


class Style:
    """`style("text", "bold", "green")`: the text in that style, or plain text without colour."""

    def __init__(self, stream: IO[Any] | None) -> None:
        self._has_colour = has_colour(stream)

    def __call__(self, text: str, *names: str) -> str:
        if not self._has_colour or not text:
            return text
        return f"\x1b[{';'.join(_CODES[name] for name in names)}m{text}\x1b[0m"
