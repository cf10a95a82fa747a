"""The cost of adapters: a step whose rows have adapters, divided by the same step of an engine without adapters.

Two engines hold the same model, one with --enable-lora. A case is the requests of a step, the tokens of each, and the
number of different adapters among them: 0 is base traffic on the engine that serves adapters. Each adapter is of the
given rank on all linear layers. Every round takes turns over formats, cases and both engines. A time covers the whole
step, from the batch to the tokens.

    python benchmarks/lora.py [MODEL] [--formats none int8 int4] [--ranks 8 16] [--decodes 1 8 32] [--prompts 512]
                              [--context 64] [--rounds 5] [--steps 6] [--save HARDWARE]

MODEL: a folder with weights of the measured shape; the default is the bundled demo model. --save writes
benchmarks/results/HARDWARE/lora_DATE.md and .json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.start import start_engine
from quire.entry.launch import find_model
from quire.lora.adapter_config import CONFIG_NAME
from quire.lora.paths import TENSORS_NAME
from quire.measure import report
from quire.model_config import ModelConfig, load_model_config


@dataclass(frozen=True)
class Case:
    """The requests of a step, which have the same number of tokens, and the number of their different adapters."""

    requests: int
    tokens: int
    adapters: int
    rank: int

    @property
    def name(self) -> str:
        kind = "decode" if self.tokens == 1 else f"prompt of {self.tokens}"
        return f"{self.requests} x {kind}, {self.adapters} adapters of rank {self.rank}"


def write_adapter(folder: Path, model: ModelConfig, rank: int, seed: int) -> Path:
    """Write a PEFT adapter with random numbers on all linear layers of the blocks."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in model.layers:
        for linear in layer.linears():
            for shard, size in linear.shards:
                name = f"base_model.model.{linear.prefix}{shard}"
                for part, shape in (("A", (rank, linear.in_features)), ("B", (size, rank))):
                    tensors[f"{name}.lora_{part}.weight"] = (0.02 * torch.randn(shape, generator=generator)).bfloat16()
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
    (folder / CONFIG_NAME).write_text(json.dumps(settings))
    save_file(tensors, folder / TENSORS_NAME)
    return folder


def step_seconds(core: EngineCore, case: Case, digests: list[str], context: int) -> float:
    """The seconds of one step. Row i has the adapter i modulo their number; without digests, all rows use the base."""
    batch = core.scheduler.probe([(context if case.tokens == 1 else 0, case.tokens)] * case.requests)
    assert batch is not None, "the KV cache is too small"
    for index, row in enumerate(batch.new_rows):
        row.adapter = digests[index % len(digests)] if digests else None
    started = time.perf_counter()
    core.executor.submit(batch).result()
    return time.perf_counter() - started


def median_steps(
    plain: EngineCore, adapted: EngineCore, case: Case, digests: list[str], context: int, steps: int
) -> tuple[float, float]:
    """The milliseconds of a step without and with adapters: medians of `steps` steps in turns.

    A first step of each is not counted.
    """
    pairs = [
        (step_seconds(plain, case, [], context), step_seconds(adapted, case, digests, context))
        for _ in range(1 + steps)
    ]
    without, with_ = (1e3 * statistics.median(side) for side in zip(*pairs[1:], strict=True))
    return without, with_


def markdown(result: dict[str, Any]) -> str:
    lines = [
        *report.heading("The cost of adapters", result),
        f"- Model: {result['model']}. {result['context']} tokens of context. {result['rounds']} rounds of "
        f"{result['steps']} steps, in turns. Medians of steps, of rounds, and of the rounds' ratios (least, most).",
        "- 0 adapters: base traffic on an engine that serves adapters.",
        "",
        *report.table_head("weights | step | without, ms | with, ms | ratio"),
    ]
    for form, found in result["formats"].items():
        for name, rounds in found.items():
            ratios = [with_ / without for without, with_ in rounds]
            without, with_ = (statistics.median(side) for side in zip(*rounds, strict=True))
            lines.append(
                f"| {form} | {name} | {without:.2f} | {with_:.2f} | "
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f}) |"
            )
    return "\n".join(lines) + "\n"


def cases_of(arguments: argparse.Namespace) -> Iterator[Case]:
    for requests in arguments.decodes:
        yield Case(requests, 1, 0, 0)
        for rank in arguments.ranks:
            for adapters in sorted({1, requests}):
                yield Case(requests, 1, adapters, rank)
    for tokens in arguments.prompts:
        yield Case(1, tokens, 0, 0)
        yield from (Case(1, tokens, 1, rank) for rank in arguments.ranks)


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--formats", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--decodes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    environment = report.environment("python", "benchmarks/lora.py")
    cases = list(cases_of(arguments))
    most = max(arguments.decodes)
    formats: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        paths: dict[int, list[Path]] = {}
        for form in arguments.formats:
            engines = []
            for enable_lora in (False, True):
                config = EngineConfig(
                    model=arguments.model,
                    quantization=None if form == "none" else form,
                    max_model_len=2048,
                    max_num_seqs=most,
                    max_num_batched_tokens=2048,
                    kv_cache_memory_bytes=512 << 20,
                    enable_lora=enable_lora,
                    max_loras=most * len(arguments.ranks) if enable_lora else None,
                )
                folder, name, _ = find_model(config, None, weights=True)
                engines.append(start_engine(config, folder, is_server=False, progress=lambda *report: None))
            model = load_model_config(folder)
            if not paths:
                for rank in arguments.ranks:
                    places = [Path(scratch) / f"{rank}-{seed}" for seed in range(most)]
                    paths[rank] = [write_adapter(place, model, rank, seed) for seed, place in enumerate(places)]
            load, (plain, adapted) = engines[-1].executor.load_adapter, (each.core for each in engines)
            digests = {rank: [load(str(path), None, False).result().digest for path in paths[rank]] for rank in paths}
            found: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
            for number in range(arguments.rounds + 1):
                for case in cases if number % 2 else reversed(cases):
                    own = digests.get(case.rank, [])[: case.adapters]
                    pair = median_steps(plain, adapted, case, own, arguments.context, arguments.steps)
                    if number:  # the first round warms up
                        found[case.name].append(pair)
            formats[form] = found
            for each in engines:
                each.core.shutdown()
            del plain, adapted, engines, each, load
    result = {
        **environment,
        "model": name,
        "context": arguments.context,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "formats": formats,
    }
    report.publish(__file__, arguments.save, "lora", result, markdown(result))


if __name__ == "__main__":
    main()
