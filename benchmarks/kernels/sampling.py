"""The additional cost of random sampling over greedy choice, by the shape of the distribution and the filters.

The builds of quire._C and greedy choice take turns on the same logits, which are not in the CPU's caches. A result is
the median call. "faster" is the median of the ratios of neighbouring calls. The other build must choose the same
tokens.

    python benchmarks/kernels/sampling.py --rows 32 --against OLD_C.so
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from attention import load_extension
from torch import Tensor

from quire.kernels import cpu

# temperature, top-k, top-p, min-p
FILTERS: dict[str, tuple[float, int, float, float]] = {
    "top-p 0.95": (0.8, 0, 0.95, 0.0),
    "top-p 0.5": (0.8, 0, 0.5, 0.0),
    "no filter": (1.0, 0, 1.0, 0.0),
    "top-k 20, top-p 0.95": (0.8, 20, 0.95, 0.0),
    "top-k 50": (0.8, 50, 1.0, 0.0),
    "top-k 3000": (0.8, 3000, 1.0, 0.0),
    "min-p 0.02, top-p 0.95": (0.8, 0, 0.95, 0.02),
}


def distributions(R: int, V: int) -> dict[str, Tensor]:
    normal_RV = torch.randn(R, V)
    peaked_RV = normal_RV * 2
    peaked_RV[:, torch.randint(V, (50,))] += 16.0  # a few likely tokens, as in a trained model
    return {
        "peaked": peaked_RV,
        "flat, N(0, 2)": normal_RV * 2,
        "N(0, 8)": normal_RV * 8,
        "half flat": normal_RV * 2.2 - torch.linspace(0, 6, V),
        "flat, bfloat16": (normal_RV * 2).bfloat16().float(),
        "all equal": torch.zeros(R, V),
        "two values": (normal_RV > 0).float() * 1.5,
        "60% tied": normal_RV.where(torch.rand(R, V) < 0.4, torch.tensor(0.0)),
        "uniform, 60 wide": torch.rand(R, V) * 60,
    }


def sampler(build: Any, filters: tuple[float, int, float, float], R: int) -> Callable[[Tensor], Tensor]:
    """A call of the build's kernel."""
    temperature, top_k, top_p, min_p = filters
    parameters = {
        "temperature": torch.full((R,), temperature),
        "top_k": torch.full((R,), top_k, dtype=torch.int32),
        "top_p": torch.full((R,), top_p),
        "min_p": torch.full((R,), min_p),
        "uniform": torch.linspace(0, 0.999, R, dtype=torch.float64),
    }

    def call(logits_RV: Tensor) -> Tensor:
        token_ids_R = torch.empty(R, dtype=torch.int64)
        build.Sample(logits=logits_RV, token_ids=token_ids_R, **parameters).run()
        return token_ids_R

    return call


def greedy(logits_RV: Tensor) -> Tensor:
    token_ids_R = torch.empty(len(logits_RV), dtype=torch.int64)
    cpu.greedy(logits_RV, token_ids_R)
    return token_ids_R


def bench(builds: dict[str, Any], filters: str, copies: list[Tensor], repeats: int) -> dict[str, Any]:
    calls = {name: sampler(build, FILTERS[filters], len(copies[0])) for name, build in builds.items()}
    expected = [calls["quire"](logits_RV) for logits_RV in copies]
    calls["greedy"] = greedy
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            token_ids_R = call(copies[turn % len(copies)])
            times[name].append(time.perf_counter() - start)
            assert name == "greedy" or token_ids_R.equal(expected[turn % len(copies)]), f"{name} chose other tokens"
    row: dict[str, Any] = {"us": {name: statistics.median(values) * 1e6 for name, values in times.items()}}
    row["over_greedy_us"] = {name: us - row["us"]["greedy"] for name, us in row["us"].items() if name != "greedy"}
    if "against" in times:
        row["faster"] = statistics.median(x / y for x, y in zip(times["against"], times["quire"], strict=True))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--isa", default="", help="instruction set; default: the best present")
    parser.add_argument("--threads", type=int, default=cpu.default_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--against", default="", help="file of another build of quire._C to take turns with")
    parser.add_argument("--json", default="", help="write the rows to this file")
    args = parser.parse_args()
    builds: dict[str, Any] = {"quire": cpu._C}
    if args.against:
        builds["against"] = load_extension(args.against)
    for build in builds.values():
        build.set_isa(args.isa or cpu.isa())
        build.set_num_threads(args.threads)
    torch.set_num_threads(1)
    print(f"isa {cpu.isa()}, {cpu.get_num_threads()} threads, vocabulary {args.vocab}")
    rows = []
    for R in (int(r) for r in args.rows.split(",")):
        sets = [distributions(R, args.vocab) for _ in range(3)]
        for name in sets[0]:
            for filters in FILTERS if name in ("peaked", "flat, N(0, 2)") else ["top-p 0.95"]:
                row = bench(builds, filters, [x[name] for x in sets], args.repeats)
                rows.append({"rows": R, "logits": name, "filters": filters} | row)
                cells = ", ".join(f"{build} {us / 1e3:.2f} ms" for build, us in row["us"].items())
                faster = f", {row['faster']:.2f} times as fast" if args.against else ""
                over = row["over_greedy_us"]["quire"] / 1e3
                print(f"{R} rows, {name}, {filters}: {cells}; {over:.2f} ms over greedy{faster}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"isa": cpu.isa(), "threads": args.threads, "vocab": args.vocab, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
