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
    python benchmarks/kernels/experts.py --rows 1,8,32 --against before.so --commit 1234abcd --save HARDWARE

--save writes benchmarks/results/HARDWARE/expert_products_DATE.md and .json. With --against another build of the
extension takes turns with this one, on the same routings. Both builds must give the same bits, and the files are called
expert_products_against_COMMIT.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from attention import load_extension
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
PHASES = ("routing", "gate and up", "activation", "down", "sum")  # the calls of a layer
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
        # Copies, because another build makes its own structs for them.
        rule, up, down = replace(self._rule), replace(self._up), replace(self._down)
        routing = route(logits_TE, rule)
        y = gated_activation("silu", expert_linear(x_TD, up, routing, of_tokens=True))
        return combine(expert_linear(y, down, routing, of_tokens=False), routing), routing


@contextmanager
def calls_of(build: Any) -> Iterator[None]:
    """Kernel calls that are recorded meanwhile belong to this build of the extension."""
    present, cpu._C = cpu._C, build
    try:
        yield
    finally:
        cpu._C = present


class RecordedLayer:
    """The calls of a layer for one number of rows.

    Attributes:
        logits_TE: the logits by which a call routes. They must change before the next call.
        routing: the routing of the last call.
        made_TD: the result of the last call.
    """

    def __init__(self, layer: Layer, x_TD: Tensor, logits_TE: Tensor, build: Any) -> None:
        self._x_TD, self.logits_TE, self._arena = x_TD, logits_TE.clone(), Arena()
        self.expert_bytes = layer.expert_bytes
        self.routing: Routing

        def run() -> Tensor:
            made_TD, self.routing = layer(x_TD, self.logits_TE)
            return made_TD

        with calls_of(build):
            self.made_TD, calls = record(run, self._arena)
        assert calls is not None, "the layer does more than kernel calls"
        assert len(calls) == len(PHASES)
        self._calls = calls

    def __call__(self) -> list[float]:
        """When the layer began, and when each of its calls ended, in seconds."""
        times = [time.perf_counter()]
        for call in self._calls:
            call()
            times.append(time.perf_counter())
        return times


def logits_of(T: int, E: int, routing: str) -> Iterator[Tensor]:
    """Logits [T, E] without end, new ones for each call. The experts of a row are drawn without replacement."""
    odds_E = torch.ones(E) if routing == "uniform" else 1 / torch.arange(1, E + 1)
    while True:
        yield odds_E[torch.randperm(E)].log() - torch.rand(T, E).log().neg().log()


@dataclass
class Burst:
    """The readings of one build in a row."""

    us: list[float] = field(default_factory=list)
    phase_us: list[list[float]] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)


def check_bits(turns: list[list[RecordedLayer]], logits_TE: Tensor) -> None:
    """Ends the program if the builds do not give the same bits."""
    results = []
    for layers in turns:
        layers[0].logits_TE.copy_(logits_TE)
        layers[0]()
        results.append(layers[0].made_TD.clone().view(torch.uint8))
    if not all(torch.equal(result, results[0]) for result in results):
        raise SystemExit("the two builds do not give the same bits")


def measure(
    layers: list[Layer],
    shape: Shape,
    T: int,
    routing: str,
    bandwidth_of: Callable[[], float],
    peak_of: Callable[[], float],
    seconds: float,
    before: Any,
) -> dict[str, Any]:
    """Medians over calls of this build, and with another build, `before`, also quartiles of its times over these."""
    x_TD, logits = torch.randn(T, shape.D).to(DTYPE), logits_of(T, shape.E, routing)
    builds = [cpu._C] if before is None else [cpu._C, before]
    recorded = [[RecordedLayer(layer, x_TD, next(logits), build) for layer in layers] for build in builds]
    check_bits(recorded, next(logits))
    turns = [itertools.cycle(of_build) for of_build in recorded]
    operations = 2 * T * shape.S * 3 * shape.D * shape.I
    found: dict[str, list[float]] = {"us": [], "hits": [], "share": [], "is_read": [], "bandwidth": [], "peak": []}
    phases: list[list[float]] = []
    ratios: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(ratios) < len(builds) or time.perf_counter() < deadline:
        bandwidth, peak = bandwidth_of(), peak_of()
        drawn = [next(logits)]
        bursts = [Burst() for _ in builds]
        for b in range(len(builds))[:: 1 if len(ratios) % 2 else -1]:
            next(turns[b])()  # wakes the threads
            burst_end = time.perf_counter() + BURST_S
            for i in itertools.count():
                if i == len(drawn):
                    drawn.append(next(logits))
                layer = next(turns[b])
                layer.logits_TE.copy_(drawn[i])
                times = layer()
                bursts[b].us.append(1e6 * (times[-1] - times[0]))
                bursts[b].phase_us.append([1e6 * (end - begin) for begin, end in itertools.pairwise(times)])
                bursts[b].hits.append(int((layer.routing.begins.diff() > 0).sum()))
                if times[-1] > burst_end:
                    break
        common = min(len(burst.us) for burst in bursts)  # these calls had the same routings
        ratios.append(statistics.median(bursts[-1].us[:common]) / statistics.median(bursts[0].us[:common]))
        phases += bursts[0].phase_us
        for us, hits in zip(bursts[0].us, bursts[0].hits, strict=True):
            reading, multiplying = 1e6 * hits * layers[0].expert_bytes / bandwidth, 1e6 * operations / peak
            share, is_read = max(reading, multiplying) / us, float(reading >= multiplying)
            numbers = (us, hits, share, is_read, bandwidth / 1e9, peak / 1e9)
            for values, number in zip(found.values(), numbers, strict=True):
                values.append(number)
    return {
        **{name: statistics.median(values) for name, values in found.items()},
        "phase_us": {name: statistics.median(us) for name, us in zip(PHASES, zip(*phases, strict=True), strict=True)},
        "before_over_now": None if before is None else statistics.quantiles(ratios, n=4),
    }


def ratio_text(reading: dict[str, Any]) -> str:
    """The median and the quartiles."""
    low, middle, high = reading["before_over_now"]
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def table(readings: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> list[str]:
    """The rows of a table: a line for each model, format and routing."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for reading in readings:
        cases.setdefault((reading["model"], reading["quantization"], reading["routing"]), []).append(cell(reading))
    return [f"| {' | '.join((*case, *cells))} |" for case, cells in cases.items()]


def markdown(result: dict[str, Any]) -> str:
    """The text of the result file."""
    rows = sorted({reading["rows"] for reading in result["readings"]})
    head = report.table_head("model | format | routing | " + " | ".join(f"{T} rows" for T in rows))
    lines = [
        *report.heading("Mixture-of-experts layers: the share of what the machine can do", result),
        f"- {result['isa']}, {result['threads']} threads; a cell is the limit over the time of a call: routing, both"
        " products, activation and sum. The limit is the larger of the bytes of the experts hit over the read bandwidth"
        " (r) and the operations over the register-only peak (m).",
        "",
        *head,
    ]
    lines += table(result["readings"], lambda reading: f"{reading['share']:.0%} {'r' if reading['is_read'] else 'm'}")
    lines += [
        "",
        f"Microseconds of the calls, medians: {', '.join(PHASES)}.",
        "",
        *head,
        *table(result["readings"], lambda reading: ", ".join(f"{us:.0f}" for us in reading["phase_us"].values())),
    ]
    if result["before"] is not None:
        lines += [
            "",
            f"The time of commit {result['before']} over the time now: the median and the quartiles of pairs of bursts,"
            " in turns in one process, on the same routings. Both builds give the same bits.",
            "",
            *head,
            *table(result["readings"], ratio_text),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
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
    parser.add_argument("--against", default="", help="file of another build of quire._C to take turns with")
    parser.add_argument("--commit", help="of the build of --against, for result files")
    args = parser.parse_args()
    if args.against and args.save and not args.commit:
        parser.error("--against with --save needs --commit")
    if args.isa:
        cpu.set_isa(args.isa)
    cpu.set_num_threads(args.threads)
    torch.set_num_threads(1)
    before = load_extension(args.against) if args.against else None
    if before is not None:
        before.set_isa(cpu.isa())
        before.set_num_threads(args.threads)
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
            found = measure(layers, shape, T, routing, bandwidth_of, peak_of, args.seconds, before)
            readings.append({"model": name, "quantization": quantization, "routing": routing, "rows": T, **found})
            print(
                f"{name:>18} {quantization:>5} {routing:>8} {T:4} rows  {found['hits']:5.0f} of {shape.E} experts  "
                f"{found['us']:9.0f} us  {found['share']:4.0%} of the limit "
                f"({found['bandwidth']:.1f} GB/s, {found['peak']:.0f} GOP/s)  "
                + " ".join(f"{us:.0f}" for us in found["phase_us"].values())
                + ("" if before is None else "  before / now " + ratio_text(found)),
                flush=True,
            )
    if args.save:
        result = {
            **report.environment("python", "benchmarks/kernels/experts.py"),
            "isa": cpu.isa(),
            "threads": args.threads,
            "before": args.commit,
            "readings": readings,
        }
        what = f"expert_products_against_{args.commit}" if args.commit else "expert_products"
        report.save_published(__file__, what, args.save, result, markdown(result))


if __name__ == "__main__":
    main()
