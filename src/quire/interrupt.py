"""Ctrl-C between the steps of a loop, not inside one: whatever a step changes, it changes whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED = 130  # the exit code of an interrupted command: 128 + SIGINT


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Inside, SIGINT is held back until the yielded function is called, or the end, and then does what it did before.

    A second SIGINT is not held back: a step may hang. Outside the main thread nothing changes: no signal comes there.
    """
    before: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            before(number, frame)
        held.append(frame)

    def check() -> None:
        if held:
            before(signal.SIGINT, held.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
        check()
