"""The time of a request outside the engine: reading it, tokenization, writing its first token.

It is a line over the length of the prompt, learnt from served requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import add

NEWEST_WEIGHT = 1 / 64  # the weight of the newest request
# The numbers of requests as which the expected overhead counts, and the overhead that an earlier start has learnt.
EXPECTED_REQUESTS, KNOWN_REQUESTS = 0.1, 16.0
HELD_UP_RATIO = 4.0  # a request that was held up counts as if it had taken this many times as long as others
MAX_SECONDS = 60.0  # the largest value of each number that is kept for later starts


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds outside the engine, from a request's arrival at the server to its first token's departure."""

    per_request: float
    per_prompt_token: float

    def seconds(self, num_prompt_tokens: int) -> float:
        """The overhead of a request."""
        return self.per_request + num_prompt_tokens * self.per_prompt_token


EXPECTED = Overhead(5e-3, 8e-6)  # on two cores of a Xeon: benchmarks/NOTES.md, 2026-11-28


class OverheadCorrection:
    """Fits the line by least squares, with weights that fade.

    Args:
        known: the overhead that an earlier start has learnt; None: there was none.

    Attributes:
        overhead: the present line; None: nothing is known.
    """

    def __init__(self, known: Overhead | None) -> None:
        self.overhead = known
        # The expected line never fades: requests of one length alone give none.
        self._expected = _sums_of(known or EXPECTED, EXPECTED_REQUESTS)
        self._sums = _sums_of(known or EXPECTED, 0.0 if known is None else KNOWN_REQUESTS)

    def add(self, num_prompt_tokens: int, seconds: float) -> None:
        """The overhead of a request was `seconds`."""
        most = HELD_UP_RATIO * (self.overhead or EXPECTED).seconds(num_prompt_tokens)
        kept = [(1 - NEWEST_WEIGHT) * each for each in self._sums]
        self._sums = _with_point(kept, num_prompt_tokens, min(seconds, most), 1.0)
        count, x, square, y, product = map(add, self._sums, self._expected)
        slope = max((count * product - x * y) / (count * square - x * x), 0.0)
        if slope * x > y:  # it would begin below zero: take the best line that begins at zero
            slope = product / square
        self.overhead = Overhead(max(y - slope * x, 0.0) / count, slope)


def _sums_of(overhead: Overhead, num_requests: float) -> list[float]:
    """The sums of requests on this line: see _with_point."""
    sums = [0.0] * 5
    for num_tokens in (0, 1000):
        sums = _with_point(sums, num_tokens, overhead.seconds(num_tokens), num_requests / 2)
    return sums


def _with_point(sums: list[float], x: float, y: float, weight: float) -> list[float]:
    """Sums over requests with one more: of 1, the tokens x, their squares, the seconds y, and the products of both."""
    return [each + weight * more for each, more in zip(sums, (1.0, x, x * x, y, x * y), strict=True)]
