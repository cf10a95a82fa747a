"""Answers per second with ten times the users that a server takes, if users repeat refused requests at once.

`quire serve` on the demo model runs 8 requests and lets 16 wait. Each user sends a request, reads the answer or the
refusal, and sends the next request at once. 24 users keep the server saturated and are never refused. 240 users get ten
to a hundred times more refusals than answers. Rounds take turns. The claims: 240 users get at least 0.9 of the answers
of 24 users, and /health answers within 0.3 s (P99).

One process of plain sockets plays all users and parses only status and length. It shares the cores with the server, at
a lower priority.

    python benchmarks/overload_users.py [--seconds 20] [--rounds 3] [--save HARDWARE]

--save writes benchmarks/results/HARDWARE/overload_users_DATE.md and .json. It takes about three minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from typing import Any

import psutil
import uvloop

from quire.measure import report

MAX_NUM_SEQS, MAX_QUEUED = 8, 16
FEW, MANY = 24, 240
PROMPT_TOKENS, MAX_TOKENS = 32, 64
NUM_BODIES = 4096  # enough bodies: when a prompt comes again, it has left the prefix cache
WARM_UP_SECONDS = 3.0
HEALTH_SECONDS = 0.05  # between two requests for /health
NICENESS = 10
LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n")


class Connection(asyncio.Protocol):
    """One connection, which sends the next request when an answer is complete."""

    def __init__(self, load: Load, head: bytes = b"") -> None:
        self._load, self._head = load, head
        self._answer = b""
        self.sent_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        if self.transport.is_closing():
            return
        self._answer = b""
        self.sent_at = time.perf_counter()
        self.transport.write(self._head or next(self._load))

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, separator, body = self._answer.partition(b"\r\n\r\n")
        if separator and (found := LENGTH.search(head + b"\r\n")) and len(body) >= int(found[1]):
            self.on_answer(head[9:12].decode())

    def on_answer(self, status: str) -> None:
        self._load.seen[status] += 1
        self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.on_lost()


class Probe(Connection):
    """Requests /health at intervals."""

    def on_answer(self, status: str) -> None:
        self._load.health.append(time.perf_counter() - self.sent_at)
        asyncio.get_running_loop().call_later(HEALTH_SECONDS, self.ask)


class Load:
    """The requests of the users, and their counts."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.seen: Counter[str] = Counter()
        self.health: list[float] = []
        self._is_over = False
        draws = random.Random(0)
        self._requests = [self._request(draws) for _ in range(NUM_BODIES)]
        self._next = 0

    @staticmethod
    def _request(draws: random.Random) -> bytes:
        prompt = [draws.randrange(1000, 4000) for _ in range(PROMPT_TOKENS)]
        body = json.dumps({"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    def __next__(self) -> bytes:
        self._next = (self._next + 1) % NUM_BODIES
        return self._requests[self._next]

    def on_lost(self) -> None:
        if not self._is_over:
            self.seen["lost"] += 1

    async def round(self, num_users: int, seconds: float, server: psutil.Process) -> dict[str, Any]:
        """The rates over `seconds`, after a time to warm up."""
        loop, self._is_over = asyncio.get_running_loop(), False
        users = [Connection(self) for _ in range(num_users)]
        probe = Probe(self, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for connection in (*users, probe):
            await loop.create_connection(iter([connection]).__next__, "127.0.0.1", self.port)
        await asyncio.sleep(WARM_UP_SECONDS)
        self.seen.clear()
        self.health.clear()
        processes = {"client": psutil.Process(), "api": server}
        (processes["engine"],) = (each for each in server.children() if "quire.engine" in str(each.cmdline()))
        start, cpu = time.perf_counter(), {name: sum(each.cpu_times()[:2]) for name, each in processes.items()}
        await asyncio.sleep(seconds)
        duration = time.perf_counter() - start
        used = {
            f"{name}_cpu_percent": 100 * (sum(p.cpu_times()[:2]) - cpu[name]) / duration
            for name, p in processes.items()
        }
        seen, health = self.seen.copy(), sorted(self.health)
        self._is_over = True
        for connection in (*users, probe):
            connection.transport.abort()
        await asyncio.sleep(1.0)  # until the engine has ended all requests
        return {
            "answers": seen.pop("200", 0) / duration,
            "refusals": seen.pop("429", 0) / duration,
            "otherwise_failed": sum(seen.values()),
            "p50_health_ms": 1000 * health[len(health) // 2],
            "p99_health_ms": 1000 * health[int(len(health) * 0.99)],
            **used,
        }


def start_server() -> tuple[subprocess.Popen[str], int]:
    """Start the server and wait until it is ready. Returns its process and its port."""
    flags = ("--max-num-seqs", MAX_NUM_SEQS, "--max-num-queued-reqs", MAX_QUEUED, "--port", 0)
    command = [sys.executable, "-m", "quire", "serve", *map(str, flags), "--kv-cache-memory-bytes", "256M"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"ready     http://127.0.0.1:(\d+)", line):
            return server, int(found[1])
    raise SystemExit("the server did not start")


def markdown(result: dict[str, Any]) -> str:
    """The text of the result file."""
    lines = [
        *report.heading(f"Answers per second with {FEW} and {MANY} users in a loop", result),
        f"- `quire serve` on the demo model, --max-num-seqs {MAX_NUM_SEQS}, --max-num-queued-reqs {MAX_QUEUED};",
        f"  {PROMPT_TOKENS} tokens in, {MAX_TOKENS} out, not streamed. Users ask again at once, refused or not; they",
        f"  are one process at nice {NICENESS}, on the server's cores. Rounds of {result['seconds']:g} s, in turns.",
        f"- **Answers with {MANY} users over those with {FEW}: {result['ratio']:.2f}** (median of the rounds' ratios:",
        f"  {', '.join(f'{ratio:.2f}' for ratio in result['ratios'])}).",
        "",
        *report.table_head(
            "users | round | answers/s | refusals/s | other failures | /health P50 ms | P99 ms"
            " | API CPU % | engine CPU % | client CPU %"
        ),
    ]
    for users, rounds in result["rounds"].items():
        for i, each in enumerate(rounds, 1):
            times = f"{each['p50_health_ms']:.0f} | {each['p99_health_ms']:.0f}"
            cpu = " | ".join(f"{each[f'{name}_cpu_percent']:.0f}" for name in ("api", "engine", "client"))
            rates = f"{each['answers']:.1f} | {each['refusals']:.0f} | {each['otherwise_failed']}"
            lines.append(f"| {users} | {i} | {rates} | {times} | {cpu} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds with each number of users")
    arguments = parser.parse_args()
    environment = report.environment("python", "benchmarks/overload_users.py")
    server, port = start_server()
    os.nice(NICENESS)
    rounds: dict[str, list[dict[str, Any]]] = {str(FEW): [], str(MANY): []}
    try:
        load = Load(port)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            for _ in range(arguments.rounds):
                for users in (FEW, MANY):
                    found = runner.run(load.round(users, arguments.seconds, psutil.Process(server.pid)))
                    rounds[str(users)].append(found)
                    print(
                        f"{users} users: " + "  ".join(f"{key} {value:.1f}" for key, value in found.items()), flush=True
                    )
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            assert answer.status == 200, "the server is not well after the last round"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    pairs = zip(rounds[str(FEW)], rounds[str(MANY)], strict=True)
    ratios = [many["answers"] / few["answers"] for few, many in pairs]
    print(f"answers with {MANY} users over answers with {FEW}: {statistics.median(ratios):.2f}")
    if arguments.save:
        result = {
            **environment,
            "seconds": arguments.seconds,
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "rounds": rounds,
        }
        report.save_published(__file__, "overload_users", arguments.save, result, markdown(result))


if __name__ == "__main__":
    main()
