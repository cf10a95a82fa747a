"""Uniform numbers as a pure function of (seed, index): a request draws the same ones under any schedule.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): its finalizer of the
state seed + (index + 1) * golden gamma. The seed is mixed first, so that neighbouring seeds share no stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TO_UNIT = 2.0**-53


def uniforms(
    seeds: Sequence[int] | NDArray[np.int64], indices: Sequence[int] | NDArray[np.int64]
) -> NDArray[np.float64]:
    """Number `index` of the stream `seed`, for many pairs: in [0, 1), with 53 random bits. Sums are modulo 2**64."""
    seed = np.asarray(seeds, dtype=np.int64).view(np.uint64)
    index = np.asarray(indices, dtype=np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        gamma = np.uint64(_GOLDEN_GAMMA)
        state = _mix(seed + gamma) + (index + np.uint64(1)) * gamma
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * _TO_UNIT


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MIX_1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MIX_2)
    return value ^ (value >> np.uint64(31))
