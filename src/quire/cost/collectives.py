"""The time in which devices that share a model add up their results. No torch."""

from __future__ import annotations

from dataclasses import dataclass

# Assumed for one sum over the devices: launches and waits take this time even if little is sent.
LATENCY_SECONDS = 20e-6


@dataclass(frozen=True, slots=True)
class AllReduces:
    """The sums of a step: each device sends and receives in a ring, while nothing else is computed.

    Attributes:
        degree: devices.
        count: sums per step.
        row_bytes: bytes of one token in one sum.
        link_bandwidth: bytes per second from one device to the next, in one direction.
    """

    degree: int
    count: int
    row_bytes: int
    link_bandwidth: float

    def seconds(self, num_tokens: float) -> float:
        """The time of all sums in a step of `num_tokens` tokens."""
        if self.degree == 1:
            return 0.0
        sent = 2 * (self.degree - 1) / self.degree * num_tokens * self.row_bytes
        return self.count * (LATENCY_SECONDS + sent / self.link_bandwidth)
