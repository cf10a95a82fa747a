"""Computes a step of each recorded size while no request waits.

The first step of a number of tokens is recorded on a CPU (worker/recorded_steps.py), so it takes 1.3 to 2 times as long
as later ones: benchmarks/NOTES.md, 2026-11-29. Beside answers such a step would miss a target for the time between
tokens.
"""

from __future__ import annotations

from collections import deque

from quire.cost.model import CostModel
from quire.engine.core import EngineCore
from quire.errors import EngineDeadError
from quire.logs import get_logger
from quire.schedule import MAX_RECORDED_BUDGET, MAX_RECORDED_TOKENS

logger = get_logger(__name__)

# A request that comes during a step waits for its end, which may come twice as late as predicted, because the step is
# recorded. In longer steps a recording takes a small part of the time.
MAX_STEP_SECONDS = 0.2


class Rehearsal:
    """The sizes of one engine that have not been computed yet: short steps from one token up, then the full step.

    Args:
        cost: predicts the steps.
        max_tokens: the most tokens of a step.
    """

    def __init__(self, core: EngineCore, cost: CostModel, max_tokens: int) -> None:
        self._core, self._cost = core, cost
        self._sizes = deque(range(1, min(max_tokens, MAX_RECORDED_TOKENS) + 1))
        if MAX_RECORDED_TOKENS < max_tokens <= MAX_RECORDED_BUDGET:
            self._sizes.append(max_tokens)

    def step(self) -> bool:
        """Compute one step; False: nothing is left to compute, or there is no room for it now."""
        if not self._sizes:
            return False
        num_tokens = self._sizes[0]
        if self._cost.predict(self._cost.arithmetic.load([0], [num_tokens], 1)).seconds > MAX_STEP_SECONDS:
            self._sizes.clear()  # more tokens take no less
            return False
        try:
            if self._core.probe([(0, num_tokens)]) is None:
                return False
        except EngineDeadError:
            raise
        except Exception as error:
            logger.warning("steps are not computed ahead: %s", error, exc_info=error)
            self._sizes.clear()
            return False
        self._sizes.popleft()
        return True
