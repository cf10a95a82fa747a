"""A predicted number with its interval, and tables of text for people. No torch."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A prediction. At least nine of ten measurements should lie between `low` and `high`."""

    value: float
    low: float
    high: float

    def __mul__(self, factor: float) -> Estimate:  # type: ignore[override]
        """The prediction and its interval, times a number."""
        return Estimate(*(factor * number for number in self))

    def __add__(self, other: Estimate) -> Estimate:  # type: ignore[override]
        """The sum, with an interval for errors of one sign: errors that differ in sign make the sum's error smaller."""
        return Estimate(*map(operator.add, self, other))

    def over(self, count: float) -> Estimate:
        """The rate of `count` things in this time."""
        return Estimate(count / self.value, count / self.high, count / self.low)

    def text(self, bound: str = "", unit: str = "") -> str:
        """The text for people, such as `31 (21-47)`, or `31 ms (21-47, bound by memory)`.

        Args:
            bound: words for the resource that binds.
        """
        named = f"{short(self.value)} {unit}".rstrip()
        return f"{named} ({short(self.low)}-{short(self.high)}{', ' * bool(bound)}{bound})"

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {name: float(f"{number:.4g}") for name, number in self._asdict().items()}


def short(number: float) -> str:
    """A number as text with at least two digits and without an exponent: 0.42, 7.3, 42, 1,234."""
    if number >= 10 or number == 0:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], num_names: int = 1) -> Iterator[str]:
    """Lines with columns of equal width: the first `num_names` to the left, numbers to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = [
            cell.ljust(width) if column < num_names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
