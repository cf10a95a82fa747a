"""Reads text that comes in pieces: a parser is a generator that yields when it needs more text.

A parser sees one character after the other, or a run of characters of one class, or the next tag, and never the cut
between two pieces. So each cut of a text gives the same result. Each character is read once, so the work is linear.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]  # a parser, which yields where it needs more text, and returns a T

SPACE = re.compile(r"[ \t\n\r]*")


class Malformed(Exception):  # noqa: N818 (this is an outcome, which is handled where a call begins)
    """The text is no tool call."""


class Tags:
    """Strings to look for. No tag may be the beginning of another one."""

    def __init__(self, *names: str) -> None:
        self.names = frozenset(names)
        # Matches a tag, or the beginning of a tag at the end of the text.
        self.pattern = re.compile("|".join(map(_tag_pattern, names)) or "(?!)")


def _tag_pattern(tag: str) -> str:
    pattern = ""
    for char in reversed(tag):
        pattern = re.escape(char) + (rf"(?:{pattern}|\Z)" if pattern else "")
    return pattern


class Reader:
    """The text that was fed and is not read yet. Text that was read goes to the current sink.

    Methods that return Steps are used with `yield from`.
    """

    def __init__(self, sink: Callable[[str], object]) -> None:
        self._text = ""
        self._start = 0  # begin of the read text that is not in the sink yet
        self._position = 0
        self._sink = sink
        self.is_ended = False  # no more text comes

    def add(self, text: str) -> None:
        """More text, for a parser that waits for it."""
        self._text = self._text[self._position :] + text
        self._start = self._position = 0

    def to(self, sink: Callable[[str], object]) -> None:
        """From here on, the read text goes to this sink."""
        self.flush()
        self._sink = sink

    def flush(self) -> None:
        """Give the sink what was read."""
        if self._position > self._start:
            piece = self._text[self._start : self._position]
            self._start = self._position
            self._sink(piece)

    def skip(self, count: int) -> None:
        """Read characters that `peek`, `at` or `until` has found."""
        self._position += count

    def peek(self) -> Steps[str]:
        """The next character, which stays unread; "" at the end."""
        while self._position == len(self._text) and not self.is_ended:
            yield from self._wait()
        return self._text[self._position : self._position + 1]

    def expect(self, literal: str) -> Steps[None]:
        """Read exactly this. Raises Malformed."""
        for char in literal:
            if (yield from self.peek()) != char:
                raise Malformed
            self._position += 1

    def take(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read the longest run of characters of a class, given as `[...]*`."""
        pieces = []
        while True:
            match = pattern.match(self._text, self._position)
            assert match is not None
            pieces.append(match.group())
            self._position = match.end()
            if self._position < len(self._text) or self.is_ended:
                return "".join(pieces)
            yield from self._wait()

    def at(self, tags: Tags) -> Steps[str]:
        """The tag that comes next, which stays unread; "" if none does."""
        while True:
            match = tags.pattern.match(self._text, self._position)
            if match is not None and match.group() in tags.names:
                return match.group()
            if self.is_ended or (match is None and self._position < len(self._text)):
                return ""
            yield from self._wait()

    def until(self, tags: Tags) -> Steps[str]:
        """Read the text before the first of the tags -> the tag, which stays unread; "" if all was read."""
        while True:
            match = tags.pattern.search(self._text, self._position)
            self._position = len(self._text) if match is None else match.start()
            if match is not None and match.group() in tags.names:
                return match.group()
            if self.is_ended:
                self._position = len(self._text)
                return ""
            yield from self._wait()

    def rest(self) -> Steps[None]:
        """Read everything."""
        while True:
            self._position = len(self._text)
            if self.is_ended:
                return
            yield from self._wait()

    def _wait(self) -> Steps[None]:
        self.flush()
        yield


def drop(text: str) -> None:
    """A sink."""
