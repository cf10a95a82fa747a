"""Long prompts beside a stream of answers: the time between tokens and the throughput, by budget and by target.

It runs `quire serve` with MODEL or the demo model, and leaves it alone for 20 seconds: an idle server measures its
steps and computes steps of all recorded sizes. Then a round that is not counted teaches it its margin. Users get
answers without a pause, and a long prompt comes every few seconds. Rounds go through fixed budgets of 2,048 and 8,192
tokens and the target --itl in turns, on one server. `POST /v1/config` sets them. A round ends when all its requests
have ended.

    python benchmarks/slo.py [MODEL] [--itl 50ms] [--users 4] [--long 6] [--long-input 3000] [--rounds 3]
        [--save HARDWARE] [-- further flags of quire serve]

The claim is this: with the target, the P99 of the time between tokens is within the target, which both budgets miss,
and the throughput is at least 95 % of that of the better budget. --save writes benchmarks/results/HARDWARE/slo_DATE.md
and .json. The demo model takes prompts of at most 2,000 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from quire.measure import report
from quire.option import parse_duration

BUDGETS = (2048, 8192)
TARGET = "target"
SETTLING_SECONDS = 20.0


@dataclass
class Times:
    """Times of the users in seconds."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # the times to the first token of the long prompts
    num_tokens: int = 0  # the tokens of prompts and answers


class Bench:
    """The users of one server."""

    def __init__(self, http: httpx.AsyncClient, arguments: argparse.Namespace) -> None:
        self._http, self._arguments, self._draw = http, arguments, random.Random(0)

    async def request(self, num_input: int, num_output: int, times: Times, first: list[float]) -> None:
        """Send one request whose prompt is not in the prefix cache."""
        body = {
            "prompt": self._draw.choices(range(10, 2000), k=num_input),
            "max_tokens": num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,  # every token gives a piece of the answer, even a token without text
        }
        last, count = time.perf_counter(), 0
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"HTTP {answer.status_code}: {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    (times.gaps if count else first).append(now - last)
                    last, count = now, count + 1
        times.num_tokens += num_input + num_output

    async def round(self, name: str) -> dict[str, Any]:
        """Measure a round of answers and long prompts, with a fixed budget or the target."""
        given = self._arguments
        budget, target = (BUDGETS[-1], given.itl) if name == TARGET else (int(name), None)
        moves = {"max_num_batched_tokens": budget, "slo_itl": target}
        (await self._http.post("/v1/config", json=moves)).raise_for_status()
        times, ignored, start = Times(), list[float](), time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(given.users):
                tasks.create_task(self.request(16, given.answer, times, ignored))
            for _ in range(given.long):
                await asyncio.sleep(given.interval)
                tasks.create_task(self.request(given.long_input, 16, times, times.first))
        seconds = time.perf_counter() - start
        times.gaps.sort()
        return {
            "p99_itl": times.gaps[int(0.99 * len(times.gaps))],
            "p50_itl": statistics.median(times.gaps),
            "long_ttft": statistics.median(times.first),
            "tokens_per_second": times.num_tokens / seconds,
        }


async def run(url: str, arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in (*map(str, BUDGETS), TARGET)}
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        bench = Bench(http, arguments)
        await bench.round(TARGET)
        for _ in range(arguments.rounds):
            for name, found in rounds.items():
                found.append(await bench.round(name))
                print(f"{name}: {', '.join(f'{key} {value:.3f}' for key, value in found[-1].items())}", flush=True)
    return rounds


def markdown(result: dict[str, Any]) -> str:
    """The text of the result file."""
    rounds = result["rounds"]
    best = max(statistics.median(each["tokens_per_second"] for each in rounds[str(budget)]) for budget in BUDGETS)
    lines = [
        *report.heading("A target for the time between tokens beside long prompts", result),
        f"- `{result['server']}`: {result['users']} answers of {result['answer']} tokens, beside them a prompt of",
        f"  {result['long_input']} tokens every {result['interval']:g} s, {result['long']} a round. Target: "
        f"{result['itl']}. Rounds in turns; medians of {len(rounds[TARGET])}.",
        "",
        *report.table_head("budget | P99 ITL ms | p50 ITL ms | long p50 TTFT s | tokens/s | over the best budget"),
    ]
    for name, found in rounds.items():
        middle = {key: statistics.median(each[key] for each in found) for key in found[0]}
        lines.append(
            f"| {name} | {1e3 * middle['p99_itl']:.1f} | {1e3 * middle['p50_itl']:.1f} | {middle['long_ttft']:.2f} "
            f"| {middle['tokens_per_second']:.0f} | {middle['tokens_per_second'] / best:.2f} |"
        )
    return "\n".join(lines) + "\n"


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if server.poll() is not None:
            sys.exit(f"The server ended with exit code {server.returncode}.")
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    sys.exit("The server was not ready within ten minutes.")


def main() -> None:
    words, _, further = " ".join(sys.argv[1:]).partition(" -- ")
    parser = report.script_parser(__doc__)
    parser.add_argument("model", nargs="?", help="none: the demo model")
    parser.add_argument("--itl", default="50ms", help="the target")
    parser.add_argument("--users", type=int, default=4, help="answers at once")
    parser.add_argument("--answer", type=int, default=400, help="tokens of an answer")
    parser.add_argument("--long", type=int, default=6, help="long prompts of a round")
    parser.add_argument("--long-input", type=int, default=3000, help="tokens of a long prompt")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two long prompts")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(words.split())
    parse_duration(arguments.itl)
    environment = report.environment("python", "benchmarks/slo.py")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = ["--port", str(port), "--max-num-batched-tokens", str(BUDGETS[-1]), "--max-shared-prefill-tokens", "0"]
    command = ["quire", "serve", *([arguments.model] if arguments.model else []), *flags, *further.split()]
    server = subprocess.Popen([sys.executable, "-m", *command])
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, server)
        time.sleep(SETTLING_SECONDS)
        rounds = asyncio.run(run(url, arguments))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    result = {**environment, **vars(arguments), "server": " ".join(command), "rounds": rounds}
    report.publish(__file__, arguments.save, "slo", result, markdown(result))


if __name__ == "__main__":
    main()
