"""The goodput of a start's settings against the best of all settings, on six workloads.

Goodput is the highest rate of requests at which 95 % of them keep both times: the first token comes within ten times
the time of the mean prompt alone, and the further ones, on average, within ten times their time alone. Requests arrive
at random (Poisson), in the workload `bursts` in bursts. The real scheduler runs on a virtual clock (quire.simulate):
the same requests at the same times under all settings. `best` is the best of max_num_seqs x max_num_batched_tokens x
max_shared_prefill_tokens.

    python benchmarks/defaults.py [--constants FILE] [--formats none int4] [--workloads chat ...] [--seed N] [--record]
        [--save HARDWARE]
    python benchmarks/defaults.py --real MODEL [--formats none int4] [--workloads chat ...] [--save HARDWARE]

--constants: the constants of a model on a machine; the default is tests/planning/constants_0.6b.json. --seed: of
the lengths and times of the requests. --record writes the best settings into that file:
tests/planning/test_step_sizes.py compares with them.

--real serves MODEL on this machine. The server's own calibration, corrected by a few requests, gives the constants,
and the simulated sweep gives the best settings. Then fewer requests are really sent, with the settings of a start, with
vLLM's, and with the best ones, in turns, at two rates around the simulated goodput. The result is the number of good
requests per second, at the rate at which it is greater. The server gets the numbers of a start as if they were given,
so there they hold in every step. --save writes benchmarks/results/HARDWARE/defaults_DATE.md and
.json, or defaults_real_DATE.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import uvloop

from quire import extension
from quire.config import EngineConfig
from quire.cost.calibrate import Fit
from quire.cost.step_time import Constants
from quire.entry.launch import find_model
from quire.measure import report
from quire.measure.arrivals import arrival_times
from quire.measure.kept_costs import wait_for_costs
from quire.measure.load import Outcome
from quire.measure.options import Target, Traffic, Workload
from quire.measure.serving import find_server, one_round
from quire.measure.statistics import tpot
from quire.measure.workload import BenchRequest, named_workload, request_lengths
from quire.model_config import ModelConfig, load_model_config
from quire.planning import devices
from quire.planning.step_costs import KnownCost, known_cost, step_arithmetic
from quire.resolve import DeviceFacts
from quire.settings import Planned
from quire.simulate.executor import UntaughtCost
from quire.simulate.load import Prompt
from quire.simulate.run import client_of, plan_engine

Settings = Mapping[str, int]

# A workload, the shape of the gamma distribution of the gaps between its requests, and the number of its requests. They
# are enough to keep the server at its limit for several times as long as one of them then takes.
WORKLOADS = {
    "chat": ("chat", 1.0, 100),
    "rag": ("rag", 1.0, 60),
    "code": ("code", 1.0, 100),
    "short": ("random:128/256", 1.0, 400),
    "long": ("random:8000/100", 1.0, 40),
    "bursts": ("chat", 0.4, 150),
}
FORMATS = ("none", "int4")
LIMIT_NAMES = ("max_num_seqs", "max_num_batched_tokens", "max_shared_prefill_tokens")
SWEEP = ((32, 64, 128), (256, 2048), (0, 16, 32, 48, 64, 96, 128, 256))
VLLM = dict(zip(LIMIT_NAMES, (128, 2048, 0), strict=True))
TIMES_ALONE = 10.0  # a good request takes at most this many times as long as one alone
GOOD_SHARE = 0.95
SEED = 7
SERVED_RATES, SERVED_SHARE = (0.9, 1.1), 0.6  # shares of the simulated goodput, and of a workload's requests
CALIBRATION_SECONDS = 60
# Requests before all others: their steps correct the costs of a start. The server keeps corrections after 256 steps.
TEACHING, NUM_TEACHING, TEACHING_CONCURRENCY = "chat", 12, 6
FIRST_ID = 1000  # the first id of the tokens that mark a prompt
RATE_STEP = 1.02  # a goodput is known up to this factor
RECORDED = Path(__file__).parents[1] / "tests" / "planning" / "constants_0.6b.json"


@dataclass(frozen=True)
class Machine:
    """A model on a machine, with the costs of its steps."""

    model: ModelConfig
    device: DeviceFacts
    fits: Mapping[str, Fit]  # by format

    @classmethod
    def read(cls, file: Path) -> Machine:
        """The machine of a recording."""
        found = json.loads(file.read_text())
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "config.json").write_text(json.dumps(found["config"]))
            model = load_model_config(Path(place))
        fits = {name: Fit(Constants(**each), 0.1) for name, each in found["constants"].items()}
        return cls(model, DeviceFacts("cpu", **found["device"]), fits)

    def settled(self, form: str, settings: Settings) -> Planned:
        """The settled values of a server with only these settings."""
        given: dict[str, Any] = dict(settings)
        if form != "none":
            given["quantization"] = form
        return plan_engine(EngineConfig(sources=dict.fromkeys(given, "flag"), **given), self.model, self.device)


class Case:
    """A workload for a model in one format: the same requests under all settings.

    Args:
        share: the share of the workload's requests that are sent.
        seed: of the lengths and times of the requests.
    """

    def __init__(self, machine: Machine, form: str, workload: str, share: float = 1.0, seed: int = SEED) -> None:
        name, burstiness, num_requests = WORKLOADS[workload]
        num_requests = round(share * num_requests)
        options = replace(named_workload(name), num_prompts=num_requests, random_range_ratio="0.5", seed=seed)
        lengths = request_lengths(options, _no_tokenizer)
        self._machine, self._form, self.burstiness, self._seed = machine, form, burstiness, seed
        # No two prompts begin alike: the prefix cache finds nothing.
        self.prompts = [
            Prompt([FIRST_ID + index] + [FIRST_ID] * (num_in - 1), num_out)
            for index, (num_in, num_out) in enumerate(lengths)
        ]
        mean_in, mean_out = (sum(each) // len(lengths) for each in zip(*lengths, strict=True))
        arithmetic = step_arithmetic(machine.settled(form, {}), machine.model)
        self._cost = UntaughtCost(arithmetic, machine.fits[form])
        first, further = self._seconds([0], [mean_in]), self._seconds([mean_in + mean_out // 2], [1])
        self.ttft, self.tpot = TIMES_ALONE * first, TIMES_ALONE * further
        self._near = 0.5 / (first + mean_out * further / 8)

    def _seconds(self, starts: Sequence[int], counts: Sequence[int]) -> float:
        return self._cost.predict(self._cost.arithmetic.load(starts, counts, 1)).seconds

    def settings(self, limits: Settings) -> Settings:
        """The settings that a start chooses if these limits are given."""
        scheduler = self._machine.settled(self._form, limits).scheduler
        return {name: getattr(scheduler, name) for name in LIMIT_NAMES}

    def is_good(self, outcome: Outcome) -> bool:
        return outcome.success and outcome.ttft <= self.ttft and tpot(outcome) <= self.tpot

    def share_good(self, settings: Settings, rate: float) -> float:
        """The share of good requests at a rate."""
        client = client_of(self._machine.settled(self._form, settings), self._machine.model, self._cost)
        requests = [BenchRequest("", len(each.token_ids), each.output_len) for each in self.prompts]
        times = arrival_times(Traffic(request_rate=rate, burstiness=self.burstiness), requests, self._seed)
        return self.share_of(client.run(self.prompts, times).outcomes)

    def share_of(self, outcomes: Sequence[Outcome]) -> float:
        """The share of good requests among the outcomes."""
        return sum(map(self.is_good, outcomes)) / len(outcomes)

    def goodput(self, settings: Settings, near: float | None = None) -> float:
        """The goodput in requests per second. `near`: the rate at which the search begins."""
        low = high = near or self._near
        while self.share_good(settings, low) < GOOD_SHARE:
            low, high = low / 1.5, low
            if low < self._near / 1000:
                return 0.0
        while low == high or self.share_good(settings, high) >= GOOD_SHARE:
            low, high = high, 1.25 * high
        while high / low > RATE_STEP:
            middle = (low * high) ** 0.5
            if self.share_good(settings, middle) >= GOOD_SHARE:
                low = middle
            else:
                high = middle
        return low

    def best(self, settings: Settings) -> tuple[Settings, float]:
        """The best settings of the sweep and their goodput, if they are better than these."""
        found, rate = settings, self.goodput(settings)
        for other in sweep():
            if self.share_good(other, rate * RATE_STEP) >= GOOD_SHARE:
                found, rate = other, self.goodput(other, rate * RATE_STEP)
        return found, rate


def _no_tokenizer() -> Any:
    raise AssertionError("lengths are drawn, not counted")


def sweep() -> Iterator[Settings]:
    """All settings that are legal."""
    for seqs, tokens, shared in itertools.product(*SWEEP):
        if seqs <= tokens and shared <= tokens:
            yield dict(zip(LIMIT_NAMES, (seqs, tokens, shared), strict=True))


def judge(case: Case) -> dict[str, Any]:
    """The goodput of a start, with vLLM's values, and of the best settings."""
    found = {"start": case.settings({}), "vLLM": VLLM}
    rates = {"start": case.goodput({}), "vLLM": case.goodput(VLLM)}
    found["best"], rates["best"] = case.best(VLLM)  # of numbers that are given, which hold in every step
    return {"settings": found, "goodput": rates, "limits": [case.ttft, case.tpot]}


class Served:
    """A server on this machine."""

    def __init__(self, model: str, form: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self._form, self._config = form, EngineConfig(model=model, quantization=None if form == "none" else form)
        largest = {name: max(values) for name, values in zip(LIMIT_NAMES, SWEEP, strict=True)}
        words = [word for name, value in largest.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        words += [] if form == "none" else ["--quantization", form]
        command = [sys.executable, "-m", "quire", "serve", model, "--port", self._url.rpartition(":")[2], *words]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        target = Target(base_url=self._url, temperature=0.0, ready_check_timeout_sec=600, ignore_eos=True)
        self._server = self._runner.run(find_server(target))
        self._num_rounds = 0

    def machine(self) -> Machine:
        """This machine. Waits without load until the server has measured its steps; raises TimeoutError if it does not.

        Then requests correct what was measured: steps of a server that answers take longer.
        """
        model = find_model(self._config, None, weights=False)[2]
        device = devices.detect(extension.chosen_isa(), "none was looked for")
        resolved = plan_engine(self._config, model, device)

        def read() -> KnownCost:
            return known_cost(resolved, model, device)

        measured = wait_for_costs(read, CALIBRATION_SECONDS)
        workload = replace(named_workload(TEACHING), num_prompts=NUM_TEACHING)
        load = self._server.prepare(workload, Traffic(max_concurrency=TEACHING_CONCURRENCY))
        self._runner.run(one_round(self._server, load, load.requests(SEED), SEED, lambda: None))
        return Machine(model, device, {self._form: wait_for_costs(read, CALIBRATION_SECONDS, other_than=measured)})

    def goodput(self, case: Case, settings: Settings, rate: float) -> float:
        """The good requests per second of a case with these limits, at a rate."""
        self._num_rounds += 1
        httpx.post(f"{self._url}/v1/config", json=dict(settings)).raise_for_status()
        load = self._server.prepare(Workload(), Traffic(request_rate=rate, burstiness=case.burstiness))
        requests = [
            BenchRequest([FIRST_ID + self._num_rounds, *each.token_ids], len(each.token_ids) + 1, each.output_len)
            for each in case.prompts
        ]
        run = self._runner.run(one_round(self._server, load, requests, SEED, lambda: None))
        return case.share_of(run.outcomes) * len(run.outcomes) / run.duration

    def close(self) -> None:
        self._runner.close()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


def served(model: str, form: str, names: Sequence[str]) -> dict[str, Any]:
    """For each workload, the good requests per second under each of the settings, at each of the rates."""
    server, found = Served(model, form), {}
    try:
        machine = server.machine()
        for name in names:
            case = Case(machine, form, name, SERVED_SHARE)
            judged = judge(case)
            rates = [factor * judged["goodput"]["best"] for factor in SERVED_RATES]
            good: dict[str, list[float]] = {each: [] for each in judged["settings"]}
            for rate in rates:
                at_rate: dict[tuple[int, ...], float] = {}  # equal settings are sent once
                for each, settings in judged["settings"].items():
                    sizes = tuple(settings[limit] for limit in LIMIT_NAMES)
                    if sizes not in at_rate:
                        at_rate[sizes] = server.goodput(case, settings, rate)
                    good[each].append(at_rate[sizes])
            found[name] = judged | {"simulated": judged["goodput"], "rates": rates, "good": good}
            found[name]["goodput"] = {each: max(rates) for each, rates in good.items()}
            print(f"{form} {name}: {good}", flush=True)
    finally:
        server.close()
    return found


def markdown(result: dict[str, Any]) -> str:
    """The result file for people."""
    lines = [
        *report.heading("The settings of a start against the best of all", result),
        f"- {result['constants']}.",
        "- Settings are max_num_seqs / max_num_batched_tokens / max_shared_prefill_tokens.",
        "- Simulated. Goodput in requests/s, and as a share of the best."
        if result["real"] is None
        else f"- Served: {result['real']}. Good requests/s, and as a share of those with the best settings of a "
        f"simulated sweep. Of two rates, {' and '.join(map(str, SERVED_RATES))} of the simulated goodput, the better "
        "one counts. Last: the simulated goodput of the three, in requests/s.",
        "",
        *report.table_head(
            "weights | workload | start | goodput | vLLM | goodput | best | goodput"
            + (" | simulated" if result["real"] else "")
        ),
    ]
    for form, workloads in result["found"].items():
        for name, found in workloads.items():
            cells = []
            for each, settings in found["settings"].items():
                cells.append("/".join(str(settings[limit]) for limit in LIMIT_NAMES))
                share = found["goodput"][each] / (found["goodput"]["best"] or 1.0)
                cells.append(f"{found['goodput'][each]:.3g} ({share:.2f})")
            if "simulated" in found:
                cells.append(", ".join(f"{rate:.3g}" for rate in found["simulated"].values()))
            lines.append(f"| {form} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("--constants", type=Path, default=RECORDED, metavar="FILE")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=tuple(WORKLOADS))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--record", action="store_true", help="write the best settings into the file of constants")
    parser.add_argument("--real", metavar="MODEL", help="serve it")
    arguments = parser.parse_args()
    recording = json.loads(arguments.constants.read_text())
    found: dict[str, Any] = {}
    for form in arguments.formats:
        if arguments.real:
            found[form] = served(arguments.real, form, arguments.workloads)
            continue
        machine, found[form] = Machine.read(arguments.constants), {}
        for name in arguments.workloads:
            found[form][name] = judged = judge(Case(machine, form, name, seed=arguments.seed))
            rates = judged["goodput"]
            print(f"{form} {name}: {', '.join(f'{each} {rate:.3g}' for each, rate in rates.items())}", flush=True)
            print(json.dumps(judged["settings"]), flush=True)
            best = {"settings": judged["settings"]["best"], "goodput": rates["best"]}
            of_seed = recording.setdefault("best", {}).setdefault(str(arguments.seed), {})
            of_seed.setdefault(form, {})[name] = best
    result = {
        **report.environment("python", "benchmarks/defaults.py"),
        "constants": "Constants of the server's calibration" if arguments.real else recording["note"],
        "real": Path(arguments.real).name if arguments.real else None,
        "found": found,
    }
    what = "defaults_real" if arguments.real else "defaults"
    report.publish(__file__, arguments.save, what, result, markdown(result))
    if arguments.record:
        arguments.constants.write_text(json.dumps(recording, indent=1) + "\n")


if __name__ == "__main__":
    main()
