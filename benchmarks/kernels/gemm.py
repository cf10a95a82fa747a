"""Matrix products of one linear layer, compared with the machine's limits, torch, and oneDNN with prepacked weights.

Every engine uses many copies of the weight in turns, so that the weight of a call is not in the caches, as in a model.
Quire's calls are recorded, as in the engine's steps. The engines take turns in short bursts. Each burst begins after a
pause, because OpenMP threads spin for some milliseconds after a call and would take a core from the next engine. A
result is the median call. The limit of a shape is the larger of two times: the bytes of the weight divided by the
measured read bandwidth, and the operations divided by the measured peak of arithmetic in registers. For integer weights
it is the peak of products of codes with as many bits and 8-bit integers. Bandwidth and peak are measured between the
bursts, so that a noisy machine changes them as it changes the calls. `--quantization` lists the formats of the weights
(`none`: the weights are in `--dtype`). Weights in formats of checkpoints (`q4_k`, `awq` ...) are random codes in the
form that the kernels read. Instruction sets are measured one after the other.

    python benchmarks/kernels/gemm.py --quantization none --shapes 1024x3072,1024x151936 --m 1,4,16,64,256 --isa amx
    python benchmarks/kernels/gemm.py --no-peers --isa avx2,avx512_bf16 --save HARDWARE
    python benchmarks/kernels/gemm.py --no-peers --isa avx2 --against before.so --commit 1234abcd --save HARDWARE

--save writes benchmarks/results/HARDWARE/gemm_DATE.md and .json, with the table of docs/performance.md. With --against
another build of the extension takes turns with this one, both builds must give the same bits, and the files are called
gemm_against_COMMIT. With --what they are called gemm_WHAT_DATE: some products of a day again, for example.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from attention import load_extension
from torch import Tensor

from quire.formats.weight_format import GGUF, ON_LOAD, Fp8Format, GroupedFormat, WeightFormat
from quire.kernels import cpu
from quire.kernels.dense import PackedLinear, linear, pack_linear
from quire.kernels.fp8 import PackedFp8, fp8_linear, pack_fp8, quantize_fp8
from quire.kernels.fp8_weight import Fp8Weight
from quire.kernels.grouped import PackedGrouped, grouped_linear, pack_grouped
from quire.kernels.grouped_weight import GroupedWeight
from quire.measure import report

COLD_BYTES = 640 << 20  # the size of the copies of the weight, for each engine
BURST_S = 0.02
PAUSE_S = 0.01

FORMATS: dict[str, WeightFormat] = {
    **{name: on_load.linear for name, on_load in ON_LOAD.items()},
    "fp8-block": Fp8Format(128),
    "awq": GroupedFormat(4, 128, "float16", "uint8"),
    **{name.lower(): held for name, held in GGUF.items()},
}
DTYPES = ("bfloat16", "float32", "float16")
DEFAULT_FORMATS = "none,int8,int4,fp8,q4_k"

Engines = dict[str, list[Callable[[], Any]]]


def onednn_linear(weight_NK: Tensor, M: int) -> Callable[[Tensor], Tensor]:
    """oneDNN's matrix product with weights packed for batch M."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK, M)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


Packed = PackedLinear | PackedGrouped | PackedFp8


def pack(weight_NK: Tensor, quantization: str) -> Packed:
    """The weight in the form of a layer of the model."""
    if quantization == "none":
        return pack_linear(weight_NK)
    weight_format = FORMATS[quantization]
    if isinstance(weight_format, Fp8Format):
        weight, group_size = quantize_fp8(weight_NK), weight_format.group_size_of(weight_NK.shape[1])
        G = -(-weight_NK.shape[1] // group_size)
        return pack_fp8(Fp8Weight(weight.codes_NK, weight.scales_NG.expand(-1, G).contiguous(), group_size))
    return pack_grouped(random_weight(weight_format, *weight_NK.shape))


def random_weight(weight_format: GroupedFormat, N: int, K: int) -> GroupedWeight:
    group_size = weight_format.group_size_of(K)
    G = -(-K // group_size)
    S = -(-G // weight_format.super_size)

    def numbers(name: str | None) -> Tensor | None:
        if name == "e8m0":  # powers of two around 1
            return torch.randint(124, 131, (N, G), dtype=torch.uint8)
        return None if name is None else torch.randint(1, 8, (N, G)).to(getattr(torch, name))

    def supers(name: str | None) -> Tensor | None:
        return torch.full((N, S), 0.01, dtype=torch.float16) if name == "int8" else None

    has_zeros = weight_format.offsets == "uint8"
    scales_NG = numbers(weight_format.scales)
    assert scales_NG is not None
    return GroupedWeight(
        codes_NK=torch.randint(0, 1 << weight_format.bits, (N, K), dtype=torch.uint8),
        bits=weight_format.bits,
        group_size=group_size,
        scales_NG=scales_NG,
        zeros_NG=numbers(weight_format.offsets) if has_zeros else None,
        minima_NG=None if has_zeros else numbers(weight_format.offsets),
        super_scales_NS=supers(weight_format.scales),
        super_minima_NS=supers(weight_format.offsets),
        super_size=weight_format.super_size,
    )


def product(x: Tensor, packed: Packed, out: Tensor) -> Callable[[], Any]:
    """A recorded call, which writes to `out`. The caller keeps all three."""
    with cpu.recorded_calls() as calls:
        if isinstance(packed, PackedLinear):
            linear(x, packed, out=out)
        elif isinstance(packed, PackedFp8):
            fp8_linear(x, packed, out=out)
        else:
            grouped_linear(x, packed, out=out)
    (call,) = calls
    return call


def product_of_build(build: Any, x: Tensor, packed: Packed, out: Tensor) -> Callable[[], Any]:
    """A recorded call like that of `product`, with another build of the extension."""
    used, cpu._C = cpu._C, build
    try:
        return product(x, replace(packed), out)  # a copy, because `panels` belong to a build
    finally:
        cpu._C = used


def engines(x: Tensor, out: Tensor, weights: list[Tensor], packed: list[Packed], peers: bool, before: Any) -> Engines:
    """For each engine, one call for each copy of the weight. `before`: another build, or None."""
    calls: Engines = {"quire": [product(x, p, out) for p in packed]}
    if before is not None:
        calls["before"] = [product_of_build(before, x, p, out) for p in packed]
        check_bits(calls, out)
    if peers:
        calls["torch"] = [partial(F.linear, x, w) for w in weights]
        try:
            calls["onednn"] = [partial(onednn_linear(w, len(x)), x) for w in weights]
        except RuntimeError as error:  # torch has no oneDNN, or oneDNN has not this dtype on this CPU
            print(f"oneDNN prepacked: {str(error).splitlines()[0]}")
    return calls


def check_bits(calls: Engines, out: Tensor) -> None:
    """End the program if the two builds do not give the same bits."""
    results = []
    for copies in calls.values():
        out.fill_(float("nan"))
        copies[0]()
        results.append(out.clone().view(torch.uint8))
    if not torch.equal(*results):
        raise SystemExit("the two builds do not give the same bits")


class Readings:
    """Seconds of calls by engine, in bursts, and the rates of the machine between them."""

    def __init__(self, names: Collection[str]) -> None:
        self.bursts: dict[str, list[list[float]]] = {name: [] for name in names}
        self.bandwidths: list[float] = []
        self.peaks: list[float] = []

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(itertools.chain(*bursts)) for name, bursts in self.bursts.items()}

    def quartiles_before_over_now(self) -> list[float] | None:
        """The quartiles of time before over time now, from medians of neighbouring bursts; None: no other build."""
        if "before" not in self.bursts:
            return None
        pairs = zip(self.bursts["before"], self.bursts["quire"], strict=True)
        return statistics.quantiles((statistics.median(b) / statistics.median(n) for b, n in pairs), n=4)


def measure(calls: Engines, peak_of: Callable[[], float], seconds: float) -> Readings:
    readings = Readings(calls)
    deadline = time.perf_counter() + seconds
    while len(readings.peaks) < 3 or time.perf_counter() < deadline:
        readings.bandwidths.append(cpu.read_bandwidth(256 << 20, repeats=2))
        readings.peaks.append(peak_of())
        for name in list(calls)[:: 1 if len(readings.peaks) % 2 else -1]:
            copies, times = calls[name], list[float]()
            first = len(readings.peaks) * 7  # so that each burst begins with another copy
            time.sleep(PAUSE_S)
            copies[(first - 1) % len(copies)]()  # wakes the threads
            burst_end = time.perf_counter() + BURST_S
            start = 0.0
            while start < burst_end:
                call = copies[(first + len(times)) % len(copies)]
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            readings.bursts[name].append(times)
    return readings


def bench_shape(
    K: int, N: int, Ms: list[int], dtype: torch.dtype, quantization: str, seconds: float, peers: bool, before: Any
) -> list[dict[str, Any]]:
    """Rows of results, one for each M. Each row is printed when it is measured."""
    num_copies = max(1, min(64, COLD_BYTES // (N * K * dtype.itemsize)))
    weights = [torch.randn(N, K).to(dtype) for _ in range(num_copies)]
    packed = [pack(w, quantization) for w in weights]
    rows = []
    peak_of = partial(cpu.peak_flops, dtype, repeats=2)  # FP8 weights are multiplied in bfloat16
    if isinstance(held := FORMATS.get(quantization), GroupedFormat):
        peak_of = partial(cpu.peak_int8_ops, held.bits, repeats=2)
    for M in Ms:
        x, out = torch.randn(M, K).to(dtype), torch.empty(M, N, dtype=dtype)
        readings = measure(engines(x, out, weights, packed, peers, before), peak_of, seconds)
        bandwidth, peak = statistics.median(readings.bandwidths), statistics.median(readings.peaks)
        rows.append(
            {
                "isa": cpu.isa(),
                "dtype": str(dtype).removeprefix("torch."),
                "quantization": quantization,
                "K": K,
                "N": N,
                "M": M,
                "bandwidth_gb_s": bandwidth / 1e9,
                "peak_gops": peak / 1e9,
                "weight_bytes": packed[0].nbytes,
                "limit_us": max(packed[0].nbytes / bandwidth, 2 * M * N * K / peak) * 1e6,
                "us": {name: s * 1e6 for name, s in readings.medians().items()},
                "before_over_now": readings.quartiles_before_over_now(),
            }
        )
        print_row(rows[-1])
    return rows


def name_of(row: dict[str, Any]) -> str:
    """The format of the weights and the dtype of the input."""
    return row["dtype"] if row["quantization"] == "none" else f"{row['quantization']}, {row['dtype']}"


def share_of(row: dict[str, Any]) -> str:
    is_read = row["weight_bytes"] / row["bandwidth_gb_s"] / 1e9 >= 0.99e-6 * row["limit_us"]
    return f"{row['limit_us'] / row['us']['quire']:.0%} {'r' if is_read else 'm'}"


def table(rows: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> list[str]:
    Ms = sorted({row["M"] for row in rows})
    cases: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        case = (row["isa"], f"{row['K']}x{row['N']}", name_of(row))
        cases.setdefault(case, []).append(cell(row))
    head = "instruction set | shape | format | " + " | ".join(f"{M} rows" for M in Ms)
    return ["", *report.table_head(head), *(f"| {' | '.join((*case, *cells))} |" for case, cells in cases.items())]


def markdown(result: dict[str, Any]) -> str:
    """The text of the result file."""
    lines = [
        *report.heading("Matrix products: the share of what the machine can do", result),
        f"- {result['threads']} threads; a cell is the share at which weights are read (r) or numbers multiplied (m),"
        " whichever limits that product.",
        *table(result["rows"], share_of),
    ]
    if result["before"] is not None:

        def ratio(row: dict[str, Any]) -> str:
            low, middle, high = row["before_over_now"]
            return f"{middle:.2f} ({low:.2f} to {high:.2f})"

        lines += [
            "",
            f"The time of commit {result['before']} over the time now: the median and the quartiles of pairs of bursts,"
            " in turns in one process. Both builds give the same bits.",
            *table(result["rows"], ratio),
        ]
    return "\n".join(lines) + "\n"


def print_row(row: dict[str, Any]) -> None:
    flops, num_bytes = 2 * row["M"] * row["N"] * row["K"], row["weight_bytes"]
    cells = [
        f"{name} {flops / us / 1e3:7.0f} GFLOP/s {num_bytes / us / 1e3:5.1f} GB/s {row['limit_us'] / us:4.0%}"
        for name, us in row["us"].items()
    ]
    sizes = f"[{row['M']:4},{row['K']:5}] x [{row['K']:5},{row['N']:6}]"
    head = f"{name_of(row):>15} {sizes}  limit {flops / row['limit_us'] / 1e3:6.0f}"
    if row["before_over_now"] is not None:
        cells.append("before / now " + ", ".join(f"{ratio:.2f}" for ratio in row["before_over_now"]))
    print(f"{head} ({row['bandwidth_gb_s']:.1f} GB/s, {row['peak_gops']:.0f})  " + "  |  ".join(cells), flush=True)


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """A type for argparse: some of these names, separated by commas. All of them are checked before the first
    measurement.
    """

    def names(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}; known are {', '.join(known)}")
        return found

    return names


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("--shapes", default="1024x3072", help="KxN, separated by commas")
    parser.add_argument("--m", default="1,8,32,256")
    parser.add_argument("--dtype", type=names_of(DTYPES), default="bfloat16,float32", help="of " + ", ".join(DTYPES))
    known = ("none", *FORMATS)
    parser.add_argument("--quantization", type=names_of(known), default=DEFAULT_FORMATS, help="of " + ", ".join(known))
    parser.add_argument("--isa", default="", help="instruction sets, comma separated; default: the best present")
    parser.add_argument("--threads", type=int, default=cpu.default_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="per product")
    parser.add_argument("--no-peers", action="store_true", help="only Quire")
    parser.add_argument("--against", default="", help="file of another build of quire._C to take turns with")
    parser.add_argument("--commit", help="of the build of --against, for result files")
    parser.add_argument("--what", default="", help="part of the name of result files")
    args = parser.parse_args()
    if args.against and args.save and not args.commit:
        parser.error("--against with --save needs --commit")
    cpu.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    before = load_extension(args.against) if args.against else None
    if before is not None:
        before.set_num_threads(args.threads)
    facts = report.environment("python", "benchmarks/kernels/gemm.py")
    result = {**facts, "threads": args.threads, "before": args.commit, "rows": []}
    for isa in args.isa.split(",") if args.isa else [cpu.isa()]:
        cpu.set_isa(isa)
        if before is not None:
            before.set_isa(isa)
        print(f"isa {isa}, {cpu.get_num_threads()} threads, torch {torch.__version__}")
        for dtype, quantization, shape in itertools.product(args.dtype, args.quantization, args.shapes.split(",")):
            K, N = (int(part) for part in shape.split("x"))
            Ms = [int(m) for m in args.m.split(",")]
            result["rows"] += bench_shape(
                K, N, Ms, getattr(torch, dtype), quantization, args.seconds, not args.no_peers, before
            )
    if args.save:
        parts = ["gemm", args.commit and f"against_{args.commit}", args.what]
        report.save_published(__file__, "_".join(filter(None, parts)), args.save, result, markdown(result))


if __name__ == "__main__":
    main()
