"""How long something took, and for how much of that its thread had no core: what a busy machine does to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

BUSY_SHARE = 0.2  # idle machines stay below: threads wait for each other too


@dataclass(frozen=True, slots=True)
class Lap:
    """A stretch of time. `waited` is the share of it in which the thread did not run, though it had work."""

    seconds: float
    waited: float = 0.0


class Stopwatch:
    """Measures what one thread computes; where it waits for a device or a disk, `waited` says nothing."""

    def __init__(
        self, wall: Callable[[], float] = time.perf_counter, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self._wall, self._cpu = wall, cpu
        self._last = wall(), cpu()

    def lap(self) -> Lap:
        """Since the last one, or since the watch was made."""
        now, last = (self._wall(), self._cpu()), self._last
        self._last = now
        seconds = now[0] - last[0]
        return Lap(seconds, max(0.0, 1 - (now[1] - last[1]) / seconds) if seconds > 0 else 0.0)


def busy_machine(waited: float) -> str | None:
    """What to say of a measurement that had to wait for so large a share of its time; None: nothing."""
    if waited <= BUSY_SHARE:
        return None
    return f"the machine is busy: this was measured with a core for {1 - waited:.0%} of the time; expect more when idle"
