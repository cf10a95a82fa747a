"""`quire bench serve` and `compare` on a real server over an EchoClient: labels, keys, files, the page, the verdict."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import quire.demo
from quire.cli.main import main
from quire.frontend.echo_client import EchoClient
from quire.kernels import cpu
from quire.measure import serving
from quire.measure.floor import Machine, Work, floor
from quire.measure.load import Outcome, Run, run_load
from quire.measure.options import Target
from quire.measure.report import without_secrets
from quire.measure.serving import Server
from quire.messages import EngineOutputs
from quire.model_config import load_model_config
from tests.metrics.test_registry import record
from tests.nursery import BoundedPopen
from tests.server.serving import MODEL, RunningServer

FOLDER = str(quire.demo.path("target"))
SMALL = ("--num-prompts", "12", "--random-input-len", "20", "--random-output-len", "5", "--disable-tqdm")

# What `vllm bench serve` of vLLM 0.32 prints and writes (vllm/benchmarks/serve.py).
LABELS = """Successful requests: Failed requests: Maximum request concurrency: Request rate configured (RPS):
Benchmark duration (s): Total input tokens: Total generated tokens: Request throughput (req/s): Request goodput (req/s):
Output token throughput (tok/s): Peak output token throughput (tok/s): Peak concurrent requests:
Total token throughput (tok/s): Mean TTFT (ms): Median TTFT (ms): P99 TTFT (ms): Mean TPOT (ms): Median TPOT (ms):
P99 TPOT (ms): Mean ITL (ms): Median ITL (ms): P99 ITL (ms):"""
KEYS = {
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "latencies",
    "queue_times",
    "mean_ttft_ms",
    "median_ttft_ms",
    "std_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "std_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "std_itl_ms",
    "p99_itl_ms",
}
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}


@pytest.fixture(scope="module", autouse=True)
def bounded_processes() -> Iterator[None]:
    """They are forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subprocess.Popen", BoundedPopen)
        yield


def bench(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["bench", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.fixture
def to(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The flags that reach a running server."""
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return lambda server: ("--base-url", server.url, "--tokenizer", FOLDER)


def test_labels_and_keys(to: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--max-concurrency", "4", "--request-rate", "400", "--goodput", "ttft:60000", "--metadata", "a=b")
    files = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json")
    with RunningServer(answer=None) as server:
        out = bench("serve", *to(server), *SMALL, *limits, *files, "--num-warmups", "3", capsys=capsys)
        text = server.http.get("/metrics").text
        num_requests = sum(int(float(n)) for n in re.findall(r"vllm:request_success_total\{.*\} (\S+)", text))
    lines = out.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    block = "\n".join(lines[: lines.index("=" * 50)])
    found = re.findall(r"^(\S[^\n]*:) +\S+ *$", block, re.MULTILINE)
    assert found == re.findall(r"\S[^:\n]*:", " ".join(LABELS.split()).replace(": ", ":\n"))
    result = json.loads((tmp_path / "r.json").read_text())
    assert not (KEYS | DETAILS) - result.keys()
    assert (result["completed"], result["failed"], result["a"]) == (12, 0, "b")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12 * 20, 12 * 5)
    assert result["request_goodput"] == result["request_throughput"]
    assert num_requests == 12 + 3, "warm-up requests were sent"
    assert len(result["ttfts"]) == 12, "and are not in the result"
    assert result["num_unique_prompts"] == 12
    assert {"command", "commit", "machine", "client_cpu_percent", "confidence_intervals"} <= result.keys()


def test_no_prompt_is_sent_twice(to: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither by the warm-up nor by another round: the prefix cache would answer."""
    sent: list[Any] = []

    async def note(client: Any, path: str, requests: Any, *args: Any, **kwargs: Any) -> Run:
        sent.extend(request.prompt for request in requests)
        return await run_load(client, path, requests, *args, **kwargs)

    monkeypatch.setattr(serving, "run_load", note)
    with RunningServer(answer=None) as server:
        bench("serve", *to(server), *SMALL, "--num-rounds", "2", "--num-warmups", "5", capsys=capsys)
    assert len(sent) == len(set(sent)) == 2 * 12 + 5


def test_drafts(to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What the server counted while the load ran, under vLLM's keys."""
    step = record(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3, accepted_per_position=(2, 1))

    async def with_drafts(*args: Any, **kwargs: Any) -> Run:
        run = await run_load(*args, **kwargs)
        server.run(lambda: server.client.push(EngineOutputs([], step)))
        return run

    files = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json")
    with RunningServer(answer=None, max_draft=3) as server:
        server.run(lambda: server.client.push(EngineOutputs([], step)))  # not of this load
        monkeypatch.setattr(serving, "run_load", with_drafts)
        out = bench("serve", *to(server), *SMALL, *files, capsys=capsys)
    result = json.loads((tmp_path / "r.json").read_text())
    assert {key.removeprefix("spec_decode_"): value for key, value in result.items() if "spec_decode" in key} == {
        "acceptance_rate": 50.0,
        "acceptance_length": 2.5,
        "num_drafts": 2,
        "draft_tokens": 6,
        "accepted_tokens": 3,
        "per_position_acceptance_rates": [1.0, 0.5, 0.0],
    }
    block = out[out.index("Speculative Decoding") :].splitlines()
    assert block[1:3] == [
        "Acceptance rate (%):                     50.00     ",
        f"{'Acceptance length:':<40} 2.50      ",
    ]
    assert block[8].split() == ["Position", "1:", "50.00"]


def test_rounds_files_and_page(to: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "r.json", tmp_path / "page.html"
    files = ("--append-result", "--result-dir", str(tmp_path), "--result-filename", path.name)
    with RunningServer(answer=None) as server:
        words = ("serve", *to(server), *SMALL, "--num-rounds", "3", *files, "--percentile-metrics", "e2el")
        bench(*words, "--metric-percentiles", "50,99.9", capsys=capsys)
        out = bench(*words, "--plot", str(page), capsys=capsys)
    first, second = map(json.loads, path.read_text().splitlines())
    assert [len(each["rounds"]) for each in (first, second)] == [3, 3]
    assert not DETAILS & first.keys()
    assert {key for key in KEYS if not key.endswith(("ttft_ms", "tpot_ms", "itl_ms"))} <= first.keys()
    assert "p99.9_e2el_ms" in first
    assert "mean_ttft_ms" not in first
    assert first["confidence_intervals"]["output_throughput"][0] < first["output_throughput"]
    assert {"median_e2el_ms", "p50_e2el_ms"} <= first["confidence_intervals"].keys()
    assert "p99.9_e2el_ms" not in first["confidence_intervals"], "36 requests do not tell how far it may be off"
    assert "output_throughput" in out
    assert "P99 E2EL" in out
    html = page.read_text()
    assert html.count("<svg") == 7
    assert not re.search(r"(src|href)=|url\(|<script|https?:", html), "the page loads nothing"
    assert out.splitlines()[0].strip("= ") in html


def test_a_bar_counts_requests(to: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with RunningServer(answer=None) as server:
        assert main(["bench", "serve", *to(server), *SMALL[:-1], "--num-rounds", "2"]) == 0
        assert "| 24/24 [" in capsys.readouterr().err
        assert (
            main(["bench", "compare", server.url, server.url, *to(server)[2:], *SMALL[:-1], "--num-rounds", "1"]) == 0
        )
        assert "| 24/24 [" in capsys.readouterr().err
        assert main(["bench", "serve", *to(server), *SMALL]) == 0
        assert "12/12" not in capsys.readouterr().err


def test_chat_and_sampling_reach_the_server(to: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with RunningServer(answer=None) as server:
        chat = ("--backend", "openai-chat", "--model", MODEL, "--temperature", "0", "--extra-body.top_k", "3")
        out = bench("serve", *to(server), *SMALL, *chat, capsys=capsys)
    assert re.search(r"Successful requests: +12\b", out)
    assert re.search(r"Total generated tokens: +60\b", out), "random answers have their full length"


def test_a_trace_keeps_its_times(to: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 40 * i, "input_length": 20, "output_length": 3, "hash_ids": [1]} for i in range(3)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    words = ("--dataset-name", "timed_trace", "--dataset-path", str(trace), "--timed-trace-sec-multiplier", "0.001")
    files = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json")
    with RunningServer(answer=None) as server:
        bench("serve", *to(server), *words, *files, "--disable-tqdm", capsys=capsys)
    starts = json.loads((tmp_path / "r.json").read_text())["start_times"]
    assert [b - a >= 0.03 for a, b in itertools.pairwise(starts)] == [True, True]


def test_compare_two_servers(to: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "c.json"
    fast, slow = (EchoClient(None, step_seconds=seconds) for seconds in (0.005, 0.05))
    with RunningServer(client=fast) as a, RunningServer(client=slow) as b:
        words = (*to(a)[2:], *SMALL, "--num-rounds", "4", "--num-warmups", "4", "--output-json", str(result))
        out = bench("compare", a.url, b.url, *words, capsys=capsys)
    found = {each["metric"]: each for each in json.loads(result.read_text())["differences"]}
    assert found["mean_tpot_ms"]["verdict"] == "slower"
    assert found["mean_tpot_ms"]["ratio"] > 2
    assert out.splitlines()[-1].startswith("The difference is real: B is ")
    assert "slower in mean_tpot_ms" in out


def test_compare_a_server_with_itself_sends_other_prompts(to: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with RunningServer(answer=None) as server:
        words = (*to(server)[2:], *SMALL, "--num-rounds", "1")
        out = bench("compare", server.url, server.url, *words, capsys=capsys)
    assert out.splitlines()[-1] == "No difference shown."
    assert "rounds a side: 1" in out


def test_compare_two_result_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `serve` writes them, with their rounds; the same figures are no difference."""
    rounds = {"slow": (10.0, 10.2, 9.9, 10.1), "fast": (15.1, 14.8, 15.0, 15.2)}
    for name, values in rounds.items():
        found = [{"output_throughput": value, "mean_ttft_ms": 1000 / value} for value in values]
        (tmp_path / name).write_text(json.dumps({"output_throughput": values[0], "rounds": found}))
    slow, fast = (str(tmp_path / name) for name in rounds)
    result = tmp_path / "c.json"
    out = bench("compare", slow, fast, "--output-json", str(result), capsys=capsys).splitlines()
    assert out[-2].startswith(
        "The difference is real: B is faster in output_throughput (1.50x); faster in mean_ttft_ms"
    )
    assert "not measured in turns" in out[-1]
    assert [each["verdict"] for each in json.loads(result.read_text())["differences"]] == ["faster", "faster"]
    assert "No difference shown." in bench("compare", slow, slow, capsys=capsys)
    assert main(["bench", "compare", slow, "http://127.0.0.1:1"]) == 2
    assert "A server and a file cannot be compared" in capsys.readouterr().err


@pytest.mark.skipif(not cpu.available(), reason="only the compiled kernels measure the limits")
def test_the_limit_of_a_server_on_this_machine() -> None:
    """Of what it computed, in the formats that it says it has; of a server elsewhere the limits are not known."""
    outcomes = [Outcome(32, 0.0, 0.0, 0.5, 1.0, [0.5], 2, cached_tokens=16, success=True), Outcome(32, error="no")]
    server = Server(Target(), "m", FOLDER, "bfloat16", "int8", cpu.get_num_threads(), "cpu", "fp8")
    found = serving.hardware_limit(server, [Run(outcomes, 2.0, 0.0)] * 2)
    assert found is not None
    expected = floor(
        *(load_model_config(FOLDER), "bfloat16", [Work(16, 16, 2)], Machine(1.0, 1.0, 1.0)),
        *(None, "fp8", "int8"),
    )
    assert (found["num_bytes"], found["num_int8_ops"]) == (2 * expected.num_bytes, 2 * expected.num_int8_ops)
    assert found["percent"] == pytest.approx(100 * found["seconds"] / 4.0)
    for elsewhere in (
        replace(server, target=Target(base_url="http://example.org")),
        replace(server, dtype=None),
        replace(server, device="cuda"),
    ):
        assert serving.hardware_limit(elsewhere, [Run(outcomes, 2.0, 0.0)]) is None


def test_the_model_served_is_found(to: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with RunningServer(answer=None, served_model_names=("quire-demo",)) as server:
        out = bench("serve", "--base-url", server.url, *SMALL, "--model", "quire-demo", capsys=capsys)
    assert re.search(r"Successful requests: +12\b", out)


def test_secrets_stay_out_of_result_files() -> None:
    words = [
        "bench",
        "serve",
        "--header",
        "Authorization=Bearer 1",
        "x=2",
        "--port",
        "3",
        "--hf_token=4",
        "--seed",
        "5",
    ]
    shown = ["bench", "serve", "--header", "***", "***", "--port", "3", "--hf_token=***", "--seed", "5"]
    assert without_secrets(words) == shown


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--port", "1", *SMALL]) == 1
    assert "No server answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("serve", "--num-promts", "3"), "did you mean --num-prompts?"),
        (("serve", "--hf-name", "x"), "data sets are not downloaded"),
        (("throughput", "--async-engine"), "quire bench serve"),
        (("srve",), "invalid choice: 'srve'"),
    ],
)
def test_mistakes_on_the_command_line(words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *words])
    assert end.value.code == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--goodput", "tftt:3"), "Illegal --goodput"),
        (("--percentile-metrics", "ttft,foo"), "Unknown metric"),
        (("--metric-percentiles", "101"), "Illegal --metric-percentiles"),
        (("--metadata", "x"), "KEY=VALUE"),
        (("--backend", "openai-chta"), "Did you mean 'openai-chat'?"),
        (("--self-timed",), "Only a trace has times"),
    ],
)
def test_illegal_values(flags: tuple[str, ...], part: str, to: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with RunningServer(answer=None) as server:
        assert main(["bench", "serve", *to(server), *flags]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["serve", "throughput", "latency", "startup", "compare"])
def test_help_is_grouped(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", kind, "--help"])
    groups = re.findall(r"^(\w+):$", capsys.readouterr().out, re.MULTILINE)
    wanted = {"serve": {"Workload", "Traffic", "Target", "Report"}, "compare": {"Workload", "Traffic", "Report"}}
    assert wanted.get(kind, {"EngineConfig", "Benchmark", "Report"}) <= set(groups)


def test_parsing_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom quire.cli.main import build_parser\nbuild_parser().parse_args(['bench', 'serve'])\n"
        "print(sorted({'torch', 'numpy', 'msgspec', 'uvloop', 'tokenizers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
