"""`quire plan [MODEL ...]`: bytes per format, and what fits into the memory. Loads no weights."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from typing import Any

from quire import __version__
from quire.cli.flags import Parser
from quire.cli.settings import add_settings_flags, read_settings
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.option import parse_human_int
from quire.resolve import DeviceFacts, GpuFacts, shown_bytes

DESCRIPTION = """
Prints the bytes of weights and KV cache in every format, and how many tokens fit beside the weights, from config.json
or a GGUF header. --quantization, --dtype and --kv-cache-dtype leave only what they name; all other flags are those of
`serve`.
"""
_OTHER_GPU = 90  # the compute capability that a GPU which is not here is planned for


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="show what models take in each format, and what fits into memory",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON")
    add("--memory", metavar="SIZE", help="plan for so much memory, as 80GiB: RAM, or, with --device cuda, a GPU's")
    add("--sequences", type=int, default=1, metavar="N", help="requests of max_model_len to hold (default: 1)")
    add_settings_flags(parser, (EngineConfig,), models="*")
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, args: argparse.Namespace) -> int:
    """Exit code 0, or 2 if a model fits in no format."""
    names = args.model_tag
    args.model_tag = None
    engine, _ = read_settings(parser, args)
    if names and engine.model is not None:
        raise ConfigError("Models are named twice", value=[*names, engine.model], fix="Leave --model out")
    if args.sequences < 1:
        raise ConfigError("Too few sequences", value=args.sequences, expected="1 or more", param="sequences")
    from quire.entry.launch import find_model
    from quire.kernels import extension
    from quire.planning import devices
    from quire.planning.what_fits import plan

    wants_other_gpu = engine.device == "cuda" and args.memory is not None
    gpu = "none was looked for" if engine.device == "cpu" or wants_other_gpu else devices.ask_gpu()
    device = devices.detect(extension.chosen_isa(), gpu)
    bandwidth = None
    if args.memory is not None:
        device, memory_name = _with_memory(device, engine.device, _memory_bytes(args.memory))
    else:
        uses_gpu = device.gpu is not None and engine.device != "cpu"
        bandwidth = None if uses_gpu else extension.read_bandwidth(device.num_cores)
        total, free = device.memory_of("cuda" if uses_gpu else "cpu")
        memory_name = f"{shown_bytes(free)} free now of {shown_bytes(total)}"
    plans = []
    for model_name in names or [engine.model]:
        config = replace(engine, model=model_name)
        _, name, model = find_model(config, None, weights=False)
        plans.append(
            plan(
                name,
                config,
                model,
                device,
                memory_name=memory_name,
                num_sequences=args.sequences,
                read_bandwidth=bandwidth,
            )
        )
    if args.json:
        print(json.dumps({"version": __version__, "models": [each.as_dict() for each in plans]}, indent=2))
    else:
        print("\n\n".join(each.text() for each in plans))
    return 0 if all(each.best is not None for each in plans) else 2


def _memory_bytes(text: str) -> int:
    """`80GiB`, `80G`: powers of 1024; `80GB`, `80g`: of 1000."""
    plain = text.strip()
    if plain[-3:] in ("GiB", "MiB"):
        plain = plain[:-2]
    elif plain[-2:] in ("GB", "MB"):
        plain = plain[:-2] + plain[-2].lower()
    num_bytes = parse_human_int(plain)
    if num_bytes < 1:
        raise ConfigError("Illegal size of memory", value=text, expected="a positive size, as 80GiB", param="memory")
    return num_bytes


def _with_memory(device: DeviceFacts, wanted: str, num_bytes: int) -> tuple[DeviceFacts, str]:
    """The machine with other memory, all of it free; with a GPU that is not here, if `wanted` is cuda."""
    if wanted == "cuda" or (wanted == "auto" and device.gpu is not None):
        gpu = device.gpu or GpuFacts("a GPU that is not here", _OTHER_GPU, num_bytes, num_bytes)
        gpu = replace(gpu, total_memory_bytes=num_bytes, free_memory_bytes=num_bytes)
        return replace(device, gpu=gpu), f"{shown_bytes(num_bytes)} (--memory) on a GPU"
    return (
        replace(device, total_memory_bytes=num_bytes, free_memory_bytes=num_bytes),
        f"{shown_bytes(num_bytes)} (--memory)",
    )
