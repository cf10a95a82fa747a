"""Two servers, measured in turns by vLLM's own load generator (`vllm bench serve`) at several request rates.

    python benchmarks/peers/over_http.py MODEL --server quire="quire serve MODEL --port {port}" \
        --server vllm="vllm serve MODEL --port {port}" --rates 0.25 1 inf [--rounds 3] [--save HARDWARE]

Both servers run all the time, but only one of them gets requests at a time. In a round, both servers get the same
prompts at a rate; other rates and other rounds have other prompts. A ratio is the first server's value divided by the
second server's value in the same round. The result is the median of the ratios.
"""

from __future__ import annotations

import json
import shlex
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from quire.measure import report

INPUT_LEN, OUTPUT_LEN = 256, 64
START_SECONDS = 900  # vLLM compiles on its first start
METRICS = {  # key of the client's JSON file: (shown name, whether more is better)
    "output_throughput": ("output tok/s", True),
    "mean_ttft_ms": ("mean TTFT ms", False),
    "p99_ttft_ms": ("P99 TTFT ms", False),
    "mean_tpot_ms": ("mean TPOT ms", False),
}

Rounds = dict[str, dict[str, list[dict[str, float]]]]  # by rate and server


class Server:
    """One server process, ready when it answers a request."""

    def __init__(self, name: str, command: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.name = name
        self._process = subprocess.Popen(
            shlex.split(command.format(port=self.port)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise SystemExit(f"{self.name} ended with exit code {self._process.returncode} before it was ready")
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(1)
        raise SystemExit(f"{self.name} was not ready after {START_SECONDS} s")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


def ask(server: Server, model: str, rate: str, num_prompts: int, seed: int) -> dict[str, float]:
    """One run of the client against one server."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "backend": "openai",
            "base-url": f"http://127.0.0.1:{server.port}",
            "model": model,
            "dataset-name": "random",
            "random-input-len": INPUT_LEN,
            "random-output-len": OUTPUT_LEN,
            "num-prompts": num_prompts,
            "request-rate": rate,
            "seed": seed,
            "result-dir": folder,
            "result-filename": "result.json",
        }
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = ["vllm", "bench", "serve", *flags, "--ignore-eos", "--save-result", "--disable-tqdm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"vllm bench serve failed:\n{done.stderr[-2000:]}")
        found = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    if found["completed"] != num_prompts:
        raise SystemExit(f"{server.name} completed {found['completed']} of {num_prompts} requests")
    return {key: float(found[key]) for key in METRICS}


def ratios(rounds: Rounds, rate: str, key: str) -> list[float]:
    """The ratio of each round, first server over second server; above 1, the first server is better."""
    first, second = rounds[rate].values()
    is_more_better = METRICS[key][1]
    pairs = [(a[key], b[key]) for a, b in zip(first, second, strict=True)]
    return [a / b if is_more_better else b / a for a, b in pairs]


def markdown(result: dict[str, Any], rounds: Rounds) -> str:
    """The text of the result file."""
    first, second = result["servers"]
    lines = [
        *report.heading(f"{first} against {second} over HTTP, by `vllm bench serve`", result),
        f"- Random prompts, {INPUT_LEN} tokens in, {OUTPUT_LEN} out, {result['num_prompts']} requests a run; both",
        f"  servers alive, one at a time under load, {result['num_rounds']} rounds in turns. The client runs",
        "  on the same cores.",
        f"- Values are medians of the rounds; ratio: {first} over {second}, the median of the rounds' ratios, above 1",
        f"  if {first} is better (more tokens, less time).",
        "",
        f"| requests/s | metric | {first} | {second} | ratio | ratios of the rounds |",
        "|---|---|---|---|---|---|",
    ]
    for rate, by_server in rounds.items():
        for key, (name, _) in METRICS.items():
            values = " | ".join(f"{statistics.median(r[key] for r in each):.1f}" for each in by_server.values())
            of_rounds = ratios(rounds, rate, key)
            shown = ", ".join(f"{ratio:.2f}" for ratio in of_rounds)
            lines.append(f"| {rate} | {name} | {values} | {statistics.median(of_rounds):.2f}x | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model", help="the model's folder; both servers and the client use this name")
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND", help="two of them")
    parser.add_argument("--rates", nargs="+", default=["0.25", "1", "inf"], help="requests per second")
    parser.add_argument("--num-prompts", type=int, default=32, help="requests of a run")
    parser.add_argument("--rounds", type=int, default=3, help="3 or more")
    arguments = parser.parse_args()
    if len(arguments.server) != 2 or arguments.rounds < 3:
        parser.error("two servers and at least three rounds are needed")
    servers = [Server(*word.split("=", 1)) for word in arguments.server]
    rounds: Rounds = {rate: {server.name: [] for server in servers} for rate in arguments.rates}
    try:
        for server in servers:
            server.wait()
            ask(server, arguments.model, "inf", 8, seed=0)  # warm-up
        seed = 0
        for _ in range(arguments.rounds):
            for rate in arguments.rates:
                seed += 1  # both servers get the new seed: prompts of an earlier run would be in the prefix caches
                for server in servers:
                    found = ask(server, arguments.model, rate, arguments.num_prompts, seed)
                    rounds[rate][server.name].append(found)
                    print(f"{server.name} at {rate}/s:", "  ".join(f"{key} {x:.1f}" for key, x in found.items()))
    finally:
        for server in servers:
            server.stop()
    result = {
        **report.environment("python", "benchmarks/peers/over_http.py"),
        "servers": [server.name for server in servers],
        "num_prompts": arguments.num_prompts,
        "num_rounds": arguments.rounds,
        "rounds": rounds,
    }
    report.publish(__file__, arguments.save, "compare_http", result, markdown(result, rounds))


if __name__ == "__main__":
    main()
