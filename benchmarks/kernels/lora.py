"""Additions of adapters to a layer's results: one token each of several adapters, and prompts of one.

Each case is named ADAPTERS x ROWS OF EACH @ RANK. Calls walk through enough layers that each finds its adapters outside
the CPU's caches. A reading is the median call. The limit is the bytes of the adapters at the read bandwidth, or the
FLOPs at the peak of the dtype, both measured after each case. The results of the product, which the kernel reads and
writes too, are not counted.

    python benchmarks/kernels/lora.py --cases 1x1@16,8x1@16,32x1@8,1x512@16
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from quire.kernels import cpu
from quire.kernels.lora import LoraTable, add_lora, pack_delta

COLD_BYTES = 192 << 20
SHAPES = {  # of Qwen3-0.6B: K, and the columns of each part
    "qkv": (1024, (2048, 1024, 1024)),
    "o": (2048, (1024,)),
    "gate_up": (1024, (3072, 3072)),
    "down": (3072, (1024,)),
}


def median_seconds(calls: Sequence[Callable[[], Any]], seconds: float) -> float:
    """Of one call; they take turns, at least one round."""
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or not times:
        for call in calls:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def calls_of(K: int, columns: Sequence[int], case: str, dtype: torch.dtype) -> tuple[list[Callable[[], Any]], int, int]:
    """Calls on separate layers, and the bytes and FLOPs of one."""
    adapters, rows, rank = (int(number) for number in case.replace("@", "x").split("x"))
    T, N = adapters * rows, sum(columns)
    elements = adapters * rank * (len(columns) * K + N)
    x, base = torch.randn(T, K).to(dtype), torch.randn(T, N)
    slots = torch.arange(adapters, dtype=torch.int32).repeat_interleave(rows)
    out = torch.empty(T, N, dtype=dtype)
    given = [(torch.randn(rank, K).to(dtype), torch.randn(num, rank).to(dtype)) for num in columns]
    calls: list[Callable[[], Any]] = []
    for _ in range(max(2, min(32, COLD_BYTES // (elements * dtype.itemsize)))):
        table = LoraTable(adapters, rank, K, columns, dtype, torch.device("cpu"))
        for slot in range(adapters):
            table.set(slot, [pack_delta(a, b, 1.0) for a, b in given])
        calls.append(partial(add_lora, base, x, slots, table, dtype, out))
    return calls, elements * dtype.itemsize, 2 * rows * elements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="1x1@8,1x1@16,8x1@16,32x1@8,32x1@16,8x4@16,1x512@16")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--isa", default="", help="instruction set; default: the best present")
    parser.add_argument("--threads", type=int, default=cpu.default_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="per case and shape")
    parser.add_argument("--json", default="", help="write the rows to this file")
    args = parser.parse_args()
    if args.isa:
        cpu.set_isa(args.isa)
    cpu.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    print(f"isa {cpu.isa()}, {cpu.get_num_threads()} threads, {args.dtype}")
    rows: list[dict[str, Any]] = []
    for case in args.cases.split(","):
        for shape in args.shapes.split(","):
            calls, num_bytes, flops = calls_of(*SHAPES[shape], case, dtype)
            seconds = median_seconds(calls, args.seconds)
            bandwidth, peak = cpu.read_bandwidth(256 << 20), cpu.peak_flops(dtype)
            share = max(num_bytes / bandwidth, flops / peak) / seconds
            rows.append({"case": case, "shape": shape, "us": seconds * 1e6, "gb_s": num_bytes / seconds / 1e9})
            rows[-1] |= {"bandwidth_gb_s": bandwidth / 1e9, "peak_gflops": peak / 1e9, "share_of_limit": share}
            print(
                f"{case:>10} {shape:>8} {seconds * 1e6:9.1f} us, {num_bytes / seconds / 1e9:5.1f} of "
                f"{bandwidth / 1e9:.1f} GB/s, {flops / seconds / 1e9:5.0f} of {peak / 1e9:.0f} GFLOP/s: "
                f"{share:.0%} of the limit",
                flush=True,
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"isa": cpu.isa(), "threads": args.threads, "dtype": args.dtype, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
