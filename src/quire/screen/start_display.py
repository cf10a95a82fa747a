"""The phases of a start on standard error: bars on a terminal, else lines, or records in JSON logs."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire import logs
from quire.messages import Progress
from quire.screen.terminal import CLEAR_LINE, Style, is_terminal, num_columns

logger = logs.get_logger(__name__)

BAR_WIDTH = 16
TIME_WIDTH = 8
MAX_COLUMNS = 100
LABEL_WIDTH = 9
REDRAW_SECONDS = 0.05
# Without bars, a long phase reports its progress at this interval.
LINE_SECONDS = 10.0


@dataclass
class _Phase:
    name: str
    start_time: float
    shown_time: float
    # The speed is measured from here: a continued download does not begin at 0, and its total may grow.
    base_time: float
    base_fraction: float
    fraction: float = 0.0
    detail: str = ""
    seconds: float | None = None  # measured by the phase's own process

    def lasted(self, now: float) -> float:
        return now - self.start_time if self.seconds is None else self.seconds

    def time(self, now: float) -> str:
        """`ETA 12 s` if it can be estimated, else the time that has passed."""
        seconds, done = now - self.base_time, self.fraction - self.base_fraction
        if seconds < 1.0 or done <= 0 or self.fraction >= 1:
            return shown_seconds(self.lasted(now))
        return f"ETA {shown_seconds(seconds * (1 - self.fraction) / done, digits=0)}"


class StartDisplay:
    """Shows the reports of `Progress`. Methods may be called from any thread.

    Args:
        on_first: called before the first report is shown.
        clock: monotonic seconds.
    """

    def __init__(
        self, on_first: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_first, self._clock = on_first, clock
        self._style = Style(sys.stderr)
        self._is_json = logs.is_json()
        self._has_bars = is_terminal(sys.stderr) and not self._is_json
        self._lock = threading.RLock()  # a signal handler may interrupt a method and call close()
        self._phase: _Phase | None = None
        self._is_closed = False
        self.seconds: dict[str, float] = {}  # the time of each finished phase

    def update(self, phase: str, fraction: float, detail: str, seconds: float | None = None) -> None:
        """Show that a phase is at `fraction`, from 0 to 1. An earlier phase ends.

        Args:
            seconds: the time since the phase has begun; None: it is not known.
        """
        with self._lock:
            if self._is_closed:
                return
            now = self._clock()
            if self._phase is None:
                self._on_first()
            if self._phase is None or self._phase.name != phase:
                self._end_phase(now)
                shown_time = -math.inf if self._has_bars else now  # a bar appears at once
                self._phase = _Phase(phase, now, shown_time, now, fraction)
            if fraction < self._phase.fraction:
                self._phase.base_time, self._phase.base_fraction = now, fraction
            self._phase.fraction, self._phase.detail, self._phase.seconds = fraction, detail, seconds
            self._show(now)

    def tick(self) -> None:
        """Show the present time of the phase."""
        with self._lock:
            if self._phase is not None and not self._is_closed:
                self._show(self._clock())

    def finish(self) -> None:
        """End the last phase, because the start is over."""
        with self._lock:
            if not self._is_closed:
                self._end_phase(self._clock())
                self._is_closed = True

    def close(self) -> None:
        """Remove the bar and show nothing from now on, because the start has failed or was given up."""
        with self._lock:
            if not self._is_closed and self._has_bars and self._phase is not None:
                _write(CLEAR_LINE)
            self._is_closed = True

    def _show(self, now: float) -> None:
        assert self._phase is not None
        phase, interval = self._phase, REDRAW_SECONDS if self._has_bars else LINE_SECONDS
        if now - phase.shown_time < interval:
            return
        phase.shown_time = now
        if self._is_json:
            extra = logs.fields(phase=phase.name, fraction=round(phase.fraction, 3), detail=phase.detail)
            logger.info("%s at %.0f%%: %s", phase.name, 100 * phase.fraction, phase.detail, extra=extra)
        elif self._has_bars:
            # The cursor goes back to the start of the line, so that output of another process replaces the bar.
            _write(CLEAR_LINE + self._bar(phase, phase.fraction, phase.time(now), "cyan") + "\r")
        else:
            _write(self._line(phase, phase.fraction, phase.time(now)))

    def _end_phase(self, now: float) -> None:
        if (phase := self._phase) is None:
            return
        seconds = self.seconds[phase.name] = round(phase.lasted(now), 3)
        lasted = shown_seconds(seconds)
        if self._is_json:
            extra = logs.fields(phase=phase.name, fraction=1.0, seconds=seconds, detail=phase.detail)
            logger.info("%s done in %s: %s", phase.name, lasted, phase.detail, extra=extra)
        elif self._has_bars:
            _write(CLEAR_LINE + self._bar(phase, 1.0, lasted, "green") + "\n")
        else:
            _write(self._line(phase, 1.0, lasted))

    def _line(self, phase: _Phase, fraction: float, time: str) -> str:
        label = self._style(f"{phase.name:<{LABEL_WIDTH}}", "bold")
        return f"  {label} {fraction:4.0%} {time:>{TIME_WIDTH}}  {phase.detail}\n"

    def _bar(self, phase: _Phase, fraction: float, time: str, colour: str) -> str:
        label = self._style(f"{phase.name:<{LABEL_WIDTH}}", "bold")
        filled = int(fraction * BAR_WIDTH)
        bar = self._style("#" * filled, colour) + " " * (BAR_WIDTH - filled)
        room = min(num_columns(sys.stderr) - 1, MAX_COLUMNS) - (LABEL_WIDTH + BAR_WIDTH + 4)
        return f"  {label} [{bar}{f'] {fraction:4.0%} {time:>{TIME_WIDTH}}  {phase.detail}'[: max(room, 0)]}"


@contextmanager
def shown_start(*, is_quiet: bool) -> Iterator[Progress]:
    """The bars of a start inside another program: only on a terminal."""
    if is_quiet or not is_terminal(sys.stderr):
        yield lambda phase, fraction, detail: None
        return
    display = StartDisplay()
    try:
        yield display.update
        display.finish()
    finally:
        display.close()


def shown_seconds(seconds: float, digits: int = 1) -> str:
    """A time for people: `0.2 s`, `75 s`, `3 min`."""
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.{0 if seconds >= 100 else digits}f} s"


def _write(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
