"""Counts the tokens of each expert in a step, for metrics.

Dimensions: E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from quire.schedule import ExpertUse


class ExpertCounter:
    """Reads what a model leaves behind in each pass: see Decoder.watch_experts."""

    def __init__(self, begins: Sequence[Tensor]) -> None:
        self._begins = [each.numpy() for each in begins]
        self._num_steps = 0

    def count(self) -> ExpertUse:
        """Of the last step."""
        counts = [np.diff(begins) for begins in self._begins]
        self._num_steps += 1
        of_one = counts[self._num_steps % len(counts)]
        return ExpertUse(
            distinct=float(np.mean([np.count_nonzero(count_E) for count_E in counts])),
            balancedness=float(np.mean([count_E.mean() / max(count_E.max(), 1) for count_E in counts])),
            tokens=of_one[of_one > 0].tolist(),
        )
