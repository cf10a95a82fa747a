"""Uniform numbers as a pure function of (seed, index): a request draws the same ones under any schedule.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): its finalizer of the
state seed + (index + 1) * golden gamma. The seed is mixed first, so that neighbouring seeds share no stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TO_UNIT = 2.0**-53


def uniform(seed: int, index: int) -> float:
    """Number `index` of the stream `seed`, in [0, 1) with 53 random bits. Both are taken modulo 2**64."""
    state = (_mix((seed + _GOLDEN_GAMMA) & _MASK) + (index + 1) * _GOLDEN_GAMMA) & _MASK
    return (_mix(state) >> 11) * _TO_UNIT


def uniforms(
    seeds: Sequence[int] | NDArray[np.int64], indices: Sequence[int] | NDArray[np.int64]
) -> NDArray[np.float64]:
    """`uniform` of many (seed, index) pairs at once."""
    seed = np.asarray(seeds, dtype=np.int64).view(np.uint64)
    index = np.asarray(indices, dtype=np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        gamma = np.uint64(_GOLDEN_GAMMA)
        state = _mix_array(seed + gamma) + (index + np.uint64(1)) * gamma
        return (_mix_array(state) >> np.uint64(11)).astype(np.float64) * _TO_UNIT


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _mix_array(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MIX_1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MIX_2)
    return value ^ (value >> np.uint64(31))
