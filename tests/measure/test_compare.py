"""The verdict: a real difference is found, noise is not, and too little data says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.measure.compare import difference, differences, read_rounds, text


def test_noise_is_no_difference() -> None:
    """At 95 % about one of twenty equal pairs is called different, not more."""
    rng = np.random.default_rng(0)
    verdicts = []
    for paired in (True, False):
        for _ in range(300):
            a, b = rng.lognormal(5.0, 0.1, (2, 5))
            verdicts.append(difference("output_throughput", a, b, paired=paired).verdict)
    assert verdicts.count("no difference shown") / len(verdicts) >= 0.92


def test_drift_of_the_machine_is_taken_out_by_pairs() -> None:
    a = [100.0, 60.0, 90.0, 40.0, 80.0]  # a neighbour comes and goes
    b = [value * factor for value, factor in zip(a, (1.11, 1.09, 1.1, 1.12, 1.1), strict=True)]
    assert difference("output_throughput", a, b, paired=True).verdict == "faster"
    assert difference("output_throughput", a, b, paired=False).verdict == "no difference shown"


@pytest.mark.parametrize(
    ("metric", "verdict"),
    [
        ("output_throughput", "faster"),
        ("request_goodput", "faster"),
        ("mean_ttft_ms", "slower"),
        ("avg_latency", "slower"),
        ("avg_warm_startup_time", "slower"),
        ("tokens_per_second", "faster"),
    ],
)
def test_more_is_faster_or_slower(metric: str, verdict: str) -> None:
    found = difference(metric, [10.0, 10.1, 9.9], [20.0, 20.1, 19.9], paired=False)
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(2.0, rel=1e-3)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 2 < found.high
    assert difference(metric, [20.0, 20.1, 19.9], [10.0, 10.1, 9.9], paired=False).verdict != verdict


def test_too_little_to_tell() -> None:
    found = difference("output_throughput", [1.0, 1.0], [9.0, 9.0, 9.0], paired=False)
    assert (found.verdict, found.low) == ("no difference shown", None)
    assert "rounds a side: 2" in found.why
    assert "no ratio" in difference("output_throughput", [0.0] * 3, [1.0] * 3, paired=True).why


def test_more_metrics_ask_for_more() -> None:
    a = [{"output_throughput": value, "mean_ttft_ms": 5.0} for value in (10.0, 10.4, 9.7, 10.1)]
    b = [{"output_throughput": value, "mean_ttft_ms": 5.0} for value in (10.9, 11.2, 10.6, 11.0)]
    both = {each.metric: each for each in differences(a, b, paired=False)}
    alone = difference("output_throughput", [10.0, 10.4, 9.7, 10.1], [10.9, 11.2, 10.6, 11.0], paired=False)
    assert both["output_throughput"].low < alone.low  # type: ignore[operator]
    assert both["mean_ttft_ms"].verdict == "no difference shown"
    assert text(list(both.values()), "a", "b").splitlines()[-1].startswith("The difference is real: B is faster")


def test_result_files(tmp_path: Path) -> None:
    lines = tmp_path / "appended.json"  # as --append-result writes them, also vLLM's
    lines.write_text("\n".join(json.dumps({"output_throughput": value}) for value in (1.0, 2.0)))
    assert [each["output_throughput"] for each in read_rounds(lines)] == [1.0, 2.0]
    rounds = tmp_path / "rounds.json"
    rounds.write_text(json.dumps({"output_throughput": 5.0, "rounds": [{"output_throughput": 4.0}] * 3}, indent=1))
    assert read_rounds(rounds) == [{"output_throughput": 4.0}] * 3
    latency = tmp_path / "latency.json"
    latency.write_text(json.dumps({"avg_latency": 2.0, "latencies": [1.0, 3.0]}))
    assert read_rounds(latency) == [{"avg_latency": 1.0}, {"avg_latency": 3.0}]
    startup = tmp_path / "startup.json"
    startup.write_text(json.dumps({"avg_warm_startup_time": 2.0, "warm_startup_times": [1.5, 2.5]}))
    assert read_rounds(startup) == [{"avg_warm_startup_time": 1.5}, {"avg_warm_startup_time": 2.5}]
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="no result file"):
        read_rounds(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="no metric in common"):
        differences(read_rounds(lines), read_rounds(latency), paired=False)
