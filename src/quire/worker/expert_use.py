"""Counts the tokens of each expert in a step, for metrics.

Dimensions: E experts of a layer, P places of experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from quire.moe.balance import balancedness
from quire.moe.layer import MoE
from quire.schedule import ExpertUse
from quire.worker.expert_balancer import ExpertBalancer


class ExpertCounter:
    """Reads the counts that a model writes in each pass: see Decoder.watch_experts.

    Args:
        balancer: moves experts between ranks.
    """

    def __init__(self, watched: Sequence[tuple[MoE, Tensor]], balancer: ExpertBalancer | None = None) -> None:
        self._begins = [begins.numpy() for _, begins in watched]
        self._experts = [
            np.arange(moe.num_places) if moe.placement is None else np.array([*chain(*moe.placement.experts)])
            for moe, _ in watched
        ]
        self._firsts = [[0, moe.num_places] if moe.placement is None else [*moe.placement.firsts] for moe, _ in watched]
        self._balancer = balancer
        self._num_steps = self._num_moved = 0

    def count(self) -> ExpertUse:
        """The counts of the last step."""
        experts = self._experts if self._balancer is None else self._balancer.experts_at_places()
        # The copies of an expert count as one expert.
        counts = [
            np.bincount(experts_P, np.diff(begins)) for experts_P, begins in zip(experts, self._begins, strict=True)
        ]
        of_ranks = [np.diff(begins[firsts]) for begins, firsts in zip(self._begins, self._firsts, strict=True)]
        before, self._num_moved = self._num_moved, 0 if self._balancer is None else self._balancer.num_moved
        self._num_steps += 1
        of_one = counts[self._num_steps % len(counts)]
        return ExpertUse(
            distinct=float(np.mean([np.count_nonzero(count_E) for count_E in counts])),
            balancedness=float(np.mean([count_E.mean() / max(count_E.max(), 1) for count_E in counts])),
            tokens=of_one[of_one > 0].astype(np.int64).tolist(),
            of_ranks=float(np.mean([balancedness(count_R) for count_R in of_ranks])),
            num_moved=self._num_moved - before,
        )
