"""The experts of a mixture-of-experts layer against the machine's limits: routing, both products, activation, sum.

The limit of a call is the larger of two times: the bytes of the distinct experts that it hits, which are counted, over
the measured read bandwidth; and the operations of all its rows over the measured register-only peak. Both are measured
between the bursts of calls, so that a noisy machine hits numerator and denominator alike. A reading is the median over
calls of limit / time. Each call has other hits, and layers take turns, so that weights are outside the caches. Calls
are recorded and repeated, as the engine does with its steps: results have memory that is written again and again.
Torch, which draws the logits of the next call, has one thread: its other threads would spin after their work and take a
core from the kernels (NOTES.md).

Routing is uniform, or by Zipf: the expert of rank r has probability ~ 1 / r. `--quantization` is the format of the
weights (`none`: bfloat16).

    python benchmarks/kernels/experts.py --models OLMoE-1B-7B --quantization int4 --rows 1,8,32,512
    python benchmarks/kernels/experts.py --models OLMoE-1B-7B,Qwen3-30B-A3B --save HARDWARE

--save writes benchmarks/results/HARDWARE/expert_products_DATE.md and .json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gemm import FORMATS, names_of, pack
from torch import Tensor

from quire.formats.weight_format import GroupedFormat
from quire.kernels import cpu
from quire.kernels.expert_stack import PackedStack, StackBuilder
from quire.kernels.experts import combine, expert_linear, route
from quire.kernels.ops import gated_activation
from quire.kernels.recording import Arena, record
from quire.kernels.routing import Routing, RoutingRule
from quire.measure import report

LAYERS = 3  # the number of layers; each has weights of its own
BURST_S = 0.2
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """The shape of a layer: E experts, S active ones, D the hidden size, I the inner size."""

    E: int
    S: int
    D: int
    I: int  # noqa: E741


MODELS = {
    "OLMoE-1B-7B": Shape(64, 8, 2048, 1024),
    "Qwen3-30B-A3B": Shape(128, 8, 2048, 768),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "Qwen1.5-MoE-A2.7B": Shape(60, 4, 2048, 1408),
    "tiny": Shape(8, 2, 64, 64),
}
PUBLISHED = [name for name in MODELS if name != "tiny"]
ROUTINGS = ("uniform", "zipf")


def stack_of(E: int, N: int, K: int, quantization: str) -> PackedStack:
    """The packed weights of all experts. They have the same numbers, each in memory of its own."""
    builder, packed = StackBuilder(E, N), pack(torch.randn(N, K).to(DTYPE), quantization)
    for e in range(E):
        builder.put(e, packed)
    return builder.finished()


class Layer:
    """The experts of one layer of a model."""

    def __init__(self, shape: Shape, quantization: str) -> None:
        self._rule = RoutingRule(shape.E, shape.S)
        self._up = stack_of(shape.E, 2 * shape.I, shape.D, quantization)
        self._down = stack_of(shape.E, shape.D, shape.I, quantization)
        self.expert_bytes = (self._up.nbytes + self._down.nbytes) / shape.E

    def __call__(self, x_TD: Tensor, logits_TE: Tensor) -> tuple[Tensor, Routing]:
        routing = route(logits_TE, self._rule)
        y = gated_activation("silu", expert_linear(x_TD, self._up, routing, of_tokens=True))
        return combine(expert_linear(y, self._down, routing, of_tokens=False), routing), routing


class RecordedLayer:
    """The calls of a layer for one number of rows.

    Attributes:
        logits_TE: the logits by which a call routes. They must change before the next call.
        routing: the routing of the last call.
    """

    def __init__(self, layer: Layer, x_TD: Tensor, logits_TE: Tensor) -> None:
        self._x_TD, self.logits_TE, self._arena = x_TD, logits_TE.clone(), Arena()
        self.expert_bytes = layer.expert_bytes
        self.routing: Routing

        def run() -> Tensor:
            made_TD, self.routing = layer(x_TD, self.logits_TE)
            return made_TD

        self._made_TD, calls = record(run, self._arena)
        assert calls is not None, "the layer does more than kernel calls"
        self._calls = calls

    def __call__(self) -> None:
        for call in self._calls:
            call()


def logits_of(T: int, E: int, routing: str) -> Iterator[Tensor]:
    """Logits [T, E] without end, new ones for each call. The experts of a row are drawn without replacement."""
    odds_E = torch.ones(E) if routing == "uniform" else 1 / torch.arange(1, E + 1)
    while True:
        yield odds_E[torch.randperm(E)].log() - torch.rand(T, E).log().neg().log()


def measure(
    layers: list[Layer],
    shape: Shape,
    T: int,
    routing: str,
    bandwidth_of: Callable[[], float],
    peak_of: Callable[[], float],
    seconds: float,
) -> dict[str, float]:
    """Measure one number of rows. The results are medians over calls."""
    x_TD, logits = torch.randn(T, shape.D).to(DTYPE), logits_of(T, shape.E, routing)
    turns = itertools.cycle([RecordedLayer(layer, x_TD, next(logits)) for layer in layers])
    operations = 2 * T * shape.S * 3 * shape.D * shape.I
    found: dict[str, list[float]] = {"us": [], "hits": [], "share": [], "is_read": [], "bandwidth": [], "peak": []}
    deadline = time.perf_counter() + seconds
    while not found["us"] or time.perf_counter() < deadline:
        bandwidth, peak = bandwidth_of(), peak_of()
        next(turns)()  # wakes the threads
        burst_end = time.perf_counter() + BURST_S
        while time.perf_counter() < burst_end:
            layer = next(turns)
            layer.logits_TE.copy_(next(logits))
            start = time.perf_counter()
            layer()
            elapsed = time.perf_counter() - start
            hits = int((layer.routing.begins.diff() > 0).sum())
            reading, multiplying = hits * layer.expert_bytes / bandwidth, operations / peak
            share, is_read = max(reading, multiplying) / elapsed, float(reading >= multiplying)
            numbers = (1e6 * elapsed, hits, share, is_read, bandwidth / 1e9, peak / 1e9)
            for values, number in zip(found.values(), numbers, strict=True):
                values.append(number)
    return {name: statistics.median(values) for name, values in found.items()}


def markdown(result: dict[str, Any]) -> str:
    """The text of the result file."""
    rows = sorted({reading["rows"] for reading in result["readings"]})
    lines = [
        *report.heading("Mixture-of-experts layers: the share of what the machine can do", result),
        f"- {result['isa']}, {result['threads']} threads; a cell is the limit over the time of a call: routing, both"
        " products, activation and sum. The limit is the larger of the bytes of the experts hit over the read bandwidth"
        " (r) and the operations over the register-only peak (m).",
        "",
        *report.table_head("model | format | routing | " + " | ".join(f"{T} rows" for T in rows)),
    ]
    cases: dict[tuple[str, str, str], list[str]] = {}
    for reading in result["readings"]:
        case = (reading["model"], reading["quantization"], reading["routing"])
        cases.setdefault(case, []).append(f"{reading['share']:.0%} {'r' if reading['is_read'] else 'm'}")
    lines += [f"| {' | '.join((*case, *shares))} |" for case, shares in cases.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names_of(MODELS), default=",".join(PUBLISHED), help="of " + ", ".join(MODELS))
    parser.add_argument("--rows", default="1,8,32,512")
    known = ("none", *FORMATS)
    parser.add_argument("--quantization", type=names_of(known), default="int4", help="of " + ", ".join(known))
    parser.add_argument("--routings", type=names_of(ROUTINGS), default=",".join(ROUTINGS))
    parser.add_argument("--isa", default="", help="instruction set; default: the best present")
    parser.add_argument("--threads", type=int, default=cpu.default_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="per reading")
    parser.add_argument(
        "--read-mib", type=int, default=1024, help="by which the bandwidth is measured: more than the L3 cache"
    )
    parser.add_argument("--save", metavar="HARDWARE", help="write result files with this name of the machine")
    args = parser.parse_args()
    if args.isa:
        cpu.set_isa(args.isa)
    cpu.set_num_threads(args.threads)
    torch.set_num_threads(1)
    print(f"isa {cpu.isa()}, {cpu.get_num_threads()} threads, torch {torch.__version__}")
    readings: list[dict[str, Any]] = []
    for name, quantization in itertools.product(args.models, args.quantization):
        shape = MODELS[name]
        layers = [Layer(shape, quantization) for _ in range(LAYERS)]
        bandwidth_of = partial(cpu.read_bandwidth, args.read_mib << 20, repeats=2)
        peak_of = partial(cpu.peak_flops, DTYPE, repeats=2)
        if isinstance(held := FORMATS.get(quantization), GroupedFormat):
            peak_of = partial(cpu.peak_int8_ops, held.bits, repeats=2)
        for routing, T in itertools.product(args.routings, map(int, args.rows.split(","))):
            found = measure(layers, shape, T, routing, bandwidth_of, peak_of, args.seconds)
            readings.append({"model": name, "quantization": quantization, "routing": routing, "rows": T, **found})
            print(
                f"{name:>18} {quantization:>5} {routing:>8} {T:4} rows  {found['hits']:5.0f} of {shape.E} experts  "
                f"{found['us']:9.0f} us  {found['share']:4.0%} of the limit "
                f"({found['bandwidth']:.1f} GB/s, {found['peak']:.0f} GOP/s)",
                flush=True,
            )
    if args.save:
        result = {
            **report.environment("python", "benchmarks/kernels/experts.py"),
            "isa": cpu.isa(),
            "threads": args.threads,
            "readings": readings,
        }
        report.save_published(Path(__file__).parents[1], "expert_products", args.save, result, markdown(result))


if __name__ == "__main__":
    main()
