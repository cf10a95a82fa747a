"""`quire bench serve`: sends a workload to a running server over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

import quire.demo
from quire import envs
from quire.demo import DEMO_MODEL_NAME
from quire.errors import QuireError
from quire.frontend.tokenizer import Tokenizer
from quire.loader.hub import resolve_tokenizer_files
from quire.measure.arrivals import arrival_times
from quire.measure.floor import Work, floor, measure_machine, together
from quire.measure.http import HttpClient, HttpError
from quire.measure.load import Run, run_load
from quire.measure.options import Target, Traffic, Workload, key_values
from quire.measure.prepared_load import PreparedLoad
from quire.measure.workload import BenchRequest
from quire.model_config import load_model_config

# Names of vLLM and of Quire in Prometheus' text format.
_DRAFT_SERIES = re.compile(r"^vllm:spec_decode_num_(\w+)_total\{(.*)\} (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'\bposition="(\d+)"')
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


@dataclass(frozen=True)
class Server:
    """A server that answers, and its model and settings."""

    target: Target
    name: str  # the name that the server gives the model
    model_id: str
    dtype: str | None = None  # the dtype, if the server is Quire
    quantization: str | None = None
    num_threads: int = 0  # the threads of its engine
    device: str = "cpu"
    kv_cache_dtype: str = "auto"

    @property
    def path(self) -> str:
        if self.target.endpoint is not None:
            return self.target.endpoint
        return "/v1/chat/completions" if self.target.backend == "openai-chat" else "/v1/completions"

    @property
    def model_folder(self) -> Path | None:
        """The folder of the model, if it is on this machine."""
        if self.model_id == DEMO_MODEL_NAME:
            return quire.demo.path("target")
        return Path(self.model_id) if (Path(self.model_id) / "config.json").is_file() else None

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError if it cannot be found."""
        name = self.target.tokenizer or self.model_id
        folder = quire.demo.path("target") if name == DEMO_MODEL_NAME else resolve_tokenizer_files(name)
        return Tokenizer.from_folder(folder, self.target.tokenizer_mode)

    def client(self) -> HttpClient:
        """A client that sends VLLM_API_KEY or OPENAI_API_KEY, unless --header has a key."""
        headers = {name.lower(): value for name, value in key_values(self.target.header, "--header").items()}
        key = envs.API_KEY.get() or os.environ.get("OPENAI_API_KEY")
        if key:
            headers.setdefault("authorization", f"Bearer {key}")
        return HttpClient(self.target.url, headers, insecure=self.target.insecure)

    def make_body(self, ignore_eos: bool) -> Callable[[BenchRequest], dict[str, Any]]:
        """A function that turns a request into the JSON object of the API.

        Args:
            ignore_eos: whether answers go on after a token that ends them.
        """
        target = self.target
        is_chat = target.backend == "openai-chat"
        common: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        common |= {name: getattr(target, name) for name in SAMPLING if getattr(target, name) is not None}
        if target.logprobs is not None:
            common |= {"logprobs": True, "top_logprobs": target.logprobs} if is_chat else {"logprobs": target.logprobs}
        if ignore_eos:
            common["ignore_eos"] = True
        common |= target.extra_body or {}
        models = self._models()

        def body(request: BenchRequest) -> dict[str, Any]:
            asked = {"model": next(models), **common}
            if is_chat:
                message = {"role": "user", "content": request.prompt}
                return {"messages": [message], "max_completion_tokens": request.output_len, **asked}
            return {"prompt": request.prompt, "max_tokens": request.output_len, **asked}

        return body

    def _models(self) -> Iterator[str]:
        """The model or adapter of each request, the same ones in each run."""
        names = self.target.lora_modules or (self.name,)
        if self.target.lora_assignment == "round-robin":
            return itertools.cycle(names)
        rng = random.Random(0)
        return (rng.choice(names) for _ in itertools.repeat(None))

    def prepare(self, workload: Workload, traffic: Traffic) -> PreparedLoad:
        """The load to send. Raises ConfigError for options that contradict each other."""
        is_chat = self.target.backend == "openai-chat"
        ignore_eos = self.target.ignore_eos or workload.dataset_name in ("timed_trace", "random")
        return PreparedLoad(workload, traffic, self.tokenizer(), is_chat, ignore_eos)


class UnreachableError(QuireError):
    """No server answers at the address."""

    code, status = "server_unreachable", 503


async def find_server(target: Target) -> Server:
    """Wait for the server up to --ready-check-timeout-sec and ask for its model, or raise UnreachableError."""
    client = Server(target, "", "").client()
    deadline = time.monotonic() + target.ready_check_timeout_sec
    try:
        while True:
            try:
                card = json.loads(await client.request("GET", "/v1/models"))["data"][0]
                name = target.served_model_name or target.model or card["id"]
                if target.ready_check_timeout_sec:  # a server may list its models before it can answer
                    probe = {"model": name, "prompt": "a", "max_tokens": 1}
                    await client.request("POST", "/v1/completions", json.dumps(probe).encode())
                break
            except (OSError, HttpError, ValueError, KeyError, IndexError) as error:
                if time.monotonic() >= deadline:
                    raise UnreachableError(
                        f"No server answers: {error}",
                        value=target.url,
                        fix="Start one with `quire serve`, or name it with --base-url",
                    ) from None
            await asyncio.sleep(0.5)
        try:
            settings = json.loads(await client.request("GET", "/v1/config"))["settings"]
            engine = {
                "dtype": str(settings["dtype"]["value"]),
                "quantization": settings["quantization"]["value"],
                "kv_cache_dtype": str(settings["kv_cache_dtype"]["value"]),
                "num_threads": int(settings["num_threads"]["value"]),
                "device": str(settings["device"]["value"]),
            }
        except (OSError, HttpError, ValueError, KeyError, TypeError):
            engine = {}  # the server is not Quire
    finally:
        client.close()
    return Server(target, name, target.model or card.get("root") or card["id"], **engine)


async def warm_up(server: Server, load: PreparedLoad) -> None:
    """Send --num-warmups requests and forget them."""
    if load.traffic.num_warmups:
        requests = load.warm_up_requests()
        await _send(server, load, requests, [0.0] * len(requests))


async def one_round(
    server: Server, load: PreparedLoad, requests: Sequence[BenchRequest], seed: int, on_done: Callable[[], object]
) -> Run:
    """Send the requests of a round at the times of the traffic options."""
    return await _send(server, load, requests, arrival_times(load.traffic, requests, seed), on_done)


async def _send(
    server: Server,
    load: PreparedLoad,
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    on_done: Callable[[], object] = lambda: None,
) -> Run:
    client = server.client()
    try:
        return await run_load(
            client,
            server.path,
            requests,
            times,
            server.make_body(load.ignore_eos),
            max_concurrency=load.traffic.max_concurrency,
            on_done=on_done,
        )
    finally:
        client.close()


def run(workload: Workload, traffic: Traffic, target: Target, bar: Any) -> tuple[list[Run], dict[str, Any]]:
    """The rounds of `quire bench serve`, and facts about the server for the result.

    Args:
        bar: called with the number of requests; returns an object with update() and close().
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = runner.run(find_server(target))
        load = server.prepare(workload, traffic)
        rounds = [load.requests(workload.seed + i) for i in range(traffic.num_rounds)]
        runner.run(warm_up(server, load))
        drafts_before = runner.run(draft_counts(server))
        progress = bar(sum(map(len, rounds)))
        try:
            runs = [
                runner.run(one_round(server, load, requests, workload.seed + i, progress.update))
                for i, requests in enumerate(rounds)
            ]
        finally:
            progress.close()
        drafts = speculation_result(drafts_before, runner.run(draft_counts(server)))
    prompts = [str(request.prompt) for requests in rounds for request in requests]
    facts = {
        "model_id": server.model_id,
        "tokenizer_id": target.tokenizer or server.model_id,
        "num_requests_sent": len(prompts),
        "num_unique_prompts": len(set(prompts)),
        "hardware_limit": hardware_limit(server, runs),
        **drafts,
    }
    return runs, facts


async def draft_counts(server: Server) -> dict[str, float]:
    """The server's counts of drafts over all engines; empty if it does not speculate or has no such metrics."""
    client = server.client()
    try:
        text = (await client.request("GET", "/metrics")).decode()
    except (OSError, HttpError, ValueError):
        return {}
    finally:
        client.close()
    counts: dict[str, float] = {}
    for name, labels, value in _DRAFT_SERIES.findall(text):
        position = _POSITION.search(labels)
        key = name if position is None else position[1]
        counts[key] = counts.get(key, 0.0) + float(value)
    return counts


def speculation_result(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """The counts and the acceptance of drafts between two readings, under vLLM's keys; empty without drafts."""
    counts = {name: int(value - before.get(name, 0.0)) for name, value in after.items()}
    if not counts.get("drafts"):
        return {}
    num_drafts, num_tokens, num_accepted = (counts[name] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    positions = sorted((name for name in counts if name.isdigit()), key=int)
    return {
        "spec_decode_acceptance_rate": 100 * num_accepted / max(num_tokens, 1),
        "spec_decode_acceptance_length": 1 + num_accepted / num_drafts,
        "spec_decode_num_drafts": num_drafts,
        "spec_decode_draft_tokens": num_tokens,
        "spec_decode_accepted_tokens": num_accepted,
        "spec_decode_per_position_acceptance_rates": [counts[name] / num_drafts for name in positions],
    }


def hardware_limit(server: Server, runs: Sequence[Run]) -> dict[str, Any] | None:
    """The limit of a Quire server, if the server and its model are on this machine, without a GPU; else None."""
    is_here = urlsplit(server.target.url).hostname in ("127.0.0.1", "localhost", "::1")
    folder = server.model_folder
    if not is_here or folder is None or server.dtype is None or server.device != "cpu":
        return None
    rounds = [
        [
            Work(max(outcome.prompt_len - outcome.cached_tokens, 0), outcome.cached_tokens, outcome.output_tokens)
            for outcome in run.outcomes
            if outcome.success
        ]
        for run in runs
    ]
    machine = measure_machine(server.dtype, server.num_threads)
    if machine is None or not any(rounds):
        return None
    model = load_model_config(folder, any_architecture=True)
    floors = [
        floor(model, server.dtype, work, machine, None, server.kv_cache_dtype, server.quantization) for work in rounds
    ]
    found = together(floors)
    return found.report(sum(run.duration for run in runs), machine)
