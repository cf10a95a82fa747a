"""Drafts to verify: which logits they need, and how many of them hold.

The tokens of a row are drawn at fixed places of its stream of random numbers. So a draft holds if and only if it is the
token that would have been sampled in its place. Dimensions: S rows of a step, R rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from quire.sampling.sampler import SampledTokens

# The tokens of a row with drafts, from the sampled tokens, the first row of logits, and the drafts.
Verify = Callable[[SampledTokens, int, Sequence[int]], list[int]]


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of one step. A row of the step with k of them has k + 1 rows of logits, one behind the other."""

    sampling_R: NDArray[np.int64]  # position in the batch
    offsets_R: NDArray[np.int64]  # drafts of the same row that come before the token of these logits
    remaining_R: NDArray[np.int64]  # drafts of the same row that come from there on
    plain_R: NDArray[np.int64]  # indices of the rows of logits of rows without drafts
    rows: list[tuple[int, int, Sequence[int]]]  # position in the batch, its first row of logits, and its drafts

    @classmethod
    def of(cls, num_logits: Sequence[int], draft_token_ids: Sequence[Sequence[int]]) -> Drafts:
        """Both as in ScheduledBatch."""
        counts_S = np.array(num_logits, dtype=np.int64)
        firsts_S = np.cumsum(counts_S) - counts_S
        sampling_R = np.repeat(np.arange(len(counts_S)), counts_S)
        offsets_R = np.arange(len(sampling_R)) - firsts_S[sampling_R]
        return cls(
            sampling_R,
            offsets_R,
            counts_S[sampling_R] - 1 - offsets_R,
            np.flatnonzero(counts_S[sampling_R] == 1),
            [(row, int(firsts_S[row]), drafts) for row, drafts in enumerate(draft_token_ids) if drafts],
        )

    def before(self) -> list[Sequence[int]]:
        """Per row of logits, the drafts before its token."""
        before: list[Sequence[int]] = [()] * len(self.sampling_R)
        for _, first, drafts in self.rows:
            for offset in range(1, len(drafts) + 1):
                before[first + offset] = drafts[:offset]
        return before


def verify(sampled: SampledTokens, first: int, drafts: Sequence[int]) -> list[int]:
    """The tokens of a row whose logits begin with row `first`: the drafts that hold and the token behind them.

    A row of logits that gives no token ends the list. If it is empty, the row has failed; if not, the next step will
    find out.
    """
    token_ids: list[int] = []
    for index, draft in enumerate([*drafts, None], first):
        if index in sampled.errors:
            break
        token_ids.append(sampled.token_ids[index])
        if token_ids[-1] != draft:
            break
    return token_ids


class HoldAtRandom:
    """Drafts that hold by chance, whatever the model samples. The tokens are wrong, so it is for benchmarks only.

    Args:
        rates: the share of the rows whose drafts hold up to each position.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        before = (1.0, *rates)
        self._rates = [rate / first if first else 0.0 for first, rate in zip(before, rates, strict=False)]
        self._random = Random(0)

    def verify(self, sampled: SampledTokens, first: int, drafts: Sequence[int]) -> list[int]:
        """Like `verify`, with held drafts in place of the sampled tokens."""
        token_ids: list[int] = []
        for rate, draft in zip(self._rates, drafts, strict=False):
            if self._random.random() >= rate:
                break
            token_ids.append(draft)
        return token_ids + verify(sampled, first + len(token_ids), ())
