"""The work of loading a weight, quantization and packing, compared with reading and writing each byte once.

The calls use copies in turns that together are larger than the CPU's caches. They write to the same memory again and
again, so that the cost of new memory pages is not measured. A result is the median call. The limit is the number of
bytes read and written, divided by the read bandwidth that is measured after the calls.

    python benchmarks/kernels/packing.py --shape 1024x3072 --isa avx2
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from attention import median_seconds
from gemm import FORMATS, random_weight
from torch import Tensor

from quire.formats.weight_format import GroupedFormat
from quire.kernels import cpu

PACKED = ("int8", "int4", "q4_k")


@dataclass(frozen=True)
class Op:
    """Calls of one kernel on copies of a weight, and the bytes that one call must touch."""

    calls: list[Callable[[], Any]]
    num_bytes: int


def grouped_format(name: str) -> GroupedFormat:
    held = FORMATS[name]
    assert isinstance(held, GroupedFormat)
    return held


def ops_of(K: int, N: int, cold_bytes: int) -> dict[str, Op]:
    """Every kernel that is used for loading, on weights [N, K]."""
    found: dict[str, Op] = {}

    def add(name: str, run: Callable[..., None], reads: list[tuple[Any, ...]], num_read: int, *to: Tensor) -> None:
        found[name] = Op([partial(run, *own, *to) for own in reads], num_read + sum(x.nbytes for x in to))

    def copies(num_bytes: int) -> range:
        return range(max(1, cold_bytes // num_bytes))

    for dtype in (torch.bfloat16, torch.float32):
        weights = [(torch.randn(N, K).to(dtype),) for _ in copies(N * K * dtype.itemsize)]
        packed = torch.empty(cpu.gemm_packed_bytes(dtype, N, K), dtype=torch.uint8)
        add(f"pack {str(dtype).removeprefix('torch.')}", cpu.gemm_pack, weights, weights[0][0].nbytes, packed)
    weights = [(torch.randn(N, K).bfloat16(),) for _ in copies(N * K * 2)]
    num_read, codes = weights[0][0].nbytes, torch.empty(N, K, dtype=torch.uint8)
    for name in ("int8", "int4"):
        held = grouped_format(name)
        group_size = held.group_size_of(K)
        with_form = [(*own, held.bits, group_size) for own in weights]
        scales = torch.empty(N, -(-K // group_size))
        add(f"quantize to {name}", cpu.grouped_quantize, with_form, num_read, codes, scales)
    add("quantize to fp8", cpu.fp8_quantize, weights, num_read, codes.view(torch.float8_e4m3fn), torch.empty(N))
    for name in PACKED:
        grouped = [(random_weight(grouped_format(name), N, K),) for _ in copies(N * K)]
        numbers = grouped[0][0]
        packed = torch.empty(cpu.grouped_packed_bytes(N, K, cpu.grouped_form(numbers.format)), dtype=torch.uint8)
        add(f"pack {name}", cpu.grouped_pack, grouped, numbers.nbytes, packed)
    group_size = FORMATS["fp8"].group_size_of(K)
    fp8 = [(torch.zeros(N, K).to(torch.float8_e4m3fn), torch.ones(N, 1), group_size) for _ in copies(N * K)]
    packed = torch.empty(cpu.fp8_packed_bytes(N, K, group_size), dtype=torch.uint8)
    add("pack fp8", cpu.fp8_pack, fp8, N * K + 4 * N, packed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1024x3072", help="KxN")
    parser.add_argument("--cold-mib", type=int, default=256, help="size of the copies that the calls use in turns")
    parser.add_argument("--isa", default="", help="instruction set; default: the best present")
    parser.add_argument("--threads", type=int, default=cpu.default_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="per kernel")
    parser.add_argument("--json", default="", help="write the rows to this file")
    args = parser.parse_args()
    if args.isa:
        cpu.set_isa(args.isa)
    cpu.set_num_threads(args.threads)
    torch.set_num_threads(1)
    K, N = (int(part) for part in args.shape.split("x"))
    print(f"isa {cpu.isa()}, {cpu.get_num_threads()} threads, weights [{N}, {K}]")
    rows = []
    for name, op in ops_of(K, N, args.cold_mib << 20).items():
        seconds, bandwidth = median_seconds(op.calls, args.seconds), cpu.read_bandwidth(256 << 20)
        limit = op.num_bytes / bandwidth
        rows.append({"kernel": name, "us": seconds * 1e6, "limit_us": limit * 1e6, "bandwidth_gb_s": bandwidth / 1e9})
        rate = op.num_bytes / seconds / 1e9
        print(f"{name:>17} {seconds * 1e6:8.1f} us {rate:5.1f} of {bandwidth / 1e9:.1f} GB/s {limit / seconds:4.0%}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"isa": cpu.isa(), "threads": args.threads, "K": K, "N": N, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
