"""Goodput at saturation and at five times saturation, with the real engine on the demo model, through HTTP.

`quire serve` runs on one core, the client on the others. First a closed loop with the number of requests that the
server runs at once measures the saturation rate. Then this rate and five times this rate are offered in turns
(Poisson), at least three times each. The server refuses requests above its capacity with 429. Goodput counts requests
that end within the limits of --goodput. The claim: goodput at five times saturation is not less than at saturation.

    python benchmarks/overload.py [--seconds 8] [--rounds 3] [--save HARDWARE]

--save writes benchmarks/results/HARDWARE/overload_DATE.md and .json. It takes about two minutes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
from typing import Any

import uvloop

from quire.measure import report
from quire.measure.load import Run
from quire.measure.options import Report, Target, Traffic, Workload
from quire.measure.serving import find_server, one_round, warm_up
from quire.measure.statistics import measure

INPUT_LEN, OUTPUT_LEN, MAX_NUM_SEQS, MAX_QUEUED = 64, 128, 16, 16
FACTOR = 5


def start_server(core: int, port: int) -> subprocess.Popen[bytes]:
    """Start the server and its engine on one core. Its queue is bounded, because the server must stay quick."""
    flags = ("--max-num-seqs", MAX_NUM_SEQS, "--max-num-queued-reqs", MAX_QUEUED, "--num-threads", 1, "--port", port)
    command = [sys.executable, "-m", "quire", "serve", *map(str, flags), "--kv-cache-memory-bytes", "256M"]
    return subprocess.Popen(
        ["taskset", "-c", str(core), *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


class Bench:
    """The rounds of one server."""

    def __init__(self, port: int, limits: tuple[str, ...]) -> None:
        self._limits = Report(goodput=limits).limits_ms()
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        target = Target(base_url=f"http://127.0.0.1:{port}", temperature=0.0, ready_check_timeout_sec=60)
        self._server = self._runner.run(find_server(target))
        self._seed = 0

    def round(self, num_prompts: int, traffic: Traffic) -> dict[str, float]:
        """Send `num_prompts` requests with new prompts, which are not in the prefix cache."""
        self._seed += 1
        workload = Workload(num_prompts=num_prompts, random_input_len=INPUT_LEN, random_output_len=OUTPUT_LEN)
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
        f"- `quire serve` on the demo model on one core, the client on the others; {INPUT_LEN} tokens in, {OUTPUT_LEN}",
        f"  out, --max-num-seqs {MAX_NUM_SEQS}, --max-num-queued-reqs {MAX_QUEUED}. Poisson arrivals, rounds in turns.",
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
    parser = report.script_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds at each rate, 3 or more")
    parser.add_argument("--goodput", nargs="+", default=["ttft:1000", "e2el:3000"], help="limits of a good request, ms")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or arguments.rounds < 3:
        parser.error("two cores and three rounds are needed")
    environment = report.environment("python", "benchmarks/overload.py")
    os.sched_setaffinity(0, set(cores[1:]))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = start_server(cores[0], port)
    try:
        bench = Bench(port, tuple(arguments.goodput))
        closed = Traffic(max_concurrency=MAX_NUM_SEQS, num_warmups=2 * MAX_NUM_SEQS)
        first = bench.round(8 * MAX_NUM_SEQS, closed)
        saturation = bench.round(max(64, int(first["completed"] * arguments.seconds)), closed)["completed"]
        print(f"saturation: {saturation:.1f} requests/s")
        rounds: dict[str, list[dict[str, float]]] = {"1x": [], f"{FACTOR}x": []}
        for _ in range(arguments.rounds):
            for name, factor in (("1x", 1), (f"{FACTOR}x", FACTOR)):
                rate = factor * saturation
                found = bench.round(int(rate * arguments.seconds), Traffic(request_rate=rate))
                rounds[name].append(found)
                print(f"{name}: " + "  ".join(f"{key} {value:.1f}" for key, value in found.items()))
        bench.close()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    pairs = zip(rounds["1x"], rounds[f"{FACTOR}x"], strict=True)
    ratios = [more["goodput"] / once["goodput"] for once, more in pairs]
    print(f"goodput at {FACTOR}x over goodput at 1x: {statistics.median(ratios):.2f}")
    if arguments.save:
        result = {
            **environment,
            "goodput_limits": arguments.goodput,
            "saturation": saturation,
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "rounds": rounds,
        }
        report.save_published(__file__, "overload", arguments.save, result, markdown(result))


if __name__ == "__main__":
    main()
