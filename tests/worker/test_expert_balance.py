"""Places of experts on ranks: they balance the loads of skewed traces, and keep their invariants on the way."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from quire.distributed.layout import place_experts
from quire.eplb_config import EplbConfig
from quire.errors import ConfigError
from quire.moe.balance import Ints, balancedness, improved, loads_of_ranks


def zipf(num_experts: int, exponent: float, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Tokens of each expert in a trace of 100,000; which expert has which rank among them is drawn."""
    shares = 1.0 / np.arange(1, num_experts + 1) ** exponent
    draw = np.random.default_rng(seed)
    return draw.multinomial(100_000, draw.permutation(shares / shares.sum())).astype(np.float64)


def places(num_experts: int, num_ranks: int, num_redundant: int) -> tuple[Ints, list[int]]:
    own = place_experts(num_experts, num_ranks, num_redundant=num_redundant)
    return np.concatenate([np.array(each) for each in own]), [0, *np.cumsum([len(each) for each in own]).tolist()]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_redundant", "exponent"),
    [(64, 2, 0, 1.0), (64, 4, 0, 1.0), (60, 4, 4, 1.2), (128, 8, 16, 1.0), (8, 3, 4, 1.0), (256, 32, 64, 1.0)],
)
def test_a_zipf_trace_is_balanced_in_small_rounds(
    num_experts: int, num_ranks: int, num_redundant: int, exponent: float, seed: int
) -> None:
    """After each round every expert is somewhere, and no rank has one twice."""
    loads_E, (experts_P, firsts) = zipf(num_experts, exponent, seed), places(num_experts, num_ranks, num_redundant)
    shown = [balancedness(loads_of_ranks(loads_E, experts_P, firsts))]
    for _ in range(10 * num_experts):
        better = improved(loads_E, experts_P, firsts, most_changes=2)
        if np.array_equal(better, experts_P):
            break
        assert np.count_nonzero(better != experts_P) <= 2
        assert set(better.tolist()) == set(range(num_experts))
        for begin, end in pairwise(firsts):
            assert len(set(better[begin:end].tolist())) == end - begin
        experts_P = better
        shown.append(balancedness(loads_of_ranks(loads_E, experts_P, firsts)))
    assert shown[-1] >= 0.9, shown
    assert len(shown) > 1 or shown[0] >= 0.9


def test_what_is_even_stays() -> None:
    experts_P, firsts = places(8, 2, 0)
    for loads_E in (np.zeros(8), np.ones(8)):
        assert np.array_equal(improved(loads_E, experts_P, firsts, 100), experts_P)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"window": 3}, "no such key.* one of window_size, step_interval, num_redundant_experts"),
        ({"step_interval": 0}, "step_interval of eplb_config.* 1 or more"),
        ({"num_redundant_experts": -1}, "num_redundant_experts of eplb_config.* 0 or more"),
        ({"use_async": 1}, "use_async of eplb_config.* True"),
        ({"policy": "other"}, "policy of eplb_config.* default, the only policy"),
    ],
)
def test_keys_of_the_config(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EplbConfig.of(given)
    assert EplbConfig.of({"communicator": "torch_gloo", "use_async": False}).use_async is False
