"""Paged attention compared with the machine's limits: reading the KV cache once, and the FLOPs of causal attention.

Each case is named SEQUENCES x QUERY TOKENS @ CONTEXT. The calls use many KV caches in turns, so that the keys and
values of a call are not in the CPU's caches, as in a model of many layers. A result is the median call; bandwidth and
peak are measured between cases. For comparison, torch's scaled_dot_product_attention reads contiguous keys and values
(no paging, no KV write).

    python benchmarks/kernels/attention.py --heads 16 --kv-heads 8 --head-dim 128 --isa amx
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from quire.forward_batch import LayerCache
from quire.kernels import cpu, ops
from quire.kernels.layer_rules import AttentionRule

COLD_BYTES = 640 << 20
DEFAULT_CASES = "1x512@512,1x512@4096,1x2048@2048,1x1@512,1x1@8192,8x1@1024,32x1@1024,256x1@128,4x32@2048"


def load_extension(path: str) -> Any:
    """Another build of quire._C. It has its own threads and types, because it was built with another QUIRE_DOMAIN."""
    loader = importlib.machinery.ExtensionFileLoader("_C", path)
    spec = importlib.util.spec_from_file_location("_C", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    if module.KvCache is cpu._C.KvCache:
        raise SystemExit(f"{path} shares its types with this build: build it with -DQUIRE_DOMAIN=NAME")
    return module


def median_seconds(calls: list[Callable[[], Any]], seconds: float) -> float:
    calls[0]()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times) < 3:
        call = calls[len(times) % len(calls)]
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def sizes_of(case: str) -> tuple[int, int, int]:
    """The number of sequences, the query tokens of each, and the context, from a name SEQUENCESxQUERY@CONTEXT."""
    shape, context = case.split("@")
    S, Q = (int(part) for part in shape.split("x"))
    return S, Q, int(context)


def causal_flops(S: int, Q: int, L: int, H: int, E: int) -> int:
    """The FLOPs of two products, each a multiply and an add, of the last Q of L tokens with all tokens before them."""
    return 4 * S * H * E * sum(range(L - Q + 1, L + 1))


def bench_case(case: str, args: argparse.Namespace, dtype: torch.dtype, builds: dict[str, Any]) -> dict[str, Any]:
    (S, Q, L), P, H, G, E = sizes_of(case), args.block_size, args.heads, args.kv_heads, args.head_dim
    blocks_each = -(-L // P)
    kv_bytes = 2 * S * L * G * E * dtype.itemsize
    copies = max(1, min(64, COLD_BYTES // kv_bytes))
    shape_BGPE = (S * blocks_each, G, P, E)
    caches = [[torch.empty(shape_BGPE, dtype=dtype) for _ in "kv"] for _ in range(copies)]
    for tensor in (tensor for pair in caches for tensor in pair):
        cpu.advise_huge_pages(tensor)  # as the engine does
        tensor.normal_()
    block_tables = torch.randperm(S * blocks_each).int().reshape(S, blocks_each)
    seq_lens = torch.full((S,), L, dtype=torch.int32)
    cu_seqlens_q = torch.arange(S + 1, dtype=torch.int32) * Q
    q = torch.randn(S * Q, H, E).to(dtype)
    out = torch.empty_like(q)
    tables = (block_tables, seq_lens, cu_seqlens_q)

    def quire(k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
        cache, rule = LayerCache(k, v), AttentionRule(E**-0.5)
        return lambda: ops.paged_attention(q, cache, *tables, rule, out)

    rounds: dict[str, list[float]] = {name: [] for name in builds}
    for _ in range(5):
        for name, build in builds.items():
            cpu._C = build
            rounds[name].append(median_seconds([quire(k, v) for k, v in caches], args.seconds / 5))
    cpu._C = builds["quire"]
    seconds = {name: statistics.median(values) for name, values in rounds.items()}
    if not args.no_peers:
        mask = None if Q == L or Q == 1 else torch.ones(Q, L, dtype=torch.bool).tril(L - Q)
        q_SHQE = q.reshape(S, Q, H, E).transpose(1, 2)

        def sdpa(k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
            k_SGLE, v_SGLE = (x.reshape(S, G, -1, E)[:, :, :L] for x in (k, v))
            return lambda: F.scaled_dot_product_attention(
                q_SHQE, k_SGLE, v_SGLE, mask, is_causal=Q == L, enable_gqa=True
            )

        seconds["torch"] = median_seconds([sdpa(k, v) for k, v in caches], args.seconds)
    bandwidth, peak = cpu.read_bandwidth(256 << 20), cpu.peak_flops(dtype)
    flops = causal_flops(S, Q, L, H, E)
    limit_s = max(kv_bytes / bandwidth, flops / peak)
    return {
        "case": case,
        "kv_bytes": kv_bytes,
        "flops": flops,
        "bandwidth_gb_s": bandwidth / 1e9,
        "peak_gflops": peak / 1e9,
        "limit_us": limit_s * 1e6,
        "bound_by": "bytes" if kv_bytes / bandwidth > flops / peak else "FLOPs",
        "us": {name: s * 1e6 for name, s in seconds.items()},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the sizes of a model's attention and for its kernels."""
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--isa", default="", help="instruction set; default: the best present")
    parser.add_argument("--threads", type=int, default=cpu.default_num_threads())
    parser.add_argument("--against", default="", help="file of another build of quire._C to take turns with")
    parser.add_argument("--json", default="", help="write the rows to this file")


def chosen_builds(args: argparse.Namespace) -> dict[str, Any]:
    """This build of quire._C and the build of --against, by name. Both use the given instruction set and threads."""
    if args.isa:
        cpu.set_isa(args.isa)
    cpu.set_num_threads(args.threads)
    builds: dict[str, Any] = {"quire": cpu._C}
    if args.against:
        builds["against"] = load_extension(args.against)
        builds["against"].set_isa(cpu.isa())
        builds["against"].set_num_threads(args.threads)
    return builds


def print_row(row: dict[str, Any]) -> None:
    cells = [
        f"{name} {us:9.1f} us {row['flops'] / us / 1e3:6.0f} GFLOP/s {row['kv_bytes'] / us / 1e3:5.1f} GB/s "
        f"{row['limit_us'] / us:4.0%}"
        for name, us in row["us"].items()
    ]
    head = f"{row['case']:>12}  limit {row['limit_us']:8.1f} us by {row['bound_by']}"
    print(
        f"{head} ({row['bandwidth_gb_s']:.1f} GB/s, {row['peak_gflops']:.0f} GFLOP/s)  " + "  |  ".join(cells),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=DEFAULT_CASES)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=0.5, help="per case and engine")
    parser.add_argument("--no-peers", action="store_true", help="only Quire")
    args = parser.parse_args()
    builds = chosen_builds(args)
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    heads = f"{args.heads} heads, {args.kv_heads} KV heads of {args.head_dim}, blocks of {args.block_size}"
    print(f"isa {cpu.isa()}, {cpu.get_num_threads()} threads, {args.dtype}, {heads}, torch {torch.__version__}")
    rows = []
    for case in args.cases.split(","):
        rows.append(bench_case(case, args, dtype, builds))
        print_row(rows[-1])
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"isa": cpu.isa(), "threads": args.threads, "dtype": args.dtype, "heads": heads, "rows": rows},
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
