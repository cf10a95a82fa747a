"""Compares two sides: ratios with confidence intervals from rounds, and a verdict that may be "no difference shown".

The ratio B / A of a metric is estimated from the logarithms of the rounds' values, so it is symmetric. If both sides
were measured in turns, rounds are paired (one-sample t), else they are two samples (Welch's t). With several metrics
the level of each is raised (Bonferroni), so that all intervals together hold with 95 % confidence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ConfigError
from quire.measure.statistics import LEVEL, t_quantile

LEAST_ROUNDS = 3
NOTHING_SHOWN = "no difference shown"
# The compared metrics of a server and of offline runs; `is_better_high` tells which are better when higher.
METRICS = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "request_goodput")
OFFLINE_METRICS = ("tokens_per_second", "avg_latency", "avg_cold_startup_time", "avg_warm_startup_time")


@dataclass(frozen=True)
class Difference:
    """One metric on both sides. `verdict` is about B: faster than A, slower, or no difference shown."""

    metric: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    verdict: str
    why: str = ""


def is_better_high(metric: str) -> bool:
    return not any(part in metric for part in ("_ms", "_time", "latency"))


def difference(
    metric: str, a: Sequence[float], b: Sequence[float], *, paired: bool, level: float = LEVEL
) -> Difference:
    """Compare the rounds of one metric.

    Args:
        paired: whether round i of A and round i of B belong together: both sides got the same requests in turns.
    """
    mean_a, mean_b = float(np.mean(a)), float(np.mean(b))
    if min(*a, *b) <= 0:
        return Difference(metric, mean_a, mean_b, math.nan, None, None, NOTHING_SHOWN, "a value is zero: no ratio")
    log_a, log_b = np.log(a), np.log(b)
    ratio = math.exp(float(log_b.mean() - log_a.mean()))
    fewest = min(len(a), len(b))
    if fewest < LEAST_ROUNDS:
        why = f"rounds a side: {fewest}; {LEAST_ROUNDS} are needed to tell a difference from noise"
        return Difference(metric, mean_a, mean_b, ratio, None, None, NOTHING_SHOWN, why)
    if paired:
        logs = log_b - log_a
        error, df = float(logs.std(ddof=1)) / math.sqrt(len(logs)), len(logs) - 1
    else:
        error, df = _welch(log_a, log_b)
    half = t_quantile(level, df) * error
    low, high = ratio * math.exp(-half), ratio * math.exp(half)
    verdict = NOTHING_SHOWN
    if low > 1 or high < 1:
        verdict = "faster" if (low > 1) == is_better_high(metric) else "slower"
    return Difference(metric, mean_a, mean_b, ratio, low, high, verdict)


def _welch(a: Any, b: Any) -> tuple[float, int]:
    """The standard error of the difference of means, and its degrees of freedom, rounded down."""
    part_a, part_b = float(a.var(ddof=1)) / len(a), float(b.var(ddof=1)) / len(b)
    total = part_a + part_b
    if total == 0:
        return 0.0, len(a) + len(b) - 2
    df = total**2 / (part_a**2 / (len(a) - 1) + part_b**2 / (len(b) - 1))
    return math.sqrt(total), max(1, int(df))


def differences(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]], *, paired: bool) -> list[Difference]:
    """The differences of all metrics that every round of both sides has. Raises ConfigError if there is none."""
    rounds = [*a, *b]
    known = (*METRICS, *OFFLINE_METRICS)
    shared = [name for name in known if all(isinstance(each.get(name), (int, float)) for each in rounds)]
    if not shared:
        raise ConfigError("The two sides have no metric in common", expected="results of the same benchmark")
    level = 1 - (1 - LEVEL) / len(shared)
    return [
        difference(name, [each[name] for each in a], [each[name] for each in b], paired=paired, level=level)
        for name in shared
    ]


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The rounds in a result file of `quire bench` or vLLM: a sequence of JSON objects with one or more rounds each.

    Raises ConfigError for another file.
    """
    decoder, rounds, at = json.JSONDecoder(), [], 0
    try:
        text = path.read_text(encoding="utf-8").strip()
        while at < len(text):
            document, at = decoder.raw_decode(text, at)
            rounds += _rounds_of(document)
            while at < len(text) and text[at].isspace():
                at += 1
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no result file: {error}") from None
    if not rounds:
        raise ConfigError(f"{path} holds no result")
    return rounds


def _rounds_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    if document.get("rounds"):
        return [dict(each) for each in document["rounds"]]
    if "avg_latency" in document:  # each iteration is a round
        return [{"avg_latency": value} for value in document["latencies"]]
    if "avg_warm_startup_time" in document or "avg_cold_startup_time" in document:
        kinds = [kind for kind in ("cold", "warm") if document.get(f"{kind}_startup_times")]
        count = min(len(document[f"{kind}_startup_times"]) for kind in kinds)
        return [
            {f"avg_{kind}_startup_time": document[f"{kind}_startup_times"][i] for kind in kinds} for i in range(count)
        ]
    return [document]


def text(found: Sequence[Difference], name_a: str, name_b: str) -> str:
    """The table, and a last line with the verdict in words."""
    lines = [
        f"A: {name_a}",
        f"B: {name_b}",
        f"{'metric':<24} {'A':>11} {'B':>11}   {'B / A':>7}   interval           B is",
    ]
    for each in found:
        interval = f"{each.low:.3f} to {each.high:.3f}" if each.low is not None else "none"
        verdict = each.verdict + (f" ({each.why})" if each.why else "")
        values = f"{each.a:>11.2f} {each.b:>11.2f}   {each.ratio:>6.3f}x"
        lines.append(f"{each.metric:<24} {values}   {interval:<18} {verdict}")
    real = [each for each in found if each.verdict != NOTHING_SHOWN]
    shown = [f"{each.verdict} in {each.metric} ({each.ratio:.2f}x)" for each in real]
    lines.append(f"The difference is real: B is {'; '.join(shown)}." if shown else "No difference shown.")
    return "\n".join(lines)


def as_json(found: Sequence[Difference]) -> list[dict[str, Any]]:
    return [{key: None if value != value else value for key, value in asdict(each).items()} for each in found]
