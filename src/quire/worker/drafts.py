"""Verifies drafts: which logits they need, and how many of them hold (are accepted).

Each token of a row uses a fixed place of the row's stream of random numbers. So the target samples the same tokens with
and without drafts. A draft holds if and only if it is the token that the target samples in its place.

Dimensions: S rows of a step, R rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from quire.sampling.sampler import SampledTokens

# A function from the sampled tokens, the first row of logits of a row, and its drafts to the tokens of the row.
Verify = Callable[[SampledTokens, int, Sequence[int]], list[int]]


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of one step. A row with k drafts has k + 1 rows of logits, one after the other."""

    sampling_R: NDArray[np.int64]  # the position in the batch of each row of logits
    offsets_R: NDArray[np.int64]  # the number of drafts of the same row before the token of these logits
    remaining_R: NDArray[np.int64]  # the number of drafts of the same row that are not before this token
    plain_R: NDArray[np.int64]  # the indices of the rows of logits that belong to rows without drafts
    rows: list[tuple[int, int, Sequence[int]]]  # position in the batch, its first row of logits, and its drafts

    @classmethod
    def of(cls, num_logits: Sequence[int], draft_token_ids: Sequence[Sequence[int]]) -> Drafts:
        """The drafts of a batch. The arguments are as in ScheduledBatch."""
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
        """For each row of logits, the drafts that come before its token."""
        before: list[Sequence[int]] = [()] * len(self.sampling_R)
        for _, first, drafts in self.rows:
            for offset in range(1, len(drafts) + 1):
                before[first + offset] = drafts[:offset]
        return before


def verify(sampled: SampledTokens, first: int, drafts: Sequence[int]) -> list[int]:
    """The tokens of a row with drafts: the drafts that hold, and the token after them.

    A row of logits without a token ends the list. If the list is empty, the row has failed. Otherwise the next step
    meets the failure again, and then the list is empty.

    Args:
        first: the first of the row's rows of logits.
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
    """Accepts drafts at random, whatever the model samples. The tokens are wrong, so this is for benchmarks only.

    Args:
        rates: for each position, the share of rows in which all drafts up to this position hold.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        before = (1.0, *rates)
        self._rates = [rate / first if first else 0.0 for first, rate in zip(before, rates, strict=False)]
        self._random = Random(0)

    def verify(self, sampled: SampledTokens, first: int, drafts: Sequence[int]) -> list[int]:
        """Like `verify`, but chance decides how many drafts hold."""
        token_ids: list[int] = []
        for rate, draft in zip(self._rates, drafts, strict=False):
            if self._random.random() >= rate:
                break
            token_ids.append(draft)
        return token_ids + verify(sampled, first + len(token_ids), ())
