"""Finds the known name that is most like a misspelt one. Our names come before foreign ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, own: Iterable[str], foreign: Iterable[str] = ()) -> str | None:
    """The most similar name; None: no name is similar. A foreign name must be clearly nearer than ours."""
    best = difflib.get_close_matches(word, list(own), 1)
    other = difflib.get_close_matches(word, list(foreign), 1)
    if best and other:
        return other[0] if _likeness(word, other[0]) > _likeness(word, best[0]) + 0.05 else best[0]
    return next(iter(best or other), None)


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
