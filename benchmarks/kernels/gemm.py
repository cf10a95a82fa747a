"""Matrix products of one linear layer against the machine's limits, torch and oneDNN with prepacked weights.

Every engine walks through enough copies of the weight that each call finds it outside the caches, as in a model. The
engines take turns in short bursts (after a pause, because OpenMP threads spin for some milliseconds after a call and
would take a core from the next engine); a reading is the median call. The limit of a shape is the larger of weight
bytes over the measured read bandwidth and FLOPs over the measured register-only peak; both are measured between the
bursts, so that a noisy machine hits numerator and denominator alike. Of integer weights (`--quantization`) only the
bytes count: their register-only peak is not measured.

    python benchmarks/kernels/gemm.py --shapes 1024x3072,1024x151936,3072x1024 --m 1,4,16,64,256,1024 --isa amx
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import cpu, ops
from quire.weight_format import ON_LOAD

COLD_BYTES = 640 << 20  # of weight copies per engine
BURST_S = 0.02
PAUSE_S = 0.01

Engines = dict[str, list[Callable[[], Any]]]


def onednn_linear(weight_NK: Tensor, M: int) -> Callable[[Tensor], Tensor]:
    """oneDNN's matrix product with weights packed for batch M."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK, M)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


Packed = ops.PackedLinear | ops.PackedGrouped


def pack(weight_NK: Tensor, quantization: str) -> Packed:
    """The weight as a layer of the model holds it."""
    if not quantization:
        return ops.pack_linear(weight_NK)
    weight_format = ON_LOAD[quantization].linear
    bits, group_size = weight_format.bits, weight_format.group_size_of(weight_NK.shape[1])
    return ops.pack_grouped(*ops.quantize_grouped(weight_NK, bits, group_size), bits, group_size)


def engines(x: Tensor, out: Tensor, weights: list[Tensor], packed: list[Packed], peers: bool) -> Engines:
    """Per engine, one call for each copy of the weight."""
    calls: Engines = {
        "quire": [
            partial(ops.linear, x, p, out=out) if isinstance(p, ops.PackedLinear) else partial(ops.grouped_linear, x, p)
            for p in packed
        ]
    }
    if peers:
        calls["torch"] = [partial(F.linear, x, w) for w in weights]
        try:
            calls["onednn"] = [partial(onednn_linear(w, len(x)), x) for w in weights]
        except RuntimeError as error:  # torch built without it, or dtype unsupported on this CPU
            print(f"oneDNN prepacked: {str(error).splitlines()[0]}")
    return calls


def measure(calls: Engines, dtype: torch.dtype, seconds: float) -> tuple[dict[str, float], float, float]:
    """Median seconds of a call per engine, median bytes per second of reading, median peak FLOP/s."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    bandwidths, peaks = [], []
    deadline = time.perf_counter() + seconds
    while not bandwidths or time.perf_counter() < deadline:
        bandwidths.append(cpu.read_bandwidth(256 << 20, repeats=2))
        peaks.append(cpu.peak_flops(dtype, repeats=2))
        for name, copies in calls.items():
            time.sleep(PAUSE_S)
            copies[-1]()  # wakes the threads
            burst_end = time.perf_counter() + BURST_S
            start = 0.0
            while start < burst_end:
                call = copies[len(times[name]) % len(copies)]
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return medians, statistics.median(bandwidths), statistics.median(peaks)


def bench_shape(
    K: int, N: int, Ms: list[int], dtype: torch.dtype, quantization: str, seconds: float, peers: bool
) -> list[dict[str, Any]]:
    """Rows of results, one per M, printed as they come."""
    num_copies = max(1, min(64, COLD_BYTES // (N * K * dtype.itemsize)))
    weights = [torch.randn(N, K).to(dtype) for _ in range(num_copies)]
    start = time.perf_counter()
    packed = [pack(w, quantization) for w in weights]
    pack_gb_s = sum(w.nbytes for w in weights) / (time.perf_counter() - start) / 1e9
    rows = []
    for M in Ms:
        calls = engines(torch.randn(M, K).to(dtype), torch.empty(M, N, dtype=dtype), weights, packed, peers)
        medians, bandwidth, peak = measure(calls, dtype, seconds)
        arithmetic_s = 0 if quantization else 2 * M * N * K / peak
        rows.append(
            {
                "K": K,
                "N": N,
                "M": M,
                "bandwidth_gb_s": bandwidth / 1e9,
                "peak_gflops": peak / 1e9,
                "weight_bytes": packed[0].nbytes,
                "limit_us": max(packed[0].nbytes / bandwidth, arithmetic_s) * 1e6,
                "pack_gb_s": pack_gb_s,
                "us": {name: s * 1e6 for name, s in medians.items()},
            }
        )
        print_row(rows[-1])
    return rows


def print_row(row: dict[str, Any]) -> None:
    flops, num_bytes = 2 * row["M"] * row["N"] * row["K"], row["weight_bytes"]
    cells = [
        f"{name} {flops / us / 1e3:7.0f} GFLOP/s {num_bytes / us / 1e3:5.1f} GB/s {row['limit_us'] / us:4.0%}"
        for name, us in row["us"].items()
    ]
    head = f"[{row['M']:4},{row['K']:5}] x [{row['K']:5},{row['N']:6}]  limit {flops / row['limit_us'] / 1e3:6.0f}"
    print(f"{head} ({row['bandwidth_gb_s']:.1f} GB/s, {row['peak_gflops']:.0f})  " + "  |  ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1024x3072,3072x1024,1024x151936", help="KxN, comma separated")
    parser.add_argument("--m", default="1,4,8,16,32,64,256,1024")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--quantization", default="", choices=["", *ON_LOAD])
    parser.add_argument("--isa", default="", help="instruction set; default: the best present")
    parser.add_argument("--threads", type=int, default=cpu.default_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="per shape and M")
    parser.add_argument("--no-peers", action="store_true", help="only Quire")
    parser.add_argument("--json", default="", help="write the rows to this file")
    args = parser.parse_args()
    if args.isa:
        cpu.set_isa(args.isa)
    cpu.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    print(f"isa {cpu.isa()}, {cpu.get_num_threads()} threads, {args.dtype}, torch {torch.__version__}")
    rows = []
    for shape in args.shapes.split(","):
        K, N = (int(part) for part in shape.split("x"))
        rows += bench_shape(
            K, N, [int(m) for m in args.m.split(",")], dtype, args.quantization, args.seconds, not args.no_peers
        )
        print(f"packing: {rows[-1]['pack_gb_s']:.1f} GB/s of weight bytes")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {
                    "isa": cpu.isa(),
                    "threads": args.threads,
                    "dtype": args.dtype,
                    "quantization": args.quantization,
                    "rows": rows,
                },
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
