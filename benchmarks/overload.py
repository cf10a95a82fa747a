"""Goodput at saturation and at five times saturation, with the real engine, through HTTP.

`quire serve` runs on one core with MODEL or the demo model, the client on the others. First a closed loop with the
number of requests that the server runs at once measures the saturation rate. Then this rate and five times this rate
are offered in turns (Poisson), at least three times each. The server refuses requests above its capacity with 429:
those that find a full queue, or with --slo-ttft those whose first token would come too late. Goodput counts requests
that end within the limits of --goodput, which are 1 s for the first token and 3 s for the answer, or the targets.
The claim: goodput at five times saturation is at least 0.95 of that at saturation.

    python benchmarks/overload.py [MODEL] [--slo-ttft 2s --slo-itl 100ms] [--seconds 8] [--rounds 3] [--save HARDWARE]
        [-- further flags of quire serve]

--save writes benchmarks/results/HARDWARE/overload_DATE.md and .json, with the model's name if there is one. It takes
about two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from quire.measure import report
from quire.measure.load import Run
from quire.measure.options import Report, Target, Traffic, Workload
from quire.measure.serving import find_server, one_round, warm_up
from quire.measure.statistics import measure
from quire.option import parse_duration

MAX_QUEUED = 16
FACTOR = 5
SETTLING_SECONDS = 20.0  # an idle server measures its steps


def server_command(given: argparse.Namespace, further: list[str]) -> list[str]:
    """The words after `quire`. Without targets the queue is bounded, because the server must stay quick."""
    targets = [
        word for name in ("slo_ttft", "slo_itl") if (value := getattr(given, name)) for word in (flag(name), value)
    ]
    queue = targets or ["--max-num-queued-reqs", str(MAX_QUEUED)]
    model = [given.model] if given.model else []
    sizes = ["--max-num-seqs", str(given.max_num_seqs), "--num-threads", "1", "--kv-cache-memory-bytes", given.kv_cache]
    return ["serve", *model, *sizes, *queue, *further]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def start_server(core: int, port: int, command: list[str]) -> subprocess.Popen[bytes]:
    """Start the server and its engine on one core."""
    words = [sys.executable, "-m", "quire", *command, "--port", str(port)]
    return subprocess.Popen(["taskset", "-c", str(core), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def limits(given: argparse.Namespace) -> tuple[str, ...]:
    """The limits of a good request, as in --goodput of `quire bench serve`."""
    if given.goodput:
        return tuple(given.goodput)
    names = {"slo_ttft": "ttft", "slo_itl": "tpot"}
    targets = [
        f"{name}:{1000 * parse_duration(text):g}" for key, name in names.items() if (text := getattr(given, key))
    ]
    return tuple(targets) or ("ttft:1000", "e2el:3000")


class Bench:
    """The rounds of one server."""

    def __init__(self, port: int, given: argparse.Namespace) -> None:
        self._given, self._limits = given, Report(goodput=limits(given)).limits_ms()
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        target = Target(
            base_url=f"http://127.0.0.1:{port}", temperature=0.0, ready_check_timeout_sec=60, ignore_eos=True
        )
        self._server = self._runner.run(find_server(target))
        self._seed = 0

    def round(self, num_prompts: int, traffic: Traffic) -> dict[str, float]:
        """Send `num_prompts` requests with new prompts, which are not in the prefix cache."""
        self._seed += 1
        lengths = {"random_input_len": self._given.input_len, "random_output_len": self._given.output_len}
        workload = Workload(num_prompts=num_prompts, **lengths)
        plan = self._server.prepare(workload, traffic)
        requests = plan.requests(self._seed)
        if traffic.num_warmups:
            self._runner.run(warm_up(self._server, plan))
        run: Run = self._runner.run(one_round(self._server, plan, requests, self._seed, lambda: None))
        metrics = measure([run], [99], self._limits)
        refused = sum("HTTP 429" in outcome.error for outcome in run.outcomes)
        return {
            "offered": num_prompts / run.duration,
            "completed": metrics.completed / run.duration,
            "goodput": metrics.num_good / run.duration,
            "refused": refused,
            "otherwise_failed": metrics.failed - refused,
            "p99_ttft_ms": 1000 * metrics.times["ttft"].percentiles[99],
            "client_cpu_percent": 100 * run.client_cpu_seconds / run.duration,
        }

    def close(self) -> None:
        self._runner.close()


def markdown(result: dict[str, Any]) -> str:
    """The text of the result file."""
    lines = [
        *report.heading("Goodput at five times saturation", result),
        f"- `quire {' '.join(result['server'])}` on one core, the client on the others.",
        f"- {result['input_len']} tokens in, {result['output_len']} out. Poisson arrivals, rounds in turns.",
        f"- Goodput: requests per second that end within {', '.join(result['goodput_limits'])} (ms).",
        f"- Saturation: {result['saturation']:.1f} requests/s. **Goodput at {FACTOR}x over goodput at 1x: "
        f"{result['ratio']:.2f}** (median of the rounds' ratios: {', '.join(f'{r:.2f}' for r in result['ratios'])}).",
        "",
        *report.table_head(
            "offered | round | offered req/s | completed req/s | goodput req/s | refused (429)"
            " | other failures | P99 TTFT ms | client CPU %"
        ),
    ]
    for name, rounds in result["rounds"].items():
        for i, each in enumerate(rounds, 1):
            values = [each[key] for key in ("offered", "completed", "goodput")]
            rates = " | ".join(f"{value:.1f}" for value in values)
            rest = f"{each['refused']} | {each['otherwise_failed']} | {each['p99_ttft_ms']:.0f}"
            lines.append(f"| {name} | {i} | {rates} | {rest} | {each['client_cpu_percent']:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    words, _, further = " ".join(sys.argv[1:]).partition(" -- ")
    parser = report.script_parser(__doc__)
    parser.add_argument("model", nargs="?", help="none: the demo model")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds at each rate, 3 or more")
    parser.add_argument("--goodput", nargs="+", help="limits of a good request, in ms, such as ttft:1000")
    parser.add_argument("--slo-ttft", help="as in quire serve")
    parser.add_argument("--slo-itl", help="as in quire serve")
    parser.add_argument("--input-len", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="as in quire serve")
    parser.add_argument("--kv-cache", default="256M", help="memory of the KV cache")
    given = parser.parse_args(words.split())
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or given.rounds < 3:
        parser.error("two cores and three rounds are needed")
    environment = report.environment("python", "benchmarks/overload.py")
    os.sched_setaffinity(0, set(cores[1:]))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = server_command(given, further.split())
    server = start_server(cores[0], port, command)
    try:
        bench = Bench(port, given)
        time.sleep(SETTLING_SECONDS)
        closed = Traffic(max_concurrency=given.max_num_seqs, num_warmups=given.max_num_seqs)
        first = bench.round(4 * given.max_num_seqs, closed)
        num_prompts = max(4 * given.max_num_seqs, int(first["completed"] * given.seconds))
        saturation = bench.round(num_prompts, closed)["completed"]
        print(f"saturation: {saturation:.1f} requests/s", flush=True)
        rounds: dict[str, list[dict[str, float]]] = {"1x": [], f"{FACTOR}x": []}
        for _ in range(given.rounds):
            for name, factor in (("1x", 1), (f"{FACTOR}x", FACTOR)):
                rate = factor * saturation
                found = bench.round(int(rate * given.seconds), Traffic(request_rate=rate))
                rounds[name].append(found)
                print(f"{name}: " + "  ".join(f"{key} {value:.1f}" for key, value in found.items()), flush=True)
        bench.close()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    pairs = zip(rounds["1x"], rounds[f"{FACTOR}x"], strict=True)
    ratios = [more["goodput"] / once["goodput"] for once, more in pairs]
    result = {
        **environment,
        **vars(given),
        "server": command,
        "goodput_limits": limits(given),
        "saturation": saturation,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "rounds": rounds,
    }
    what = "_".join(["overload", *([Path(given.model).name] if given.model else [])])
    report.publish(__file__, given.save, what, result, markdown(result))


if __name__ == "__main__":
    main()
