"""Adapters that come and go under load: swaps beside streams, and hundreds of adapters, few of them in memory.

Swaps: --streams streams run, half of them with an adapter. In every second window of --window seconds an adapter of
rank 16 is loaded or unloaded each second. The reading is the 99th percentile of the time between tokens, with swaps
divided by without, windows in turns. Then requests name adapters that were dropped from memory, and each again: the
reading is how much later the first token comes from a disk. The system is asked to forget the files before.

Hundreds: two engines know --adapters adapters of rank 8. One has all of them in memory, the other has --in-memory. Both
get the same requests, whose adapters follow Zipf's law, --streams-of-hundreds at a time, rounds in turns. The readings
are tokens per second, memory against the plan, and whether each answer is the one that the request gets alone.

    python benchmarks/lora_serving.py [MODEL] [--what swap hundreds] [--rounds 3] [--window 5] [--streams 8]
                                      [--adapters 300] [--in-memory 32] [--streams-of-hundreds 32] [--requests 128]
                                      [--tokens 16] [--save HARDWARE]

MODEL: a folder with weights of the measured shape; the default is the bundled demo model. --save writes
benchmarks/results/HARDWARE/lora_serving_DATE.md and .json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lora import write_adapter
from safetensors.torch import load_file, save_file

from quire.config import EngineConfig
from quire.entry.launch import open_model, start_async_engine
from quire.formats.kv_format import kv_format
from quire.frontend.async_engine import AsyncEngine
from quire.lora.paths import TENSORS_NAME
from quire.measure import report
from quire.model_config import ModelConfig, load_model_config
from quire.planning.hardware import this_machine
from quire.resolve import resolve
from quire.sampling_params import SamplingParams

PROMPT_TOKENS, STREAM_TOKENS, TOP_TOKEN = 32, 2000, 4000
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Running:
    """An engine in a process of its own.

    Attributes:
        planned: the bytes of adapters in the engine's memory plan.
        pids: the ids of the engine's processes.
    """

    engine: AsyncEngine
    planned: int
    pids: set[str]

    def anonymous_bytes(self) -> int:
        """The bytes of memory that belong to no file."""
        found = 0
        for pid in self.pids:
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    found += int(line.split()[1]) << 10
        return found


def children() -> set[str]:
    """The ids of all processes that this one has started, and of their children."""
    found, waiting = set[str](), [str(os.getpid())]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(OSError):
                waiting += (more := set(task.read_text().split()) - found)
                found |= more
    return found


@asynccontextmanager
async def running(config: EngineConfig) -> AsyncIterator[Running]:
    before = children()
    parts = open_model(config, lambda phase, fraction, detail: None)
    lora = resolve(config, parts.model_config, this_machine("cpu"), is_server=False).lora
    assert lora is not None
    engine, processes = start_async_engine(config, parts)
    try:
        engine.start()
        await engine.wait_ready(600)
        yield Running(engine, lora.num_bytes(parts.model_config), children() - before)
    finally:
        engine.close()
        processes.stop()
        await engine.shutdown()


def prompt(seed: int) -> dict[str, Any]:
    numbers = random.Random(seed)
    return {"prompt_token_ids": [numbers.randrange(3, TOP_TOKEN) for _ in range(PROMPT_TOKENS)]}


_ids = itertools.count()


async def answer(
    engine: AsyncEngine, seed: int, adapter: str | None, num_tokens: int, times: list[float] | None = None
) -> list[int]:
    """The greedy tokens of one request. The arrival time of each part is added to `times`."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    token_ids: Sequence[int] = ()
    async for output in engine.generate(prompt(seed), params, f"request-{next(_ids)}", adapter=adapter):  # type: ignore[arg-type]
        token_ids = output.outputs[0].token_ids
        if times is not None:
            times.append(time.perf_counter())
    return list(token_ids)


async def first_token(engine: AsyncEngine, seed: int, adapter: str) -> float:
    started = time.perf_counter()
    await answer(engine, seed, adapter, 1)
    return time.perf_counter() - started


def forget(folder: Path) -> None:
    """Ask the system to drop an adapter's file from its page cache."""
    with (folder / TENSORS_NAME).open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def config_of(
    arguments: argparse.Namespace, model: ModelConfig, max_num_seqs: int, num_tokens: int, **given: Any
) -> EngineConfig:
    """Settings with a KV cache for `max_num_seqs` answers of `num_tokens` tokens, so that no request is preempted."""
    max_model_len = PROMPT_TOKENS + num_tokens
    return EngineConfig(
        model=arguments.model,
        quantization=arguments.quantization,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=2
        * max_num_seqs
        * max_model_len
        * model.kv_bytes_per_token(kv_format("auto", model.dtype)),
        enable_prefix_caching=False,
        enable_lora=True,
        lora_target_modules=LINEARS,
        **given,
    )


async def swaps(arguments: argparse.Namespace, model: ModelConfig, folders: Sequence[Path]) -> dict[str, Any]:
    """Measure streams beside swaps, and the first tokens of adapters that were dropped.

    Args:
        folders: the folders of adapters. Streams use the first one, the second one is swapped, and the first tokens of
            the others are timed.
    """
    config = config_of(arguments, model, arguments.streams + 1, STREAM_TOKENS, max_loras=4, max_cpu_loras=4)
    async with running(config) as run:
        engine = run.engine
        for number, folder in enumerate(folders):
            if number != 1:
                await engine.adapters.load(f"adapter-{number}", str(folder))
        waits = {"idle": await first_tokens(engine, folders)}
        times: list[list[float]] = []  # of requests

        async def stream(number: int) -> None:
            for again in itertools.count():
                times.append([])
                adapter = "adapter-0" if number % 2 else None
                await answer(engine, 100 * again + number, adapter, STREAM_TOKENS, times[-1])

        streams = [asyncio.create_task(stream(number)) for number in range(arguments.streams)]
        await asyncio.sleep(2)
        windows: dict[str, list[tuple[float, float]]] = {"still": [], "swapping": []}
        taken: list[float] = []
        for _ in range(arguments.rounds):
            for kind, spans in windows.items():
                begin = time.perf_counter()
                for second in range(arguments.window):
                    started = time.perf_counter()
                    if kind == "swapping":
                        if second % 2 == 0:
                            forget(folders[1])
                            await engine.adapters.load("swapped", str(folders[1]))
                            taken.append(time.perf_counter() - started)
                        else:
                            await engine.adapters.unload("swapped")
                    await asyncio.sleep(max(0.0, started + 1 - time.perf_counter()))
                if "swapped" in engine.adapters.by_name:
                    await engine.adapters.unload("swapped")
                spans.append((begin, time.perf_counter()))
        waits["beside the streams"] = await first_tokens(engine, folders)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    gaps = {
        kind: [
            [b - a for each in times for a, b in itertools.pairwise(each) if begin <= b < end] for begin, end in spans
        ]
        for kind, spans in windows.items()
    }
    return {
        "gaps": gaps,
        "load_seconds": taken,
        "bytes": (folders[1] / TENSORS_NAME).stat().st_size,
        "first_tokens": waits,
    }


async def first_tokens(engine: AsyncEngine, folders: Sequence[Path]) -> list[tuple[float, float]]:
    """The seconds to a first token with an adapter from the disk, and with the same adapter from memory.

    There are more adapters than fit into memory, and they take turns.
    """
    pairs = []
    for number, folder in list(enumerate(folders))[2:]:
        forget(folder)
        from_disk = await first_token(engine, 1000 + number, f"adapter-{number}")
        pairs.append((from_disk, await first_token(engine, 2000 + number, f"adapter-{number}")))
    return pairs


async def hundreds(arguments: argparse.Namespace, model: ModelConfig, folders: Sequence[Path]) -> dict[str, Any]:
    most, streams = {"some": arguments.in_memory, "all": len(folders)}, arguments.streams_of_hundreds
    weights = [1 / (place + 1) for place in range(len(folders))]
    rounds: dict[str, list[float]] = {name: [] for name in most}
    answers: dict[str, list[list[list[int]]]] = {name: [] for name in most}
    asked: list[list[tuple[int, str | None]]] = []
    for number in range(arguments.rounds + 1):
        numbers = random.Random(number)
        drawn = numbers.choices(range(len(folders)), weights, k=arguments.requests)
        asked.append([(10_000 * (number + 1) + index, f"adapter-{which}") for index, which in enumerate(drawn)])

    async def one_round(
        engine: AsyncEngine, requests: Sequence[tuple[int, str | None]]
    ) -> tuple[float, list[list[int]]]:
        found: dict[int, list[int]] = {}
        waiting = iter(list(enumerate(requests)))

        async def client() -> None:
            for index, (seed, adapter) in waiting:
                found[index] = await answer(engine, seed, adapter, arguments.tokens)

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(streams)))
        return time.perf_counter() - started, [found[index] for index in range(len(requests))]

    given = {"max_loras": min(streams, arguments.in_memory), "max_lora_rank": 8}
    configs = {
        name: config_of(arguments, model, streams, arguments.tokens, max_cpu_loras=count, **given)
        for name, count in most.items()
    }
    async with running(configs["some"]) as some, running(configs["all"]) as whole:
        engines = {"some": some, "all": whole}
        for run in engines.values():  # the KV cache takes its memory when it is used first
            await one_round(run.engine, [(index, None) for index in range(arguments.requests)])
        before = {name: run.anonymous_bytes() for name, run in engines.items()}
        for run in engines.values():
            for number, folder in enumerate(folders):
                await run.engine.adapters.load(f"adapter-{number}", str(folder))
        for number, requests in enumerate(asked):
            for name in most if number % 2 else reversed(most):
                seconds, found = await one_round(engines[name].engine, requests)
                if number:  # the first round warms up
                    rounds[name].append(seconds)
                    answers[name].append(found)
        memory = {
            name: {"planned": run.planned, "taken": run.anonymous_bytes() - before[name]}
            for name, run in engines.items()
        }
        num_alone = min(arguments.alone, arguments.requests)
        alone = [await answer(some.engine, *request, arguments.tokens) for request in asked[1][:num_alone]]
    same = sum(
        a == b for ours, theirs in zip(*answers.values(), strict=True) for a, b in zip(ours, theirs, strict=True)
    )
    return {
        "seconds": rounds,
        "different": [len({adapter for _, adapter in requests}) for requests in asked[1:]],
        "memory": memory,
        "same_answers": [same, arguments.rounds * arguments.requests],
        "same_as_alone": [sum(a == b for a, b in zip(alone, answers["some"][0], strict=False)), num_alone],
    }


def swap_lines(result: dict[str, Any]) -> list[str]:
    found = result["swap"]
    still, swapping = (found["gaps"][kind] for kind in ("still", "swapping"))
    ratios = [percentile(b, 0.99) / percentile(a, 0.99) for a, b in zip(still, swapping, strict=True)]
    pooled = [list(itertools.chain(*side)) for side in (still, swapping)]
    p99 = [percentile(side, 0.99) for side in pooled]
    medians = [statistics.median(side) for side in pooled]
    lines = [
        "",
        *report.table_head(f"{result['streams']} streams | without swaps | with | ratio (least, most of windows)"),
        f"| time between tokens, 99th percentile, ms | {1e3 * p99[0]:.1f} | {1e3 * p99[1]:.1f} | "
        f"{p99[1] / p99[0]:.3f} ({min(ratios):.3f}, {max(ratios):.3f}) |",
        f"| median, ms | {1e3 * medians[0]:.1f} | {1e3 * medians[1]:.1f} | {medians[1] / medians[0]:.3f} |",
        "",
        f"A load of {found['bytes'] / 1e6:.0f} MB took {1e3 * statistics.median(found['load_seconds']):.0f} ms "
        f"(median of {len(found['load_seconds'])}).",
        "",
        *report.table_head("first token | from a disk, ms | from memory, ms | later, ms (least, most)"),
    ]
    for name, pairs in found["first_tokens"].items():
        disk, memory = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
        later = [1e3 * (a - b) for a, b in pairs]
        lines.append(
            f"| {name} | {disk:.0f} | {memory:.0f} | {statistics.median(later):.0f} "
            f"({min(later):.0f}, {max(later):.0f}) |"
        )
    return lines


def hundreds_lines(result: dict[str, Any]) -> list[str]:
    found, tokens = result["hundreds"], result["requests"] * result["tokens"]
    rates = {name: [tokens / seconds for seconds in rounds] for name, rounds in found["seconds"].items()}
    ratios = [some / whole for some, whole in zip(rates["some"], rates["all"], strict=True)]
    counts = {"some": result["in_memory"], "all": result["adapters"]}
    lines = ["", *report.table_head(f"{result['adapters']} adapters | tokens/s | memory, MB | planned, MB")]
    for name, count in counts.items():
        memory = found["memory"][name]
        lines.append(
            f"| {count} in memory | {statistics.median(rates[name]):.1f} | {memory['taken'] / 1e6:.0f} | "
            f"{memory['planned'] / 1e6:.0f} |"
        )
    same, alone = found["same_answers"], found["same_as_alone"]
    return [
        *lines,
        "",
        f"Tokens/s with {counts['some']} in memory over all: {statistics.median(ratios):.3f} ({min(ratios):.3f}, "
        f"{max(ratios):.3f}). Each round's {result['requests']} requests name {min(found['different'])} to "
        f"{max(found['different'])} adapters. {same[0]} of {same[1]} answers are the same in both engines, and "
        f"{alone[0]} of {alone[1]} are those of the request alone.",
    ]


def markdown(result: dict[str, Any]) -> str:
    lines = [
        *report.heading("Adapters that come and go", result),
        f"- Model: {result['model']}, weights: {result['quantization'] or 'as they are'}. {result['rounds']} rounds in "
        "turns. Medians of rounds (least, most).",
    ]
    if "swap" in result:
        lines += swap_lines(result)
    if "hundreds" in result:
        lines += hundreds_lines(result)
    return "\n".join(lines) + "\n"


def variants(first: Path, count: int) -> list[Path]:
    """Write adapters of the same form as the first one, each with other numbers."""
    tensors, found = load_file(first / TENSORS_NAME), [first]
    for number in range(1, count):
        folder = first.with_name(f"{first.name}-{number}")
        folder.mkdir()
        for file in first.iterdir():
            if file.name != TENSORS_NAME:
                (folder / file.name).write_bytes(file.read_bytes())
        save_file({name: x.roll(number) for name, x in tensors.items()}, folder / TENSORS_NAME)
        found.append(folder)
    return found


async def measured(arguments: argparse.Namespace, model: ModelConfig, scratch: Path) -> dict[str, Any]:
    found = {}
    if "swap" in arguments.what:
        found["swap"] = await swaps(arguments, model, variants(write_adapter(scratch / "swap", model, 16, 0), 14))
    if "hundreds" in arguments.what:
        folders = variants(write_adapter(scratch / "hundreds", model, 8, 1), arguments.adapters)
        found["hundreds"] = await hundreds(arguments, model, folders)
    return found


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quantization")
    parser.add_argument("--what", nargs="+", default=["swap", "hundreds"], choices=["swap", "hundreds"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=int, default=5, help="seconds")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=300)
    parser.add_argument("--in-memory", type=int, default=32)
    parser.add_argument("--streams-of-hundreds", type=int, default=32)
    parser.add_argument("--requests", type=int, default=128, help="of a round")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--alone", type=int, default=12, help="requests that are repeated alone")
    arguments = parser.parse_args()
    result = report.environment("python", "benchmarks/lora_serving.py") | vars(arguments)
    parts = open_model(EngineConfig(model=arguments.model), lambda phase, fraction, detail: None)
    result["model"] = parts.model_name
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        result |= asyncio.run(measured(arguments, load_model_config(parts.model_folder), Path(scratch)))
    report.publish(__file__, arguments.save, "lora_serving", result, markdown(result))


if __name__ == "__main__":
    main()
