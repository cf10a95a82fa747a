"""Times of the steps of a running engine: predicted from their rows, and corrected by what they took.

They are compiled, because a step drives everything out of the processor's caches. What an engine asks for once per step
takes as long as its code and its objects take to come from memory. See "What a prediction costs" in
benchmarks/NOTES.md. Without the extension, and as the definition of it, the same is here in Python.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple
from functools import partial
from typing import Protocol, cast

from quire import extension
from quire.cost.arithmetic import Load, StepArithmetic
from quire.cost.calibrate import Fit
from quire.cost.collectives import Links
from quire.cost.correct import Correction, cooled
from quire.cost.step_time import Constants, StepTime, amounts, exchange_seconds, reading_share, step_time


class RunningSteps(Protocol):
    """Steps of one model in one form on one machine.

    Attributes:
        spread, num_corrections: see Correction (its `num_steps`).
        cold: see Pause.
    """

    cold: float

    @property
    def spread(self) -> float: ...

    @property
    def num_corrections(self) -> int: ...

    def set_spread(self, spread: float) -> None:
        """See Correction."""

    def factor(self, num_tokens: int) -> float:
        """See Correction."""

    def factors(self) -> Iterable[tuple[int, float]]:
        """Sizes and their factors: see Correction."""

    def correct(self, num_tokens: int, predicted: float, measured: float) -> None:
        """See Correction.add."""

    def predict(self, load: Load, pause: float) -> StepTime:
        """The corrected time of a step after a pause of these seconds."""

    def predict_rows(
        self, starts: list[int], counts: list[int], num_logits: int, pause: float, other_tokens: int
    ) -> tuple[Load, StepTime]:
        """See StepArithmetic.load, Load.other_tokens, and `predict`. Rows have 1 to 2^27 tokens after 0 to 2^27 others.

        The compiled class raises ValueError for other rows, and if a row has no count.
        """


def running_steps(arithmetic: StepArithmetic, fit: Fit) -> RunningSteps:
    """Steps that are predicted by this fit, and corrected by its factors until there are others."""
    return _compiled(arithmetic, fit) if extension.is_used() else PlainSteps(arithmetic, fit)


class PlainSteps:
    """The twin of the compiled class. Both give the same numbers, bit by bit."""

    def __init__(self, arithmetic: StepArithmetic, fit: Fit) -> None:
        self._arithmetic, self._constants, self.cold = arithmetic, fit.constants, 0.0
        self._correction = Correction(
            fit.spread, fit.factors.items(), partial(_reading_share, arithmetic, fit.constants)
        )
        self.set_spread, self.factor = self._correction.set_spread, self._correction.factor
        self.factors, self.correct = self._correction.factors, self._correction.add

    @property
    def spread(self) -> float:
        return self._correction.spread

    @property
    def num_corrections(self) -> int:
        return self._correction.num_steps

    def predict(self, load: Load, pause: float) -> StepTime:
        demand, factor = self._arithmetic.demand(load), self._correction.factor(load.num_tokens)
        return step_time(demand, self._constants, self._correction.spread, factor, self.cold * cooled(pause))

    def predict_rows(
        self, starts: list[int], counts: list[int], num_logits: int, pause: float, other_tokens: int
    ) -> tuple[Load, StepTime]:
        load = self._arithmetic.load(starts, counts, num_logits)
        if other_tokens:
            load = load._replace(other_tokens=other_tokens)
        return load, self.predict(load, pause)


def _compiled(arithmetic: StepArithmetic, fit: Fit) -> RunningSteps:
    steps = extension.C.CorrectedSteps(
        kinds=[astuple(kind) for kind in arithmetic.kinds],
        constants=fit.constants.fitted,
        products=partial(_products, arithmetic, fit.constants.links),
        spread=fit.spread,
        factors=list(fit.factors.items()),
        reading_share=partial(_reading_share, arithmetic, fit.constants),
        load_type=Load,
        time_type=StepTime,
    )
    return cast(RunningSteps, steps)


def _products(
    arithmetic: StepArithmetic, links: Links, num_tokens: int, num_logits: int, other_tokens: int
) -> tuple[float, float, float, float]:
    """What depends on these numbers alone: bytes of weights, operations, bytes that are rescanned, and the seconds of
    exchanges.
    """
    nothing = (0,) * len(arithmetic.kinds)
    demand = arithmetic.demand(Load(num_tokens, 0, num_logits, nothing, nothing, other_tokens))
    of_products = amounts(demand)
    return float(of_products[2]), float(of_products[3]), float(of_products[6]), exchange_seconds(demand, links)


def _reading_share(arithmetic: StepArithmetic, constants: Constants, size: int) -> float:
    """See step_time.reading_share, for a prompt of the most tokens of this size."""
    return reading_share(arithmetic.demand(arithmetic.load([0], [1 << size], 1)), constants)
