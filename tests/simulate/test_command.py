"""`quire simulate`: bench serve's report of a load on the demo model, without loading the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quire.demo
from quire import extension
from quire.cli.main import main
from quire.config import EngineConfig
from quire.cost.calibrate import Fit
from quire.measure.load import Outcome, Run
from quire.model_config import load_model_config
from quire.planning import devices
from quire.planning.step_costs import calibration_file
from quire.resolve import resolve
from quire.simulate.load import Totals
from quire.simulate.run import _intervals
from tests.cost.models import CONSTANTS
from tests.e2e.serving import Program
from tests.measure.test_bench_serve import DETAILS, KEYS
from tests.nursery import LightPopen

SMALL = ("--num-prompts", "30", "--random-input-len", "40", "--random-output-len", "20", "--disable-tqdm")
# The size of the KV cache does not depend on other programs here.
FIXED = ("--kv-cache-memory-bytes", "16M", "--device", "cpu")


@pytest.fixture
def simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command; returns its output and its result."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))

    def run(*words: str) -> tuple[str, dict[str, Any]]:
        files = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json")
        assert main(["simulate", *FIXED, *files, *words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())

    return run


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", *FIXED, *words]) == 2
    return capsys.readouterr().err


def test_the_report_is_that_of_bench_serve_and_says_that_it_is_simulated(simulated: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    traffic = ("--request-rate", "50", "--num-warmups", "3")
    text, result = simulated(*SMALL, *traffic, "--goodput", "ttft:60000", "--plot", str(page))
    assert not (KEYS | DETAILS) - result.keys()
    assert (result["completed"], result["failed"], result["num_prompts"]) == (30, 0, 30)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30 * 40, 30 * 20)
    assert result["request_goodput"] == result["request_throughput"]
    intervals = result["simulated"]["intervals"]
    times = {f"{which}_{name}_ms" for which in ("mean", "median", "p99") for name in ("ttft", "tpot", "itl", "e2el")}
    rates = {"request_throughput", "request_goodput", "output_throughput", "total_token_throughput"}
    assert intervals.keys() == times | rates | {"num_preemptions", "prefix_cache_hits"}
    for name, (low, high) in intervals.items():
        assert low <= result.get(name, result["simulated"].get(name, low)) <= high, name
    assert text.startswith("============ Simulated Serving Result ============\n")
    assert "\nsimulated, no model was loaded; step times: assumed" in text
    assert "\nPreemptions: " in text
    assert "Client CPU" not in text
    assert result["simulated"]["step_time_interval"] == pytest.approx([1 / 1.5, 1.5])
    assert result["simulated"]["num_steps"] >= 20
    assert result["simulated"]["prefix_cache_queries"] == 30 * 40, "warm-up requests are not in the result"
    html = page.read_text()
    assert html.count("<svg") == 7
    assert "<h1>quire simulate: quire-demo</h1>" in html
    assert "Simulated Serving Result" in html


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, simulated: Any) -> None:
    """In processes that order sets differently; another seed gives another result."""
    words = (
        *FIXED,
        *SMALL,
        "--request-rate",
        "50",
        "--max-concurrency",
        "5",
        "--num-rounds",
        "2",
        "--num-warmups",
        "3",
    )
    files = ("--save-result", "--save-detailed", "--result-filename", "r.json", "--plot", "page.html")

    def output(name: str, seed: str) -> list[bytes]:
        (folder := tmp_path / name).mkdir()
        command = [sys.executable, "-m", "quire", "simulate", *words, *files, "--seed", seed]
        environment = os.environ | {"PYTHONHASHSEED": name, "QUIRE_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
        return [done.stdout, (folder / "r.json").read_bytes(), (folder / "page.html").read_bytes()]

    first = output("1", "7")
    assert output("2", "7") == first
    assert simulated(*words, "--seed", "8")[1]["ttfts"] != json.loads(first[1])["ttfts"]


def test_shared_beginnings_of_a_trace_are_found_in_the_cache(simulated: Any, tmp_path: Path) -> None:
    """All of its lines are simulated, at their times. The first request has 32 of the 40 tokens."""
    trace = tmp_path / "trace.jsonl"
    row = {"input_length": 40, "output_length": 3, "hash_ids": [4, 5]}
    trace.write_text("".join(json.dumps(row | {"timestamp": 100 + 2 * i}) + "\n" for i in range(1200)))
    _, result = simulated("--trace", str(trace), "--disable-tqdm")
    assert (result["completed"], result["num_prompts"]) == (1200, 1200)
    assert result["duration"] == pytest.approx(2 * 1199, abs=1)
    assert result["cached_prompt_tokens"] == 1199 * 32 == result["simulated"]["prefix_cache_hits"]
    assert result["num_unique_prompts"] == 1200
    _, result = simulated("--trace", str(trace), "--disable-tqdm", "--num-prompts", "7", "--no-enable-prefix-caching")
    assert (result["completed"], result["cached_prompt_tokens"]) == (7, 0)


def test_what_an_earlier_start_measured(simulated: Any) -> None:
    """Steps that are ten times slower: ten times the latencies, and the interval that was measured."""
    model = load_model_config(quire.demo.path())
    device = devices.detect(extension.chosen_isa(), "none was looked for")
    resolved = resolve(EngineConfig(device="cpu"), model, device, is_server=True)
    found = []
    for factor in (1, 10):
        *seconds, overlap = CONSTANTS.fitted
        constants = type(CONSTANTS)(*(factor * each for each in seconds), overlap)
        calibration_file(resolved, model, device).write(Fit(constants, 0.25))
        text, result = simulated(*SMALL)
        assert "step times: an earlier start measured steps\n" in text
        assert result["simulated"]["step_time_interval"] == pytest.approx([0.8, 1.25])
        found.append(result["latencies"])
    assert [10 * each for each in found[0]] == pytest.approx(found[1])


def test_the_interval_of_a_result_is_that_of_its_steps_and_queues(simulated: Any) -> None:
    """One request at a time has the factor of a step. Near saturation, slower steps also make a queue."""
    model = load_model_config(quire.demo.path())
    device = devices.detect(extension.chosen_isa(), "none was looked for")
    resolved = resolve(EngineConfig(device="cpu"), model, device, is_server=True)
    calibration_file(resolved, model, device).write(Fit(CONSTANTS, 0.25))
    text, alone = simulated(*SMALL, "--max-concurrency", "1")
    keys = ("request_throughput", "output_throughput", "mean_ttft_ms", "median_itl_ms", "median_e2el_ms", "p99_tpot_ms")
    latencies = sorted(alone["latencies"])
    alone["median_e2el_ms"] = 1000 * (latencies[14] + latencies[15]) / 2
    for key in keys:
        assert alone["simulated"]["intervals"][key] == pytest.approx([alone[key] / 1.25, 1.25 * alone[key]]), key
    low, high = alone["simulated"]["intervals"]["request_throughput"]
    assert f"\nrequest_throughput {'':<21} {low:.2f} to {high:.2f}\n" in text
    assert "\nTime of steps, by what binds them (%):   host " in text
    rate = 1.5 * alone["request_throughput"]
    _, crowd = simulated(*SMALL, "--num-prompts", "60", "--request-rate", str(rate), "--max-num-seqs", "2")
    for name, least in (("median", 2), ("p99", 1.5)):
        low, high = crowd["simulated"]["intervals"][f"{name}_ttft_ms"]
        assert least * low < crowd[f"{name}_ttft_ms"] < high / least


def test_the_interval_of_a_first_token_counts_the_pause_before_it(simulated: Any) -> None:
    """One request every 10 s. A step after such a pause takes 0.5 s longer."""
    model = load_model_config(quire.demo.path())
    device = devices.detect(extension.chosen_isa(), "none was looked for")
    resolved = resolve(EngineConfig(device="cpu"), model, device, is_server=True)
    calibration_file(resolved, model, device).write(Fit(CONSTANTS, 0.25, cold=0.5))
    _, found = simulated(*SMALL, "--request-rate", "0.1", "--burstiness", "1000000")
    median = found["median_ttft_ms"]
    assert median > 400
    assert found["simulated"]["intervals"]["median_ttft_ms"] == pytest.approx([median / 1.25, 1.25 * median], rel=0.01)


def test_a_case_without_values_has_no_times() -> None:
    """If slower steps refuse every request, no time becomes 0. An answer of one token has no time between tokens."""
    served = Run([Outcome(10, ttft=0.25, latency=0.25, output_tokens=1, success=True)], 1.0, 0.0)
    refused = Run([Outcome(10, error="the queue is full")], 1.0, 0.0)
    few, many = Totals(num_preemptions=1), Totals(num_preemptions=3)
    found = _intervals([([served], few), ([served], many), ([refused], few)], [99.0], {"ttft": 100.0})
    assert found["request_throughput"] == [0, 1]
    assert found["request_goodput"] == [0, 0]
    assert found["mean_ttft_ms"] == found["median_e2el_ms"] == found["p99_ttft_ms"] == [250, 250]
    assert found["num_preemptions"] == [1, 3]
    assert "mean_itl_ms" not in found


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("nonsense", "Line 2 of TRACE is no JSON object."),
        ('{"timestamp": 1, "output_length": 2}', "Line 2 of TRACE has no 'input_length'."),
        (
            '{"timestamp": "x", "input_length": 1, "output_length": 2}',
            "Illegal 'timestamp' on line 2 of TRACE. Got 'x'.",
        ),
        (
            '{"timestamp": 1, "input_length": 0, "output_length": 2}',
            "Illegal 'input_length' on line 2 of TRACE. Got 0.",
        ),
        (
            '{"timestamp": NaN, "input_length": 1, "output_length": 2}',
            "Illegal 'timestamp' on line 2 of TRACE. Got nan.",
        ),
        (
            f'{{"timestamp": 1, "input_length": 1, "output_length": 1{400 * "0"}}}',
            "Illegal 'output_length' on line 2 of TRACE. Got 1000",
        ),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 2, "hash_ids": 3}',
            "Illegal 'hash_ids' on line 2 of TRACE. Got 3.",
        ),
    ],
)
def test_a_bad_line_of_a_trace_is_named(
    line: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(f'{{"timestamp": 1, "input_length": 1, "output_length": 2}}\n{line}\n')
    assert part.replace("TRACE", str(trace)) in refusal(capsys, "--trace", str(trace))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--workload", "chta"), "Unknown workload. Got 'chta'. Expected chat, code, rag, random:IN/OUT such as"),
        (("--workload", "chta"), "Did you mean 'chat'?"),
        (("--workload", "random:5/0"), "Unknown workload."),
        (("--workload", "chat", "--trace", "x"), "A trace is a workload."),
        (("--trace", "no/such"), "The data set cannot be read"),
        (("--self-timed",), "Only a trace has times"),
        ((*SMALL, "--slo-itl", "0.001ms"), "slo_itl is below the fastest step"),
        (("--num-gpu-blocks-override", "1", "--max-model-len", "64"), "does not fit"),
    ],
)
def test_mistakes(words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in refusal(capsys, *words)


def test_a_config_file_holds_settings_and_no_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("max-num-seqs: 4\nrequest-rate: 3\n")
    assert "line 2: unknown setting 'request-rate'" in refusal(capsys, "--config", str(path))


def test_named_workloads(simulated: Any, tmp_path: Path) -> None:
    """Flags of single options come on top."""
    _, result = simulated("--workload", "random:20/5", "--num-prompts", "4", "--random-output-len", "6")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (4 * 20, 4 * 6)
    _, result = simulated("--workload", "chat", "--num-prompts", "40", "--disable-tqdm")
    assert result["total_output_tokens"] / 40 == pytest.approx(211, rel=0.2)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one", "output_tokens": 3}\n' * 5)
    _, result = simulated("--workload", str(prompts))
    assert (result["num_prompts"], result["total_output_tokens"]) == (5, 15)


def test_nothing_is_loaded() -> None:
    code = (
        "import sys\nfrom quire.cli.main import main\n"
        f"main({['simulate', *FIXED, *SMALL]!r})\nprint(sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    )
    done = Program(("-c", code), LightPopen).run()
    assert done.stdout.splitlines()[-1] == "[]"
