"""The capacity of one core without an engine: streamed tokens per second and short requests per second.

The server (HTTP, front end, detokenizer, SSE) runs in a process pinned to one core, over an EchoClient in place of an
engine. The load comes from another core. The whole way is measured: sockets, HTTP parsing, validation, chat template,
tokenization, text pipeline, JSON, metrics. The cases take turns, at least three times each.

    python benchmarks/frontend_capacity.py [--streams 64] [--max-tokens 256] [--seconds 8] [--save HARDWARE]

--save writes benchmarks/results/HARDWARE/frontend_capacity_DATE.md and .json.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import time
from dataclasses import dataclass
from typing import Any

import uvicorn
import uvloop

import quire.demo
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.echo_client import EchoClient
from quire.frontend.input_processor import InputProcessor, ModelLimits
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.replica import Replica
from quire.frontend.tokenizer import Tokenizer
from quire.measure import report
from quire.metrics.prometheus import PrometheusMetrics
from quire.server.app import create_app
from quire.server.state import AppSettings

MAX_MODEL_LEN = 4096
TARGETS = {"tokens_per_s": 10_000, "requests_per_s": 500}
QUESTION = "What does os.path.join do, and what happens if one of the parts is an absolute path?"


@dataclass
class Load:
    """The work of the clients, and their counts."""

    port: int
    body: dict[str, object]
    deadline: float = 0.0
    num_requests: int = 0
    num_events: int = 0
    num_tokens: int = 0


def serve(listener: socket.socket, core: int) -> None:
    """Run the server process on one core until it is killed."""
    os.sched_setaffinity(0, {core})
    tokenizer = Tokenizer.from_folder(quire.demo.path("target"))
    metrics = PrometheusMetrics("echo", MAX_MODEL_LEN)
    inputs = InputProcessor(tokenizer, ModelLimits(MAX_MODEL_LEN, tokenizer.vocab_size))
    client = EchoClient(max_model_len=MAX_MODEL_LEN, max_num_seqs=1024)
    engine = AsyncEngine([Replica(client, OutputProcessor(tokenizer, metrics.engines[0]))], inputs)
    app = create_app(engine, tokenizer, AppSettings(("echo",), log_stats_interval=0.0), metrics)
    config = uvicorn.Config(app, http="httptools", ws="none", log_level="warning", access_log=False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(uvicorn.Server(config).serve(sockets=[listener]))


async def client(load: Load) -> None:
    """Send one request after the other on one connection, until the deadline."""
    reader, writer = await asyncio.open_connection("127.0.0.1", load.port, limit=1 << 20)
    body = json.dumps(load.body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    while time.monotonic() < load.deadline:
        writer.write(request)
        if load.body.get("stream"):
            await read_stream(reader, load)
        else:
            await read_answer(reader, load)
    writer.close()


async def read_stream(reader: asyncio.StreamReader, load: Load) -> None:
    """Count the events with text until the end of the chunked answer."""
    tail, num_events = b"", 0
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        data = await reader.read(1 << 16)
        num_events += data.count(b'"content":"') + (tail[-10:] + data[:10]).count(b'"content":"')
        tail = (tail + data)[-400:]
    usage, _ = json.JSONDecoder().raw_decode(tail[tail.rindex(b'"usage":') + 8 :].decode())
    if time.monotonic() < load.deadline:
        load.num_requests += 1
        load.num_events += num_events - 1  # the opening one has the role and no text
        load.num_tokens += usage["completion_tokens"]


async def read_answer(reader: asyncio.StreamReader, load: Load) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    answer = json.loads(await reader.readexactly(length))
    if time.monotonic() < load.deadline:
        load.num_requests += 1
        load.num_tokens += answer["usage"]["completion_tokens"]


async def drive(load: Load, num_clients: int, seconds: float) -> None:
    """Run the clients for `seconds`."""
    load.deadline = time.monotonic() + seconds
    await asyncio.gather(*(client(load) for _ in range(num_clients)))


def rates(load: Load, seconds: float) -> dict[str, float]:
    return {
        "requests_per_s": load.num_requests / seconds,
        "events_per_s": load.num_events / seconds,
        "tokens_per_s": load.num_tokens / seconds,
    }


def markdown(result: dict[str, Any]) -> str:
    """The text of the result file."""
    lines = [
        *report.heading("Front-end capacity over HTTP, on one core", result),
        "- The server is pinned to one core, the clients to the others. The engine is EchoClient, which costs almost",
        "  nothing, so only the front end is measured: tokenizer, text pipeline, chat protocol, SSE, HTTP.",
        f"- {result['streams']} connections, {result['max_tokens']} tokens a stream; short requests have 8 tokens.",
        f"  {result['num_rounds']} rounds of {result['seconds']:g} s a case, in turns. Special tokens have no text:",
        "  not every token gives an event.",
        "",
        "| case | target | median | rounds |",
        "|---|---|---|---|",
    ]
    for case, key, what in (
        ("streamed", "tokens_per_s", "streamed tokens/s"),
        ("streamed", "events_per_s", "streamed events/s"),
        ("short", "requests_per_s", "short requests/s"),
    ):
        values = [each[key] for each in result["rounds"][case]]
        target = f"{TARGETS[key]:,}" if key in TARGETS else ""
        shown = ", ".join(f"{value:,.0f}" for value in values)
        lines.append(f"| {what} | {target} | {statistics.median(values):,.0f} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("--streams", type=int, default=64, help="connections at once")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens of a streamed answer")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case, 3 or more")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("two cores are needed: one for the server, one for the load")
    if arguments.rounds < 3:
        parser.error("fewer than three rounds say nothing")
    environment = report.environment("python", "benchmarks/frontend_capacity.py")
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    server = multiprocessing.get_context("fork").Process(target=serve, args=(listener, cores[0]), daemon=True)
    server.start()
    os.sched_setaffinity(0, set(cores[1:]))
    messages = [{"role": "user", "content": QUESTION}]
    streamed = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    bodies = {
        "streamed": {**streamed, "max_tokens": arguments.max_tokens, "ignore_eos": True},
        "short": {"messages": messages, "max_tokens": 8, "ignore_eos": True},
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in bodies}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(drive(Load(port, bodies["short"]), 4, 1.0))  # warm up
        for _ in range(arguments.rounds):
            for name, body in bodies.items():
                load = Load(port, body)
                runner.run(drive(load, arguments.streams, arguments.seconds))
                found = rates(load, arguments.seconds)
                rounds[name].append(found)
                shown = "  ".join(f"{value:8.0f} {key.replace('_per_s', '/s')}" for key, value in found.items())
                print(f"{name:9} {arguments.streams} connections: {shown}")
    server.terminate()
    server.join(5)
    if arguments.save:
        result = {
            **environment,
            "streams": arguments.streams,
            "max_tokens": arguments.max_tokens,
            "seconds": arguments.seconds,
            "num_rounds": arguments.rounds,
            "targets": TARGETS,
            "rounds": rounds,
        }
        report.save_published(__file__, "frontend_capacity", arguments.save, result, markdown(result))


if __name__ == "__main__":
    main()
