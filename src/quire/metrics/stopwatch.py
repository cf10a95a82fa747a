"""Measures a time, and the share of it in which the thread had no core because the machine is busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

BUSY_SHARE = 0.2  # idle machines stay below it, although threads wait for each other too


@dataclass(frozen=True, slots=True)
class Lap:
    """A measured time. `waited`: the share of it in which the thread had work but did not run."""

    seconds: float
    waited: float = 0.0


class Stopwatch:
    """Measures one computing thread. If the thread waits for a device or a disk, `waited` has no meaning."""

    def __init__(
        self, wall: Callable[[], float] = time.perf_counter, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self._wall, self._cpu = wall, cpu
        self._last = wall(), cpu()

    def lap(self) -> Lap:
        """The time since the last lap, or since the watch was made."""
        now, last = (self._wall(), self._cpu()), self._last
        self._last = now
        seconds = now[0] - last[0]
        return Lap(seconds, max(0.0, 1 - (now[1] - last[1]) / seconds) if seconds > 0 else 0.0)


def busy_machine(waited: float) -> str | None:
    """A sentence about a measurement that waited for this share of its time; None: it did not wait much."""
    if waited <= BUSY_SHARE:
        return None
    return f"the machine is busy: this was measured with a core for {1 - waited:.0%} of the time; expect more when idle"
