"""Patterns of module names in an adapter's config, matched in bounded time. No torch.

PEFT takes them as regular expressions of Python. A short hostile one can keep Python's `re` busy for years, and no
other thread runs meanwhile. Here every part of a pattern maps a set of positions in the name to the positions after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from quire.errors import AdapterError

Positions = frozenset[int]
Match = Callable[[str, Positions], Positions]  # (name, starts) -> ends of all matches

_MAX_CHARS = 2048
_MAX_DEPTH = 20  # depth of groups
_MAX_STEPS = 2_000_000  # steps of all patterns together: they take seconds
_LITERAL = re.compile(r"\^?[\w.]+")
_TOKEN = re.compile(r"\(\?:?|\[[^\]]*\]|\\.|[*+?]\??|.", re.DOTALL)
_SET = r"\[\^?(?:\\?[\w.](?:-\w)?)+-?\]"
_CHARACTER = re.compile(rf"\\[^A-Zb0-9]|\\[DWS]|{_SET}|[^\\(|)*+?{{^$\[]", re.DOTALL)  # a pattern for one character


class Steps:
    """The work that the patterns of one config may take."""

    def __init__(self) -> None:
        self._left = _MAX_STEPS

    def spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise AdapterError(
                "The patterns in adapter_config.json take too long to match",
                expected="names of modules, or simple patterns",
                fix="Write names of modules into rank_pattern and alpha_pattern",
            )


class Pattern:
    """A regular expression without look-around, counts and references.

    Raises AdapterError if it has such a part, or is malformed or very long.
    """

    def __init__(self, source: str, steps: Steps) -> None:
        self._source, self._steps = source, steps
        self._is_literal = _LITERAL.fullmatch(source) is not None  # a dot is a dot: no two modules differ only in a dot
        if len(source) > _MAX_CHARS:
            raise self._unread(f"at most {_MAX_CHARS} characters")
        self._tokens: list[str] = [] if self._is_literal else _TOKEN.findall(source)
        self._match = self._alternatives(0)
        if self._tokens:
            raise self._unread("balanced parentheses")

    def ends(self, name: str) -> bool:
        """Whether the pattern matches the whole name, or its end after a dot: `q_proj` matches any layer's."""
        if self._is_literal:
            self._steps.spend(1)
            source = self._source
            return source == f"^{name}" if source[0] == "^" else f".{name}".endswith(f".{source}")
        starts = frozenset({0, *(index + 1 for index, char in enumerate(name) if char == ".")})
        return len(name) in self._match(name, starts)

    def _alternatives(self, depth: int) -> Match:
        if depth > _MAX_DEPTH:
            raise self._unread(f"at most {_MAX_DEPTH} nested groups")
        choices = [self._sequence(depth)]
        while self._tokens[:1] == ["|"]:
            self._tokens.pop(0)
            choices.append(self._sequence(depth))
        return lambda name, starts: frozenset().union(*(choice(name, starts) for choice in choices))

    def _sequence(self, depth: int) -> Match:
        parts = []
        while self._tokens and self._tokens[0] not in ("|", ")"):
            part = self._part(self._tokens.pop(0), depth)
            if self._tokens and self._tokens[0][0] in "*+?":
                part = self._repeated(part, self._tokens.pop(0)[0])
            parts.append(part)

        def match(name: str, positions: Positions) -> Positions:
            for part in parts:
                positions = part(name, positions)
            return positions

        return match

    def _part(self, token: str, depth: int) -> Match:
        if token in ("(", "(?:"):
            group = self._alternatives(depth + 1)
            if self._tokens[:1] != [")"]:
                raise self._unread("balanced parentheses")
            self._tokens.pop(0)
            return group
        if token in ("^", "$"):
            return lambda name, starts: starts & {0 if token == "^" else len(name)}
        if not _CHARACTER.fullmatch(token):
            raise self._unread("letters, groups, alternatives and repetitions")
        try:
            fits = re.compile(token).fullmatch  # a pattern for one character takes no time
        except re.error:
            raise self._unread("a regular expression") from None

        def match(name: str, starts: Positions) -> Positions:
            self._steps.spend(1 + len(starts))
            return frozenset(at + 1 for at in starts if at < len(name) and fits(name[at]))

        return match

    def _repeated(self, part: Match, sign: str) -> Match:
        def match(name: str, starts: Positions) -> Positions:
            found, new = (frozenset() if sign == "+" else starts), starts
            while new:
                self._steps.spend(1)
                new = part(name, new) - found
                found |= new
                if sign == "?":
                    break
            return found

        return match

    def _unread(self, expected: str) -> AdapterError:
        return AdapterError(
            "adapter_config.json has a pattern that is not read",
            value=self._source,
            expected=expected,
            fix="Write names of modules into rank_pattern and alpha_pattern",
        )
