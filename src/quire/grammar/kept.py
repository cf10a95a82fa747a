"""Keeps what was made of the grammars that were asked for last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_KEPT = 256  # grammars


class Kept(Generic[T]):
    """Values by the text of their grammar. The least recently used one goes first. Threads may share it.

    Args:
        max_bytes: the most bytes of all values and texts together.
        num_bytes: gives the bytes of a value and its text. It may grow while the value is kept.
    """

    def __init__(self, max_bytes: int, num_bytes: Callable[[str, T], int]) -> None:
        self._max_bytes, self._num_bytes = max_bytes, num_bytes
        self._values: OrderedDict[str, T] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, text: str) -> T | None:
        with self._lock:
            if text in self._values:
                self._values.move_to_end(text)
            return self._values.get(text)

    def put(self, text: str, value: T) -> None:
        with self._lock:
            self._values[text] = value
            self._values.move_to_end(text)
        self.shrink()

    def drop(self, text: str, value: T) -> None:
        """Forget this value, unless another one took its place."""
        with self._lock:
            if self._values.get(text) is value:
                del self._values[text]

    def shrink(self) -> None:
        """Keep to the bounds, after values have grown. The most recently used value stays."""
        with self._lock:
            sizes = [self._num_bytes(text, value) for text, value in self._values.items()]
            num_bytes = sum(sizes)
            for size in sizes[:-1]:
                if num_bytes <= self._max_bytes and len(self._values) <= MAX_KEPT:
                    return
                self._values.popitem(last=False)
                num_bytes -= size
