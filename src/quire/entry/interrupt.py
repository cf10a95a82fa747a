"""Ctrl-C takes effect between the steps of a loop, so no step is left half done; or it ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from quire import logs
from quire.screen.terminal import clear_line

INTERRUPTED = 130  # the exit code of an interrupted command: 128 + SIGINT


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Inside, SIGINT is held back until the yielded function is called, or until the end; then its former handler runs.

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


def end_at_once(number: int, clean_up: Callable[[], object]) -> NoReturn:
    """Say in the handler of signal `number` that it came, and end the process without a wait for its threads.

    Args:
        clean_up: removes files and processes. It may write to standard error.
    """
    try:
        # The signal may have come in the middle of a write, and a buffer is not entered twice.
        with suppress(AttributeError, OSError, ValueError):  # there may be no standard error or no descriptor
            sys.stderr = open(sys.stderr.fileno(), "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        clean_up()
        clear_line()
        logs.say("interrupted" if number == signal.SIGINT else "stopped")
    finally:
        os._exit(128 + number)
