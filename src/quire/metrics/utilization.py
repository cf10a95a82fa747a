"""Model FLOPs utilization and model bandwidth utilization: the steps' share of the device's ceilings."""

from __future__ import annotations

import math

from quire.cost.arithmetic import Demand

WINDOW_SECONDS = 10.0  # older steps have a weight below 1/e


class Utilization:
    """Shares of the ceilings over the last steps.

    Args:
        flops, read_bandwidth: the device's ceilings in operations and bytes per second; 0: not known.
    """

    def __init__(self, flops: float, read_bandwidth: float) -> None:
        self._flops, self._read_bandwidth = flops, read_bandwidth
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self._operations = self._bytes = self._seconds = 0.0

    def add(self, demand: Demand, seconds: float) -> tuple[float, float]:
        """Add a step of `seconds`. Returns the shares of operations and of read bytes; 0: the ceiling is not known."""
        kept = math.exp(-seconds / WINDOW_SECONDS)
        self._operations = kept * self._operations + demand.flops
        self._bytes = kept * self._bytes + demand.weight_bytes + demand.kv_bytes
        self._seconds = kept * self._seconds + seconds
        return _share(self._operations, self._seconds * self._flops), _share(
            self._bytes, self._seconds * self._read_bandwidth
        )


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
