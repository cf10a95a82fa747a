"""The counter-based uniform numbers: known values, a twin in Python's integers, uniform and independent."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.sampling.random import uniforms

MASK, GAMMA = (1 << 64) - 1, 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int) -> float:
    return (mix((mix((seed + GAMMA) & MASK) + (index + 1) * GAMMA) & MASK) >> 11) * 2.0**-53


def test_the_finalizer_of_the_twin_is_splitmix64() -> None:
    """The first outputs of SplitMix64 seeded with 0 and 1234567, as published with the reference implementation."""
    assert mix(GAMMA) == 0xE220A8397B1DCDAF
    assert [mix((1234567 + (i + 1) * GAMMA) & MASK) for i in range(2)] == [6457827717110365317, 3203168211198807973]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31))
def test_matches_the_twin(seed: int, index: int) -> None:
    value = uniform(seed, index)
    assert 0.0 <= value < 1.0
    assert uniforms([seed], [index])[0] == value


def test_uniform_in_both_directions() -> None:
    """Chi-square over 64 bins (99.99 % quantile of 63 degrees of freedom: 111), along one stream and across streams."""
    count = 64_000
    for seeds, indices in ((np.full(count, 7), np.arange(count)), (np.arange(count), np.zeros(count, dtype=int))):
        observed = np.histogram(uniforms(seeds, indices), bins=64, range=(0.0, 1.0))[0]
        assert ((observed - count / 64) ** 2 / (count / 64)).sum() < 111


def test_neighbouring_streams_are_not_shifted_copies() -> None:
    a, b = uniforms(np.full(100, 1), np.arange(100)), uniforms(np.full(100, 2), np.arange(100))
    assert not np.isin(a, b).any()
