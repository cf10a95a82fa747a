"""Two replicas of one thread each beside one engine of two threads: tokens per second over HTTP.

Both servers run all the time; one of them is idle. Users ask for answers without a pause. In every round the servers
get the same prompts in turns, and the one that is first changes from round to round.

    python benchmarks/replicas.py [MODEL] [--replicas 2] [--threads 1] [--users 2 8 32] [--requests 4] [--input 128]
        [--answer 128] [--rounds 5] [--save HARDWARE] [-- further flags of quire serve]

--requests: the requests of each user in a round. The claim: at least 0.9 of the tokens per second of one engine.
--save writes benchmarks/results/HARDWARE/replicas_DATE.md and .json.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from quire.measure import report

WANTED = 0.9
START_SECONDS = 600.0


@contextmanager
def serving(model: str | None, flags: list[str]) -> Iterator[str]:
    """Start a server. Yields its address when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-P", "-m", "quire", "serve", *([model] if model else []), "--port", str(port), *flags]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
            while not _is_ready(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the server did not start: {command}")
                time.sleep(0.1)
            yield url
        finally:
            server.send_signal(signal.SIGTERM)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


async def tokens_per_second(url: str, prompts: list[list[list[int]]], num_answer: int) -> float:
    """The tokens of answers per second, from the first request to the last answer.

    Args:
        prompts: for each user, the prompts that it sends one after the other.
    """
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:

        async def ask(own: list[list[int]]) -> None:
            for prompt in own:
                body = {"prompt": prompt, "max_tokens": num_answer, "temperature": 0, "ignore_eos": True}
                (await http.post("/v1/completions", json=body)).raise_for_status()

        started = time.perf_counter()
        await asyncio.gather(*(ask(own) for own in prompts))
        return sum(map(len, prompts)) * num_answer / (time.perf_counter() - started)


def measure(urls: dict[str, str], given: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """The tokens per second of each server, by the number of users and the round."""
    draw, found = random.Random(0), dict[str, list[dict[str, float]]]()
    for users in given.users:
        rounds = found[str(users)] = []
        for number in range(given.rounds + 1):
            prompts = [
                [draw.choices(range(10, 2000), k=given.input) for _ in range(given.requests)] for _ in range(users)
            ]
            names = list(urls) if number % 2 else list(urls)[::-1]
            rates = {name: asyncio.run(tokens_per_second(urls[name], prompts, given.answer)) for name in names}
            if number:  # the round before takes pages and records steps
                rounds.append(rates)
                print(f"{users} users: {', '.join(f'{name} {rates[name]:.1f}' for name in urls)}", flush=True)
    return found


def ratios(rounds: list[dict[str, float]]) -> list[float]:
    return [each["replicas"] / each["one"] for each in rounds]


def markdown(result: dict[str, Any]) -> str:
    """The text of the result file."""
    lines = [
        *report.heading("Replicas beside one engine", result),
        f"- {result['replicas']} replicas x {result['threads']} threads (`{result['flags']['replicas']}`) beside one",
        f"  engine (`{result['flags']['one']}`). Prompts of {result['input']} tokens, answers of {result['answer']}.",
        f"- Rounds in turns, both servers up; medians of {result['num_rounds']} (least, most). Wanted: {WANTED}.",
        "",
        *report.table_head("users | one engine, tokens/s | replicas, tokens/s | ratio"),
    ]
    for users, rounds in result["rounds"].items():
        cells = [f"{statistics.median(each[name] for each in rounds):.1f}" for name in ("one", "replicas")]
        found = ratios(rounds)
        cells.append(f"{statistics.median(found):.3f} ({min(found):.3f}, {max(found):.3f})")
        lines.append(f"| {users} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    words, _, further = " ".join(sys.argv[1:]).partition(" -- ")
    parser = report.script_parser(__doc__)
    parser.add_argument("model", nargs="?")
    for name, default in (("replicas", 2), ("threads", 1), ("requests", 4), ("input", 128), ("answer", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--users", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(words.split())
    environment = report.environment("python", "benchmarks/replicas.py")
    all_threads = str(given.replicas * given.threads)
    flags = {
        "one": ["--num-threads", all_threads, *further.split()],
        "replicas": ["-dp", str(given.replicas), "--num-threads", str(given.threads), *further.split()],
    }
    with ExitStack() as stack:
        urls = {name: stack.enter_context(serving(given.model, words)) for name, words in flags.items()}
        rounds = measure(urls, given)
    result = {
        **environment,
        **vars(given),
        "num_rounds": given.rounds,
        "flags": {name: " ".join(words) for name, words in flags.items()},
        "rounds": rounds,
    }
    report.publish(__file__, given.save, "replicas", result, markdown(result))


if __name__ == "__main__":
    main()
