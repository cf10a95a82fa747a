"""The errors of `quire simulate`: six workloads at 0.5, 0.9 and 1.5 of saturation, simulated and really served.

`quire serve` runs on this machine and leaves one core to its API and the client. The program waits until the server has
measured its steps. For each workload, a simulated closed loop with the number of requests that the server runs at once
gives the saturation. Each rate is simulated and then served once (Poisson), with the same requests at the same times.
The simulation has the costs from earlier runs of the server: from a few requests before the first rate, and from all
earlier rates. A good request has a time to first token of at most three times, and a time per token of at most twice,
the median at the lowest rate of its workload.

The claim: throughput, goodput, medians, preemptions and tokens from the prefix cache are within 10 %, P99 within 20 %.

    python benchmarks/simulate.py [MODEL] [--seconds 60] [--workloads chat shared ...] [--rates 0.5 0.9 1.5]
        [--save HARDWARE]

MODEL: the default is the bundled demo model, the quick setting: with `--seconds 8` it takes about ten minutes. Its
steps take one or two milliseconds, so work outside the engine counts more than with real models. --save writes
benchmarks/results/HARDWARE/simulate_DATE.md and .json; the name has the workloads if there are some.
"""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from quire import extension
from quire.config import EngineConfig
from quire.entry.launch import find_model
from quire.measure import report
from quire.measure.kept_costs import wait_for_costs
from quire.measure.load import Run
from quire.measure.options import Target, Traffic, Workload
from quire.measure.prepared_load import PreparedLoad
from quire.measure.serving import find_server, one_round, warm_up
from quire.measure.statistics import Metrics, measure
from quire.measure.workload import named_workload
from quire.planning import devices
from quire.planning.step_costs import KnownCost, known_cost
from quire.simulate.run import plan_engine, simulate

# Requests of at most 2,048 tokens. `shared` is --dataset-name prefix_repetition: 10 beginnings of 256 tokens.
WORKLOADS = ("chat", "shared", "random:1500/30", "random:1000/100", "random:256/256", "random:32/400")
RATES = (0.5, 0.9, 1.5)
MAX_NUM_SEQS, MAX_QUEUED = 32, 128
CONTEXTS = 12  # the KV cache has room for this number of 2,048 tokens; more requests run, so some are preempted
CALIBRATION_SECONDS = 120
PAUSE_SECONDS = 4.0  # within this time an idle server takes memory, and keeps what the last 256 steps have corrected
FEWEST_REQUESTS = 24
# Requests before the first rate. Their steps, and their times in the front end, correct the costs of a start.
TEACHING, NUM_TEACHING, TEACHING_CONCURRENCY = "chat", 12, 6
WITHIN = {"p99": 0.2}  # by the first part of a metric's name
OTHERS_WITHIN = 0.1
PERCENTILES = (99,)
TIMES = ("ttft", "tpot", "itl", "e2el")
COUNTERS = {"preemptions": "vllm:num_preemptions_total", "cached tokens": "vllm:prefix_cache_hits_total"}


class NoBar:
    """A progress bar that shows nothing."""

    def update(self) -> None:
        """Do nothing when a request is done."""

    def close(self) -> None:
        """Do nothing when all requests are done."""


@dataclass(frozen=True)
class Cell:
    """The metrics, by name, of a workload at a rate that is served and simulated, and the simulated intervals."""

    workload: str
    factor: float
    served: dict[str, float]
    simulated: dict[str, float]
    intervals: dict[str, tuple[float, float]]

    def inside(self) -> list[bool]:
        """For each metric with a simulated interval, whether the served value lies in it."""
        found = []
        for name, value in self.served.items():
            key = name.replace(" ", "_")
            if (interval := self.intervals.get(key) or self.intervals.get(f"{key}_ms")) is not None:
                found.append(interval[0] <= value <= interval[1])
        return found

    def errors(self) -> dict[str, float]:
        """The relative errors of the simulation. The error of a count below 1 is divided by 1."""
        return {
            name: (self.simulated[name] - real) / (max(real, 1.0) if name in COUNTERS else max(real, 1e-9))
            for name, real in self.served.items()
        }


def is_within(name: str, error: float) -> bool:
    """Whether the error of a metric is within the claim."""
    return abs(error) <= WITHIN.get(name.split()[0], OTHERS_WITHIN)


def numbers(metrics: Metrics, counts: dict[str, float]) -> dict[str, float]:
    """The compared metrics: rates per second, times in ms."""
    rates = {name: metrics.rates[f"{name.replace(' ', '_')}"] for name in ("request throughput", "output throughput")}
    medians = {f"median {name}": 1000 * metrics.times[name].median for name in TIMES}
    tails = {f"p99 {name}": 1000 * metrics.times[name].percentiles[99] for name in TIMES}
    return {**rates, "goodput": metrics.rates["request_goodput"], **medians, **counts, **tails}


class Bench:
    """A server and its simulation."""

    def __init__(self, config: EngineConfig, port: int) -> None:
        _, self._name, self._model = find_model(config, None, weights=False)
        self._config, self._device = config, devices.detect(extension.chosen_isa(), "none was looked for")
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        target = Target(
            base_url=f"http://127.0.0.1:{port}",
            temperature=0.0,
            ready_check_timeout_sec=600,
            ignore_eos=True,
            extra_body={"return_token_ids": True},  # an event for each token, also inside a character
        )
        self._server = self._runner.run(find_server(target))
        self._seed = 0

    def wait_for_calibration(self) -> None:
        """Wait without load until the server has measured its steps. Raises TimeoutError if it does not."""
        self._measured = wait_for_costs(self._known, CALIBRATION_SECONDS)

    def _known(self) -> KnownCost:
        """The costs that the server keeps now."""
        return known_cost(plan_engine(self._config, self._model, self._device), self._model, self._device)

    def prepare(self, name: str, num_prompts: int, traffic: Traffic) -> PreparedLoad:
        """Make requests with prompts that are not in the prefix cache."""
        self._seed += 1
        chosen = Workload(dataset_name="prefix_repetition") if name == "shared" else named_workload(name)
        workload = replace(chosen, num_prompts=num_prompts, seed=self._seed)
        return self._server.prepare(workload, traffic)

    def serve(self, load: PreparedLoad) -> tuple[Run, dict[str, float]]:
        """Serve a round. Returns it with the changes of the server's counters."""
        self._runner.run(warm_up(self._server, load))
        before = self._counts()
        seed = load.workload.seed
        run: Run = self._runner.run(one_round(self._server, load, load.requests(seed), seed, lambda: None))
        return run, {name: count - before[name] for name, count in self._counts().items()}

    def simulate(self, load: PreparedLoad) -> tuple[Run, dict[str, float], dict[str, tuple[float, float]]]:
        """Simulate the same round. Returns it with the counters and the intervals."""
        (run,), facts = simulate(
            self._name, self._config, self._model, self._device, load, lambda total: NoBar(), PERCENTILES
        )
        own = facts["simulated"]
        counts = {"preemptions": own["num_preemptions"], "cached tokens": own["prefix_cache_hits"]}
        return run, counts, own["intervals"]

    def teach(self) -> None:
        """Serve requests that are not measured, and wait until the server keeps what they correct."""
        self.serve(self.prepare(TEACHING, NUM_TEACHING, Traffic(max_concurrency=TEACHING_CONCURRENCY)))
        wait_for_costs(self._known, CALIBRATION_SECONDS, other_than=self._measured)

    def cells(self, name: str, rates: list[float], seconds: float) -> list[Cell]:
        """Serve and simulate a workload at each rate."""
        closed = Traffic(max_concurrency=MAX_NUM_SEQS, num_warmups=4)
        run, *_ = self.simulate(self.prepare(name, 3 * MAX_NUM_SEQS, closed))
        saturation = sum(outcome.success for outcome in run.outcomes) / run.duration
        print(f"{name}: saturation {saturation:.2f} requests/s", flush=True)
        found, limits = [], dict[str, float]()
        for factor in sorted(rates):
            rate = factor * saturation
            load = self.prepare(name, max(int(rate * seconds), FEWEST_REQUESTS), Traffic(request_rate=rate))
            time.sleep(PAUSE_SECONDS)
            run, counts, intervals = self.simulate(load)
            served = self.serve(load)
            if not limits:
                times = measure([served[0]], [], {}).times
                limits = {"ttft": 3000 * times["ttft"].median, "tpot": 2000 * times["tpot"].median}
            real, simulated = (numbers(measure([each], PERCENTILES, limits), c) for each, c in (served, (run, counts)))
            cell = Cell(name, factor, real, simulated, intervals)
            far = [f"{each} {error:+.0%}" for each, error in cell.errors().items() if not is_within(each, error)]
            print(f"  {factor:g}x: {', '.join(far) or 'all within'}", flush=True)
            found.append(cell)
        return found

    def _counts(self) -> dict[str, float]:
        """The counters of the server."""
        client = self._server.client()
        try:
            text = self._runner.run(client.request("GET", "/metrics")).decode()
        finally:
            client.close()
        return {
            name: sum(map(float, re.findall(rf"^{series}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))
            for name, series in COUNTERS.items()
        }

    def close(self) -> None:
        self._runner.close()


def markdown(result: dict[str, Any], cells: list[Cell]) -> str:
    """The text of the result file."""
    errors = [(name, error) for cell in cells for name, error in cell.errors().items()]
    num_within = sum(is_within(*each) for each in errors)
    inside = [is_inside for cell in cells for is_inside in cell.inside()]
    lines = [
        *report.heading("What `quire simulate` predicts, and what `quire bench serve` measured", result),
        f"- {result['model']}; {' '.join(result['flags'])}.",
        f"- Rates are shares of saturation, for {result['seconds']:g} s each. Times in ms, rates per second.",
        f"- **{num_within} of {len(errors)} numbers are within 10 %, P99 within 20 %.**",
        f"- {sum(inside)} of {len(inside)} rates, medians and P99 lie in the interval of the simulation, whose ends "
        "are those with all steps at the same end of theirs.",
        "- A cell has the measured value, and then the error of the simulation.",
        "",
        *report.table_head("workload | rate | " + " | ".join(cells[0].served)),
    ]
    for cell in cells:
        off = cell.errors()
        values = [f"{real:.4g} {off[name]:+.0%}" for name, real in cell.served.items()]
        lines.append(f"| {cell.workload} | {cell.factor:g} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder, hub id or GGUF file; none: the demo model")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each run")
    parser.add_argument(
        "--workloads", nargs="+", default=list(WORKLOADS), help="as --workload of quire simulate, or shared"
    )
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="shares of saturation")
    parser.add_argument("--quantization", help="of the weights, as in quire serve")
    parser.add_argument("--load-format", help="as in quire serve: dummy for random weights")
    arguments = parser.parse_args()
    environment = report.environment("python", "benchmarks/simulate.py")
    settings: dict[str, Any] = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_queued_reqs": MAX_QUEUED,
        "max_model_len": 2048,
        "num_gpu_blocks_override": CONTEXTS * 2048 // 16,
        "block_size": 16,
        "num_threads": max(devices.num_cores() - 1, 1),
        "device": "cpu",
    }
    settings |= {
        name: value for name in ("quantization", "load_format") if (value := getattr(arguments, name)) is not None
    }
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "quire", "serve", *([arguments.model] if arguments.model else []), *flags]
    server = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        bench = Bench(EngineConfig(model=arguments.model, sources=dict.fromkeys(settings, "flag"), **settings), port)
        bench.wait_for_calibration()
        bench.teach()
        cells = [cell for name in arguments.workloads for cell in bench.cells(name, arguments.rates, arguments.seconds)]
        bench.close()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    result = {
        **environment,
        "model": Path(arguments.model).name if arguments.model else "The bundled demo model",
        "flags": flags,
        "seconds": arguments.seconds,
        "cells": [
            {
                "workload": cell.workload,
                "rate": cell.factor,
                "served": cell.served,
                "simulated": cell.simulated,
                "intervals": cell.intervals,
            }
            for cell in cells
        ],
    }
    some = arguments.workloads if arguments.workloads != list(WORKLOADS) else []
    what = "_".join(["simulate", *(re.sub(r"\W", "-", name) for name in some)])
    report.publish(__file__, arguments.save, what, result, markdown(result, cells))


if __name__ == "__main__":
    main()
