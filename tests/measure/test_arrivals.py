"""Arrivals: the rate asked for, the spread of the process, the trace's own times."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.measure.arrivals import arrival_times
from quire.measure.options import Traffic
from quire.measure.workload import BenchRequest

INFINITE = float("inf")


def gaps(count: int = 4000, **options: Any) -> list[float]:
    times = arrival_times(Traffic(**options), [BenchRequest("a", 1, 1)] * count, seed=1)
    assert times == sorted(times)
    return [b - a for a, b in zip([0.0, *times], times, strict=False)]


# The deviation of a gamma gap is mean / sqrt(burstiness).
@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (INFINITE, 0.0)])
def test_mean_and_spread(burstiness: float, spread: float) -> None:
    found = gaps(request_rate=20.0, burstiness=burstiness)
    assert statistics.mean(found) == pytest.approx(0.05), "the offered rate is exactly the one asked for"
    assert statistics.pstdev(found) / 0.05 == pytest.approx(spread, rel=0.1, abs=1e-6)


def test_all_at_once() -> None:
    assert set(gaps(10)) == {0.0}


def test_same_seed_same_times() -> None:
    requests = [BenchRequest("a", 1, 1)] * 20
    options = Traffic(request_rate=5.0)
    assert arrival_times(options, requests, 7) == arrival_times(options, requests, 7)
    assert arrival_times(options, requests, 7) != arrival_times(options, requests, 8)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_ramp(strategy: str) -> None:
    found = gaps(4000, ramp_up_strategy=strategy, ramp_up_start_rps=2, ramp_up_end_rps=32, burstiness=INFINITE)
    assert (found[0], found[-1]) == (pytest.approx(1 / 2), pytest.approx(1 / 32))
    assert 1 / found[2000] == pytest.approx(17 if strategy == "linear" else 8, rel=0.01)


def test_a_linear_ramp_may_start_at_nothing() -> None:
    found = gaps(11, ramp_up_strategy="linear", ramp_up_start_rps=0, ramp_up_end_rps=10, burstiness=INFINITE)
    assert found[0] == found[1] == pytest.approx(1.0)


def test_times_of_a_trace() -> None:
    requests = [BenchRequest([1], 1, 1, 0.0), BenchRequest([2], 1, 1, 2.5)]
    assert arrival_times(Traffic(), requests, 0) == [0.0, 2.5]
    assert arrival_times(Traffic(self_timed=False), requests, 0) == [0.0, 0.0]


@pytest.mark.parametrize(
    "options",
    [
        {"request_rate": 0.0},
        {"burstiness": 0.0},
        {"max_concurrency": 0},
        {"ramp_up_start_rps": 1},
        {"ramp_up_strategy": "linear"},
        {"ramp_up_strategy": "exponential", "ramp_up_start_rps": 0, "ramp_up_end_rps": 5},
        {"ramp_up_strategy": "linear", "ramp_up_start_rps": 9, "ramp_up_end_rps": 5},
        {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 5, "request_rate": 3.0},
    ],
)
def test_mistakes(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Traffic(**options)
