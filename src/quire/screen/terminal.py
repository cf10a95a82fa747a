"""What the terminal behind a stream can show: whether it is one, its width, and colours for those who want them."""

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
_DIRECTIONS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")  # explicit ones of Unicode (UAX #9)


def is_terminal(stream: IO[Any] | None) -> bool:
    """Whether a line on it can be drawn again: a terminal that is not `TERM=dumb`."""
    return stream is not None and stream.isatty() and envs.TERM.get() != "dumb"


def clear_line() -> None:
    """Of standard error, if that is a terminal: it has written ^C."""
    if is_terminal(sys.stderr):
        print(CLEAR_LINE, end="", file=sys.stderr, flush=True)


def has_colour(stream: IO[Any] | None) -> bool:
    """NO_COLOR (no-color.org) says no, else FORCE_COLOR says yes, else terminals have it: CPython decides likewise."""
    if envs.NO_COLOR.get():
        return False
    return bool(envs.FORCE_COLOR.get()) or is_terminal(stream)


def num_columns(stream: IO[Any] | None) -> int:
    """Width of the terminal; 80 where there is none."""
    try:
        return (os.get_terminal_size(stream.fileno()).columns if stream is not None else 0) or DEFAULT_COLUMNS
    except OSError:
        return DEFAULT_COLUMNS


def without_controls(text: str) -> str:
    """Text of strangers as a terminal may get it: what would move its cursor or turn the direction is spelled out.

    Line feeds and tabs stay, and so do the joiners that emoji and many scripts need.
    """
    return text if text.isprintable() else "".join(repr(c)[1:-1] if _is_control(c) else c for c in text)


def write_answer(text: str, end: str = "") -> None:
    """Put text of a model on standard output, at once; a terminal gets nothing that it would obey."""
    print(without_controls(text) if sys.stdout.isatty() else text, end=end, flush=True)


def _is_control(character: str) -> bool:
    if character.isprintable() or character in "\n\t":
        return False
    # Cc: C0 and C1; Cs: half a character, which no encoding has.
    return unicodedata.category(character) in ("Cc", "Cs") or unicodedata.bidirectional(character) in _DIRECTIONS


class Style:
    """`style("text", "bold", "green")`: the text in that style, or as it is where there is no colour."""

    def __init__(self, stream: IO[Any] | None) -> None:
        self._has_colour = has_colour(stream)

    def __call__(self, text: str, *names: str) -> str:
        if not self._has_colour or not text:
            return text
        return f"\x1b[{';'.join(_CODES[name] for name in names)}m{text}\x1b[0m"
