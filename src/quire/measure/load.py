"""Sends requests at their times, with a limit on requests in flight, and records the time of each token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.measure.http import HttpClient, HttpError
from quire.measure.workload import BenchRequest


@dataclass
class Outcome:
    """The result of one request. Times are in seconds; starts are values of time.perf_counter."""

    prompt_len: int
    start_time: float = 0.0
    queue_time: float = 0.0  # wait in the client because of --max-concurrency
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)  # gaps between events with a token
    output_tokens: int = 0
    cached_tokens: int = 0  # cached tokens of the prompt, counted by the server
    text: str = ""
    error: str = ""
    success: bool = False


@dataclass(frozen=True)
class Run:
    """One round of a load."""

    outcomes: list[Outcome]
    duration: float
    client_cpu_seconds: float


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str | None:
        return self.reasoning if self.content is None else self.content


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode
MakeBody = Callable[[BenchRequest], dict[str, Any]]


async def send(client: HttpClient, path: str, body: bytes, outcome: Outcome) -> None:
    """Send one request and fill in its outcome. A failure goes into the outcome and is not raised."""
    outcome.start_time = last = time.perf_counter()
    texts: list[str] = []
    has_first = False
    try:
        async for now, data in client.events(path, body):
            if data == b"[DONE]":
                continue
            chunk = _decode(data)
            if chunk.error is not None:
                raise HttpError(str(chunk.error))
            if chunk.choices:
                choice = chunk.choices[0]
                if choice.delta is not None and choice.delta.text is None and not has_first:
                    continue  # the opening event of a chat has the role and no token
                if has_first:
                    outcome.itl.append(now - last)
                else:
                    outcome.ttft, has_first = now - outcome.start_time, True
                last = now
                texts.append(choice.text or (choice.delta.text if choice.delta is not None else None) or "")
            if chunk.usage is not None:
                outcome.output_tokens = chunk.usage.completion_tokens or outcome.output_tokens
                outcome.prompt_len = chunk.usage.prompt_tokens or outcome.prompt_len
                details = chunk.usage.prompt_tokens_details
                outcome.cached_tokens = (details.cached_tokens or 0) if details is not None else 0
        outcome.success = has_first
        outcome.error = "" if has_first else "no token came"
    except (HttpError, OSError, EOFError, ValueError, IndexError, msgspec.MsgspecError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.text = "".join(texts)
    outcome.output_tokens = outcome.output_tokens or len(texts)
    outcome.latency = last - outcome.start_time


async def run_load(
    client: HttpClient,
    path: str,
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    make_body: MakeBody,
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[], object] = lambda: None,
) -> Run:
    """Send every request at its time (seconds after now) and wait for the answers.

    Args:
        max_concurrency: the most requests in flight. Other requests wait in the client, and their wait is measured.
        on_done: a function that is called after each request.
    """
    bodies = [msgspec.json.encode(make_body(request)) for request in requests]  # before the clock starts
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None
    outcomes = [Outcome(request.prompt_len) for request in requests]
    start, cpu = time.perf_counter(), time.process_time()

    async def one(body: bytes, outcome: Outcome) -> None:
        arrival = time.perf_counter()
        async with AsyncExitStack() as stack:
            if slots is not None:
                await stack.enter_async_context(slots)
            await send(client, path, body, outcome)
        outcome.queue_time = outcome.start_time - arrival
        on_done()

    async with asyncio.TaskGroup() as tasks:
        for body, outcome, at in zip(bodies, outcomes, times, strict=True):
            if (wait := start + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.create_task(one(body, outcome))
    return Run(outcomes, time.perf_counter() - start, time.process_time() - cpu)
