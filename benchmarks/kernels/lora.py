"""The time that adapters add to products, for one token each of several adapters and for prompts of one adapter.

Each case is named ADAPTERS x ROWS OF EACH @ RANK. Products without and with adapters take turns. There are so many
layers that weights and adapters are not in the CPU's caches. A result is the median of the products without adapters,
and the median of the differences. The limit of a difference is the time to read the adapters at the read bandwidth, or
the time of their FLOPs at the peak of the dtype, whichever is longer; bandwidth and peak are measured after each case.
A difference can be shorter than this limit if the product without adapters waits for arithmetic and not for memory.

    python benchmarks/kernels/lora.py --cases 1x1@16,8x1@16,32x1@8,1x512@16 --weights none int8 int4
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from quire.formats.weight_format import GroupedFormat
from quire.kernels import cpu
from quire.kernels.dense import linear, pack_linear
from quire.kernels.grouped import grouped_linear, pack_grouped, quantize_grouped
from quire.kernels.lora import DeltaMemory, DeltaShape, LoraTable, PackedDelta, RowAdapters, empty_deltas, pack_factors

COLD_BYTES = 192 << 20
WEIGHT_BITS = {"none": 16, "int8": 8, "int4": 4}
SHAPES = {  # the shapes of Qwen3-0.6B: K, and the columns of each part
    "qkv": (1024, (2048, 1024, 1024)),
    "o": (2048, (1024,)),
    "gate_up": (1024, (3072, 3072)),
    "down": (3072, (1024,)),
}


def median_seconds(calls: Sequence[tuple[Callable[[], Any], Callable[[], Any]]], seconds: float) -> tuple[float, float]:
    """The time of one call without adapters, and the time that adapters add. All layers are called in turns, at least
    once.
    """
    times: list[tuple[float, float]] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or not times:
        for pair in calls:
            starts = [time.perf_counter()]
            for call in pair:
                call()
                starts.append(time.perf_counter())
            times.append((starts[1] - starts[0], starts[2] - starts[1]))
    return statistics.median(a for a, _ in times), statistics.median(b - a for a, b in times)


def product_of(weights: str, weight_NK: torch.Tensor) -> Callable[..., torch.Tensor]:
    """A product with a packed copy of a weight."""
    if weights == "none":
        return partial(linear, packed=pack_linear(weight_NK))
    form = GroupedFormat(8, None) if weights == "int8" else GroupedFormat(4, 128)
    quantized = quantize_grouped(weight_NK, form.bits, form.group_size_of(weight_NK.shape[1]))
    return partial(grouped_linear, packed=pack_grouped(quantized))


def deltas_of(
    adapters: int, num_layers: int, rank: int, K: int, given: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[list[PackedDelta]]:
    """The deltas of each adapter and layer. As with a loaded adapter, their memory is larger than a huge page."""
    dtype, num = given[0][0].dtype, adapters * num_layers
    deltas = empty_deltas([DeltaShape(rank, K, len(b), 1.0) for _, b in given] * num, dtype, DeltaMemory())
    for delta, (a, b) in zip(deltas, list(given) * num, strict=True):
        for x, factor in ((a, delta.a_from(0, dtype)), (b, delta.b_from(0, dtype))):
            pack_factors(x.view(-1).view(torch.uint8), [factor], delta.memory)
    return (deltas[first : first + len(given)] for first in range(0, len(deltas), len(given)))


def calls_of(
    K: int, columns: Sequence[int], case: str, weights: str, dtype: torch.dtype
) -> tuple[list[tuple[Callable[[], Any], Callable[[], Any]]], int, int]:
    """Calls on separate layers, without and with adapters; and the bytes and FLOPs of the adapters of one call."""
    adapters, rows, rank = (int(number) for number in case.replace("@", "x").split("x"))
    T, N = adapters * rows, sum(columns)
    elements = adapters * rank * (len(columns) * K + N)
    x, out = torch.randn(T, K).to(dtype), torch.empty(T, N, dtype=dtype)
    weight_NK = torch.randn(N, K).to(dtype)
    slots = torch.arange(adapters, dtype=torch.int32).repeat_interleave(rows)
    given = [(torch.randn(rank, K).to(dtype), torch.randn(num, rank).to(dtype)) for num in columns]
    layer_bytes = 2 * N * K * WEIGHT_BITS[weights] // 8 + elements * dtype.itemsize
    num_layers = max(4, min(32, COLD_BYTES // layer_bytes))
    tables = [LoraTable(adapters, rank, K, columns, dtype, torch.device("cpu")) for _ in range(num_layers)]
    deltas = deltas_of(adapters, num_layers, rank, K, given)
    for slot, table in itertools.product(range(adapters), tables):
        table.set(slot, next(deltas))
    calls: list[tuple[Callable[[], Any], Callable[[], Any]]] = []
    for table in tables:
        plain, added = (product_of(weights, weight_NK) for _ in range(2))
        calls.append((partial(plain, x, out=out), partial(added, x, out=out, adapters=RowAdapters(table, slots))))
    return calls, elements * dtype.itemsize, 2 * rows * elements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="1x1@8,1x1@16,8x1@16,32x1@8,32x1@16,8x4@16,1x512@16")
    parser.add_argument("--weights", nargs="+", default=["none"], choices=WEIGHT_BITS)
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
    for weights, case, shape in itertools.product(args.weights, args.cases.split(","), args.shapes.split(",")):
        calls, num_bytes, flops = calls_of(*SHAPES[shape], case, weights, dtype)
        plain, more = median_seconds(calls, args.seconds)
        bandwidth, peak = cpu.read_bandwidth(256 << 20), cpu.peak_flops(dtype)
        limit = max(num_bytes / bandwidth, flops / peak)
        rows.append({"weights": weights, "case": case, "shape": shape, "us": plain * 1e6, "more_us": more * 1e6})
        rows[-1] |= {"bandwidth_gb_s": bandwidth / 1e9, "peak_gflops": peak / 1e9, "limit_us": limit * 1e6}
        print(
            f"{weights:>5} {case:>10} {shape:>8} {plain * 1e6:9.1f} us, with adapters {more * 1e6:+8.1f} us, "
            f"{1 + more / plain:.3f}; limit {limit * 1e6:7.1f} us at {bandwidth / 1e9:.1f} GB/s, "
            f"{peak / 1e9:.0f} GFLOP/s: {limit / more:.0%}",
            flush=True,
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"isa": cpu.isa(), "threads": args.threads, "dtype": args.dtype, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
