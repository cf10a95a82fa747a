"""Percentiles with confidence intervals, Student's t, and the metrics of a load as in vLLM's client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quire.measure.load import Outcome, Run

LEVEL = 0.95  # the level of the confidence intervals
# A percentile has an interval only if at least this number of values is expected beyond it, on the shorter side. A
# bootstrap never goes past the outermost value. With five values the outermost one falls short of the true percentile
# in e^-5 = 0.7 % of all cases; an interval misses on one side in 2.5 %.
FEWEST_BEYOND = 5
NUM_RESAMPLES = 200


@dataclass(frozen=True)
class Summary:
    """The numbers of one metric, in seconds. Without values they are 0.

    Args:
        num_values: values that the numbers come from.
        intervals: the confidence intervals of "mean", "median" and "pXX", if `has_interval` is true for the percentile.
            It is empty with fewer than 10 values, because these do not show their spread.
    """

    num_values: int
    mean: float
    median: float
    std: float
    percentiles: dict[float, float]
    intervals: dict[str, tuple[float, float]]


def summarize(values: Sequence[float], percentiles: Sequence[float], *, block: int = 1, seed: int = 0) -> Summary:
    """The mean, median, deviation and percentiles of values that stand in the order of time.

    Intervals come from a moving-block bootstrap (Kuensch 1989): it draws blocks of neighbours instead of single values,
    because requests that run together are slow together.

    Args:
        block: the least length of a block.
    """
    if not values:
        return Summary(0, 0.0, 0.0, 0.0, dict.fromkeys(percentiles, 0.0), {})
    array = np.asarray(values)
    found = Summary(
        len(array),
        float(array.mean()),
        float(np.median(array)),
        float(array.std()),
        {p: float(np.percentile(array, p)) for p in percentiles},
        {},
    )
    if len(array) < 10:
        return found
    rng = np.random.default_rng(seed)
    length = min(max(block, round(len(array) ** (1 / 3))), len(array) // 2)
    num_blocks = -(-len(array) // length)
    rows = []
    told = [p for p in percentiles if has_interval(p, len(array))]
    for _ in range(NUM_RESAMPLES):
        starts = rng.integers(0, len(array) - length + 1, num_blocks)
        sample = array[(starts[:, None] + np.arange(length)).ravel()[: len(array)]]
        rows.append([sample.mean(), *np.percentile(sample, [50, *told])])
    low, high = np.percentile(np.asarray(rows), [50 * (1 - LEVEL), 50 * (1 + LEVEL)], axis=0)
    names = ["mean", "median", *(f"p{word(p)}" for p in told)]
    found.intervals.update({name: (float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)})
    return found


def has_interval(percentile: float, num_values: int) -> bool:
    """Whether `num_values` values are enough for an interval of the percentile: see FEWEST_BEYOND."""
    beyond = round(min(percentile, 100 - percentile), 6)  # exactly 0.1 for 99.9
    return num_values * beyond / 100 >= FEWEST_BEYOND


def word(percentile: float) -> str:
    """The percentile in vLLM's labels and keys: 99 for 99.0, 99.9 for 99.9."""
    return str(int(percentile)) if percentile == int(percentile) else str(percentile)


def t_probability(t: float, df: int) -> float:
    """P(|T| > |t|) for Student's t with a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    theta = math.atan(abs(t) / math.sqrt(df))
    cos_squared = math.cos(theta) ** 2
    if df % 2:
        term = total = math.cos(theta) if df > 1 else 0.0
        for k in range(3, df - 1, 2):
            term *= cos_squared * (k - 1) / k
            total += term
        inside = 2 / math.pi * (theta + math.sin(theta) * total)
    else:
        term = total = 1.0
        for k in range(2, df - 1, 2):
            term *= cos_squared * (k - 1) / k
            total += term
        inside = math.sin(theta) * total
    return max(0.0, 1 - inside)


def t_quantile(level: float, df: int) -> float:
    """t with P(|T| <= t) = level."""
    low, high = 0.0, 1e8
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - t_probability(middle, df) < level else (low, middle)
    return high


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The confidence interval of the mean of two or more independent values, such as rounds."""
    array = np.asarray(values)
    half = t_quantile(LEVEL, len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return float(array.mean()) - half, float(array.mean()) + half


@dataclass(frozen=True)
class Metrics:
    """The numbers of a load. Times are in seconds, rates per second."""

    completed: int
    failed: int
    duration: float
    total_input: int
    total_output: int
    total_cached: int
    num_good: int
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    times: dict[str, Summary]  # the keys are ttft, tpot, itl, e2el

    @property
    def rates(self) -> dict[str, float]:
        """Throughputs under vLLM's JSON keys."""
        seconds = max(self.duration, 1e-9)
        return {
            "request_throughput": self.completed / seconds,
            "request_goodput": self.num_good / seconds,
            "output_throughput": self.total_output / seconds,
            "total_token_throughput": (self.total_input + self.total_output) / seconds,
        }


def measure(runs: Sequence[Run], percentiles: Sequence[float], limits_ms: Mapping[str, float]) -> Metrics:
    """The numbers of one or more rounds together.

    Args:
        limits_ms: milliseconds by metric. A good request keeps all limits (--goodput). An answer of one token has a
            TPOT of 0.
    """
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    done = [outcome for outcome in outcomes if outcome.success]
    num_good = sum(all(_value(outcome, name) <= limit / 1000 for name, limit in limits_ms.items()) for outcome in done)
    gaps = [gap for outcome in done for gap in outcome.itl]
    values = {
        "ttft": [outcome.ttft for outcome in done],
        "tpot": [tpot(outcome) for outcome in done if outcome.output_tokens > 1],
        "itl": gaps,
        "e2el": [outcome.latency for outcome in done],
    }
    blocks = {"itl": max(1, len(gaps) // max(len(done), 1))}
    peak_tokens, peak_requests = _peaks(done)
    return Metrics(
        completed=len(done),
        failed=len(outcomes) - len(done),
        duration=sum(run.duration for run in runs),
        total_input=sum(outcome.prompt_len for outcome in done),
        total_output=sum(outcome.output_tokens for outcome in done),
        total_cached=sum(outcome.cached_tokens for outcome in done),
        num_good=num_good,
        max_output_tokens_per_s=peak_tokens,
        max_concurrent_requests=peak_requests,
        times={name: summarize(v, percentiles, block=blocks.get(name, 1)) for name, v in values.items()},
    )


def tpot(outcome: Outcome) -> float:
    """Seconds per output token after the first."""
    return (outcome.latency - outcome.ttft) / (outcome.output_tokens - 1) if outcome.output_tokens > 1 else 0.0


def _value(outcome: Outcome, name: str) -> float:
    return {"ttft": outcome.ttft, "tpot": tpot(outcome), "e2el": outcome.latency}[name]


def tokens_per_second(done: Sequence[Outcome]) -> tuple[list[int], list[int]]:
    """For each second since the first request: the tokens that came, and the requests in flight."""
    if not done:
        return [], []
    first = min(outcome.start_time for outcome in done)
    seconds = int(max(outcome.start_time + outcome.latency for outcome in done) - first) + 1
    tokens, requests = [0] * seconds, [0] * seconds
    for outcome in done:
        start = outcome.start_time - first
        now = start + outcome.ttft
        tokens[min(int(now), seconds - 1)] += 1
        for gap in outcome.itl:
            now += gap
            tokens[min(int(now), seconds - 1)] += 1
        for second in range(int(start), min(int(start + outcome.latency), seconds - 1) + 1):
            requests[second] += 1
    return tokens, requests


def _peaks(done: Sequence[Outcome]) -> tuple[float, int]:
    tokens, requests = tokens_per_second(done)
    return float(max(tokens, default=0)), max(requests, default=0)
