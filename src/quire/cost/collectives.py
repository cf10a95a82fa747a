"""The time in which devices that share a model exchange columns. No torch."""

from __future__ import annotations

from dataclasses import dataclass

# Assumed for one exchange: launches and waits take this time even if little is sent.
LATENCY_SECONDS = 20e-6


@dataclass(frozen=True, slots=True)
class Gathers:
    """The exchanges of a step. In each, every device gets the columns of all others, and nothing else is computed.

    Attributes:
        degree: devices.
        count: exchanges per step.
        token_bytes: bytes of one token in all exchanges together, from all devices.
        link_bandwidth: bytes per second from one device to the next, in one direction.
    """

    degree: int
    count: int
    token_bytes: int
    link_bandwidth: float

    def seconds(self, num_tokens: float) -> float:
        """The time of all exchanges in a step of `num_tokens` tokens."""
        if self.degree == 1:
            return 0.0
        sent = (self.degree - 1) / self.degree * num_tokens * self.token_bytes
        return self.count * LATENCY_SECONDS + sent / self.link_bandwidth


NO_EXCHANGES = Gathers(1, 0, 0, 1.0)
