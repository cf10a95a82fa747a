"""The batch from which fewer bits save no time: the products of a model's layers, format against format.

All formats take turns step by step, so that a noisy machine affects them equally. A step has all products of `--layers`
layers of the Qwen3-0.6B shape, with weights that are not in the caches. The script prints the median step and how many
times as fast as bfloat16 it is (the median of the ratios of neighbouring steps).

    python benchmarks/kernels/formats.py --formats bf16,int8,int4,q4_0,q4_k --m 1,4,8,16,32,64,256
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from gemm import FORMATS, names_of, pack, product

from quire.kernels import cpu

SHAPES_KN = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))  # qkv, output, gate and up, down


def steps(names: list[str], num_layers: int) -> dict[str, list[Any]]:
    """The packed weights of each format."""
    return {
        name: [
            pack(torch.randn(N, K).bfloat16(), "none" if name == "bf16" else name)
            for _ in range(num_layers)
            for K, N in SHAPES_KN
        ]
        for name in names
    }


def time_rows(M: int, packed: dict[str, list[Any]], seconds: float) -> dict[str, list[float]]:
    """The seconds of each step, by format."""
    x = {K: torch.randn(M, K).bfloat16() for K, _ in SHAPES_KN}
    out = {N: torch.empty(M, N, dtype=torch.bfloat16) for _, N in SHAPES_KN}
    calls: dict[str, list[Callable[[], Any]]] = {
        name: [product(x[weight.K], weight, out[weight.N]) for weight in weights] for name, weights in packed.items()
    }
    times: dict[str, list[float]] = {name: [] for name in packed}
    deadline = time.perf_counter() + seconds
    while len(times["bf16"]) < 5 or time.perf_counter() < deadline:
        for name, products in calls.items():
            start = time.perf_counter()
            for call in products:
                call()
            times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ("bf16", *FORMATS)
    parser.add_argument("--formats", type=names_of(known), default="int8,int4,q4_0", help="of " + ", ".join(known))
    parser.add_argument("--m", default="1,4,8,16,32,64,256", metavar="M,...")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--isa", help="instruction set; default: the best present")
    parser.add_argument("--seconds", type=float, default=2.0, help="per number of rows")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.isa:
        cpu.set_isa(args.isa)
    names = ["bf16", *(name for name in args.formats if name != "bf16")]
    packed = steps(names, args.layers)
    sizes = {name: sum(weight.nbytes for weight in weights) for name, weights in packed.items()}
    print(
        f"isa {cpu.isa()}, {cpu.get_num_threads()} threads, {args.layers} layers: milliseconds, times as fast as bf16"
    )
    print("| rows | " + " | ".join(f"{name} ({sizes[name] >> 20} MiB)" for name in names) + " |")
    print("|---" * (len(names) + 1) + "|")
    rows = []
    for M in (int(m) for m in args.m.split(",")):
        times = time_rows(M, packed, args.seconds)
        medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
        gains = {
            name: statistics.median(base / own for base, own in zip(times["bf16"], values, strict=True))
            for name, values in times.items()
        }
        rows.append({"rows": M, "milliseconds": medians, "times_as_fast_as_bf16": gains})
        print(f"| {M} | " + " | ".join(f"{medians[name]:.1f}, {gains[name]:.2f}x" for name in names) + " |", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"isa": cpu.isa(), "bytes": sizes, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
