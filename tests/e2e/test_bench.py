"""`quire bench throughput`, `latency` and `startup` on the demo model: vLLM's lines and keys, tokens counted once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.kernels import cpu
from tests.nursery import TorchPopen

ENGINE = ("--kv-cache-memory-bytes", "32M", "--num-threads", "1", "--disable-tqdm")


def run(*words: str, file: Path) -> dict[str, object]:
    assert main(["bench", *words, *ENGINE, "--output-json", str(file)]) == 0
    result: dict[str, object] = json.loads(file.read_text())
    assert {"command", "commit", "machine", "quire_version"} <= result.keys()
    return result


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--num-prompts", "6", "--input-len", "20", "--output-len", "4", "--num-rounds", "3", "--num-warmups", "1")
    result = run("throughput", *words, file=tmp_path / "t.json")
    assert (result["num_requests"], result["total_num_tokens"]) == (18, 18 * 24), "warm-up is not counted"
    assert {"model_id", "elapsed_time", "requests_per_second", "tokens_per_second"} <= result.keys()
    assert result["cached_prompt_tokens"] == 0, "rounds have prompts of their own"
    rounds = result["rounds"]
    assert isinstance(rounds, list)
    assert len(rounds) == 3
    out = capsys.readouterr().out
    assert re.search(r"^Throughput: \S+ requests/s, \S+ total tokens/s, \S+ output tokens/s$", out, re.MULTILINE)
    assert "Total num prompt tokens:  360\nTotal num output tokens:  72" in out
    if cpu.available():
        limit = result["hardware_limit"]
        assert isinstance(limit, dict)
        assert 0 < limit["percent"] < 100, "faster than the machine: the floor is counted wrongly"
        assert "Hardware limit reached (%):" in out


@pytest.mark.skipif(not cpu.available(), reason="only the compiled kernels measure the limits")
def test_limit_of_integer_weights(tmp_path: Path) -> None:
    words = ("--num-prompts", "4", "--input-len", "100", "--output-len", "1", "--quantization", "int8")
    limit = run("throughput", *words, file=tmp_path / "t.json")["hardware_limit"]
    assert isinstance(limit, dict)
    assert limit["num_int8_ops"] > limit["num_flops"] > 0
    assert 0 < limit["percent"] < 100


def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--batch-size",
        "2",
        "--input-len",
        "8",
        "--output-len",
        "3",
        "--num-iters",
        "4",
        "--num-iters-warmup",
        "1",
    )
    result = run("latency", *words, file=tmp_path / "l.json")
    assert {"model_id", "avg_latency", "latencies", "percentiles"} <= result.keys()
    latencies, percentiles = result["latencies"], result["percentiles"]
    assert isinstance(latencies, list)
    assert isinstance(percentiles, dict)
    assert len(latencies) == 4
    assert list(percentiles) == ["10", "25", "50", "75", "90", "99"]
    out = capsys.readouterr().out
    assert out.startswith(f"Avg latency: {result['avg_latency']} seconds\n10% percentile latency: ")


def test_percentiles_of_latency_have_intervals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where five iterations are expected beyond them; the mean has one from three iterations on."""
    for num_iters, told in ((3, ()), (20, (25, 50, 75))):
        words = ("--batch-size", "1", "--input-len", "4", "--output-len", "2", "--num-iters-warmup", "1")
        result = run("latency", *words, "--num-iters", str(num_iters), file=tmp_path / "l.json")
        intervals, percentiles = result["confidence_intervals"], result["percentiles"]
        assert isinstance(intervals, dict)
        assert isinstance(percentiles, dict)
        assert list(intervals) == ["avg_latency", *(f"p{p}_latency" for p in told)]
        for p in told:
            low, high = intervals[f"p{p}_latency"]
            assert low <= percentiles[str(p)] <= high
        out = capsys.readouterr().out
        assert out.count("95% confidence interval of ") == 1 + len(told)


@pytest.mark.parametrize(
    ("kind", "words", "bars"),
    [
        ("throughput", ("--num-prompts", "3", "--input-len", "8", "--output-len", "2"), ["| 3/3 ["]),
        (
            "latency",
            ("--input-len", "8", "--output-len", "2", "--num-iters", "4", "--num-iters-warmup", "1"),
            ["Warmup iterations: 100%", "Bench iterations: 100%", "| 4/4 ["],
        ),
    ],
)
def test_bars(kind: str, words: tuple[str, ...], bars: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", kind, *words, *ENGINE[:-1]]) == 0
    shown = capsys.readouterr().err
    assert [bar for bar in bars if bar not in shown] == []


def test_latency_longer_than_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", *ENGINE, "--max-model-len", "64", "--input-len", "60", "--output-len", "9"]) == 2
    assert "The context is too short" in capsys.readouterr().err


def test_startup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--num-iters-cold", "0", "--num-iters-warmup", "0", "--num-iters-warm", "1")
    assert main(["bench", "startup", *words, *ENGINE[:-1], "--output-json", str(tmp_path / "s.json")]) == 0
    result = json.loads((tmp_path / "s.json").read_text())
    shown = capsys.readouterr()
    assert "Warm startup iterations: 100%" in shown.err
    assert "| 1/1 [" in shown.err
    phases, total = result["warm_phases"], result["avg_warm_startup_time"]
    assert list(phases)[:2] == ["interpreter", "imports"]
    assert list(phases)[-1] == "first token"
    assert sum(phases.values()) == pytest.approx(total), "the phases are all of the time"
    assert "WARM STARTUP:\nAvg startup time: " in shown.out


def test_a_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("subprocess.Popen", TorchPopen)
    words = (
        "--num-iters-cold",
        "0",
        "--num-iters-warmup",
        "0",
        "--num-iters-warm",
        "1",
        "--num-gpu-blocks-override",
        "1",
    )
    assert main(["bench", "startup", *words, "--disable-tqdm"]) == 1
    error = capsys.readouterr().err
    assert "The engine did not start: " in error
    assert "Traceback" not in error
