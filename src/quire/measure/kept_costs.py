"""The costs that a server on this machine keeps for later starts. Benchmarks that predict its times wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.cost.calibrate import Fit
from quire.planning.step_costs import KnownCost

POLL_SECONDS = 0.5


def wait_for_costs(
    read: Callable[[], KnownCost],
    seconds: float,
    *,
    other_than: Fit | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Fit:
    """The costs that a server without load has measured, or has corrected since.

    How long this takes is not known: an idle server first takes memory for further requests, and measures steps.

    Args:
        read: reads what is kept now.
        seconds: the longest wait.
        other_than: costs that were kept before the server answered requests. Without them, measured ones suffice.

    Raises:
        TimeoutError: nothing was kept in time.
    """
    end = clock() + seconds
    while not (known := read()).is_measured or known.cost.fit == other_than:
        if clock() > end:
            what = "measured its steps" if other_than is None else "corrected what it has measured"
            raise TimeoutError(f"The server has not {what} after {seconds:g} s")
        sleep(POLL_SECONDS)
    return known.cost.fit
