"""Decode attention over KV caches in the model's dtype and in codes of 8 bits, measured in turns, also with another
build.

Each case is named SEQUENCES x QUERY TOKENS @ CONTEXT. The calls use many KV caches in turns, so that the keys and
values of a call are not in the CPU's caches. A result is the median over rounds of the median call. GB/s count the
bytes of the KV cache once, with its scales. The limit is the time to read these bytes, or the time of the FLOPs of
causal attention in the model's dtype, whichever is longer, at the bandwidth and the peak that are measured after each
case. With --against a second line has the other build's time divided by this build's time.

    python benchmarks/kernels/attention_kv.py --cases 1x1@1024,1x1@8192,16x1@1024 --threads 2
    python benchmarks/kernels/attention_kv.py --isa avx2 --save HARDWARE

--save writes benchmarks/results/HARDWARE/attention_kv_DATE.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attention import COLD_BYTES, add_arguments, causal_flops, chosen_builds, median_seconds, sizes_of

from quire.formats.kv_format import KV_FORMATS
from quire.forward_batch import LayerCache
from quire.kernels import cpu, kv_codes, ops
from quire.kernels.layer_rules import AttentionRule
from quire.measure import report

NAMES = ("fp8_e4m3", "fp8_e5m2", "int8")


def calls_of(name: str, case: str, args: argparse.Namespace) -> tuple[Callable[[], list[Callable[[], Any]]], int]:
    """A function that makes calls of the build in use, each with its own KV cache; and the bytes that one call
    reads.
    """
    (S, Q, L), P, H, G, E = sizes_of(case), args.block_size, args.heads, args.kv_heads, args.head_dim
    kv = KV_FORMATS[name]
    num_bytes = 2 * S * L * G * kv.row_bytes(E)
    copies = max(1, min(32, COLD_BYTES // num_bytes))
    blocks_each = -(-L // P)
    generator = torch.Generator().manual_seed(0)
    block_tables = torch.randperm(S * blocks_each, generator=generator).int().reshape(S, blocks_each)
    tables = (block_tables, torch.full((S,), L, dtype=torch.int32), torch.arange(S + 1, dtype=torch.int32) * Q)
    q = torch.randn(S * Q, H, E, generator=generator).to(getattr(torch, args.dtype))
    out = torch.empty_like(q)
    rows = torch.randn(S * blocks_each, G, P, E, generator=generator)
    dtype = getattr(torch, kv.torch_dtype)
    codes, scales = kv_codes.encode(rows, dtype) if name in NAMES else (rows.to(dtype), None)

    def copy() -> tuple[torch.Tensor, torch.Tensor | None]:
        cache = torch.empty_like(codes)
        cpu.advise_huge_pages(cache)  # as the engine does
        return cache.copy_(codes), None if scales is None else scales.clone()

    pairs = [(copy(), copy()) for _ in range(copies)]

    def calls() -> list[Callable[[], Any]]:
        rule = AttentionRule(E**-0.5)
        caches = [LayerCache(k, v, k_scales, v_scales) for (k, k_scales), (v, v_scales) in pairs]
        return [partial(ops.paged_attention, q, cache, *tables, rule, out) for cache in caches]

    return calls, num_bytes


def bench_case(case: str, args: argparse.Namespace, builds: dict[str, Any]) -> dict[str, Any]:
    S, Q, L = sizes_of(case)
    caches = {name: calls_of(name, case, args) for name in (args.dtype, *NAMES)}
    rounds: dict[str, list[float]] = {name: [] for name in caches}
    ratios: dict[str, list[float]] = {name: [] for name in caches}  # the time of another build over this build's time
    for _ in range(args.rounds):
        for name, (calls, _) in caches.items():
            times: dict[str, float] = {}
            for build, extension in builds.items():
                cpu._C = extension
                times[build] = median_seconds(calls(), args.seconds / args.rounds)
            rounds[name].append(times["quire"])
            ratios[name] += [times[build] / times["quire"] for build in builds if build != "quire"]
    cpu._C = builds["quire"]
    bandwidth, peak = cpu.read_bandwidth(256 << 20), cpu.peak_flops(getattr(torch, args.dtype))
    flops = causal_flops(S, Q, L, args.heads, args.head_dim)
    own = statistics.median(rounds[args.dtype])
    row: dict[str, Any] = {"case": case, "bandwidth_gb_s": bandwidth / 1e9, "peak_gflops": peak / 1e9}
    for name, (_, num_bytes) in caches.items():
        median = statistics.median(rounds[name])
        row[name] = {
            "us": median * 1e6,
            "gb_s": num_bytes / median / 1e9,
            "speedup": own / median,
            "share_of_limit": max(num_bytes / bandwidth, flops / peak) / median,
        }
        if ratios[name]:
            row[name]["against"] = statistics.median(ratios[name])
    cells = [
        f"{name} {row[name]['us']:8.1f} us {row[name]['gb_s']:5.1f} GB/s {row[name]['share_of_limit']:4.0%} "
        f"{row[name]['speedup']:.2f}x"
        for name in caches
    ]
    print(f"{case:>10} ({bandwidth / 1e9:.1f} GB/s, {peak / 1e9:.0f} GFLOP/s)  " + "  |  ".join(cells), flush=True)
    if len(builds) > 1:
        print(" " * 10 + "  other build / this: " + "  ".join(f"{name} {row[name]['against']:.2f}" for name in caches))
    return row


def markdown(result: dict[str, Any]) -> str:
    """The result file for people."""
    names = (result["dtype"], *NAMES)
    lines = report.heading("Attention over KV caches in codes of 8 bits", result)
    lines.append(f"- Instruction set {result['isa']}, {result['threads']} threads, {result['heads']}.")
    lines += ["- A cell: time of a call, share of the limit, time with a KV cache in the model's dtype over it.", ""]
    lines += report.table_head(" | ".join(["case", "GB/s", *names]))
    for row in result["rows"]:
        cells = [
            f"{row[name]['us']:.0f} us, {row[name]['share_of_limit']:.0%}, {row[name]['speedup']:.2f}" for name in names
        ]
        lines.append(f"| {row['case']} | {row['bandwidth_gb_s']:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("--cases", default="1x1@1024,1x1@8192,16x1@1024,4x1@8192,1x512@4096")
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="per case and cache")
    args = parser.parse_args()
    builds = chosen_builds(args)
    heads = f"{args.heads} heads, {args.kv_heads} KV heads of {args.head_dim}, blocks of {args.block_size}"
    print(f"isa {cpu.isa()}, {cpu.get_num_threads()} threads, {args.dtype}, {heads}")
    rows = [bench_case(case, args, builds) for case in args.cases.split(",")]
    result = {"isa": cpu.isa(), "threads": args.threads, "dtype": args.dtype, "heads": heads, "rows": rows}
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)
    if args.save:
        result = report.environment("python", "benchmarks/kernels/attention_kv.py") | result
        report.save_published(__file__, "attention_kv", args.save, result, markdown(result))


if __name__ == "__main__":
    main()
