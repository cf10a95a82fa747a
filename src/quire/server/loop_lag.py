"""Measures the lag of the event loop. Every stream waits this long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_SECONDS = 0.05


async def watch(observe: Callable[[float], None]) -> None:
    """Sleep again and again, and tell `observe` how many seconds late each sleep ended, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + INTERVAL_SECONDS
        await asyncio.sleep(INTERVAL_SECONDS)
        observe(max(loop.time() - due, 0.0))
