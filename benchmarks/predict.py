"""Errors of the engine's predictions: times of steps and requests that were not in the calibration, and memory.

    python benchmarks/predict.py [MODEL...] [--formats none int8 int4 fp8] [--loads 'decode 8' mixed ...] [--rounds 3]
                                 [--save HARDWARE] [--record FOLDER]
    python benchmarks/predict.py --rescore FILE...

MODEL: a folder with a config.json, or the name of a shape below; the default is every shape. A model without weights
gets random ones.

Every round starts an engine for each model and format, calibrates it from nothing, and measures eight loads, or those
of --loads: single steps, and short runs of real requests. The rounds take turns over models and formats, so that the
noise of the machine shows: `noise` compares the same step in one round and the next. Predictions of steps use only the
calibration. Predictions of requests come from the engine after it has answered the same load once, so running steps
have corrected the model. Then each load is run once, and loads with few prompt tokens several times; each comes after a
pause of the engine. A cell is a load of one model in one format. Nine of ten values should lie in their intervals:
those of single steps in intervals of the calibration, and those of running steps in intervals that the engine had for
them. The ends of the interval of a time to first token, of a time between tokens and of a throughput are those with all
of its steps at the same end of theirs.

--save writes benchmarks/results/HARDWARE/predict_DATE.md and .json; the name has the model if there is one, and the
formats and the loads if there are some. --record writes the steps into FOLDER/MODEL.json, for
tests/cost/test_recorded.py. --rescore predicts recorded steps again without measuring, and writes the errors into their
files. Use it after a change of the cost model that made errors smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from quire.cost.arithmetic import StepArithmetic
from quire.cost.calibrate import Fit, MeasuredStep, Rows, fit
from quire.cost.model import CostModel
from quire.cost.step_time import MIN_SPREAD, prior, step_seconds
from quire.measure import report
from quire.model_config import load_model_config

FORMATS = ("none", "int8", "int4", "fp8")
MOST_MEDIAN, MOST_P90 = 0.10, 0.25  # the limits for the errors of a cell
MOST_KV_ERROR, MOST_MEMORY_ERROR = 0.01, 0.05
STEP_REPEATS = 3  # the runs of a step in a round, after one run that is not counted
OUTPUT_TOKENS = 16
REPEATED_TOKENS, RUNS = 1000, 3  # a load with no more prompt tokens is run so often, so no single request decides
PAUSE_SECONDS = 0.3  # the pause before each run
MOST_ROWS, PREDICTIONS = 256, 400  # the largest step of vLLM's defaults on GPUs, and how often it is predicted
MOST_MICROSECONDS = 20  # the limit for the time of its prediction
LATE_AFTER = 5  # the prompt of a mixed step comes after this number of tokens of the other requests
MAX_MODEL_LEN = 2048


_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
# By name: a model, the matrices of a wider one with fewer heads of keys, and a model with experts.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3,
    "llama-wide-6": {
        **_QWEN3,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32_000,
        "tie_word_embeddings": False,
    },
    "experts-32x4": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 32_000,
    },
}


class Work(NamedTuple):
    """A load: one step, and requests that make such steps, by the lengths of their prompts and of a later prompt."""

    rows: Rows
    prompts: tuple[int, ...]
    late_prompt: int = 0

    @property
    def num_runs(self) -> int:
        """The number of times that its requests are measured."""
        return RUNS if sum(self.prompts) + self.late_prompt <= REPEATED_TOKENS else 1


LOADS = {
    "decode 1": Work([(64, 1)], (64,)),
    "decode 8": Work([(64, 1)] * 8, (64,) * 8),
    "decode 32": Work([(64, 1)] * 32, (64,) * 32),
    "decode 4 at 1,000": Work([(1000, 1)] * 4, (1000,) * 4),
    "decode 16 at 1,000": Work([(1000, 1)] * 16, (1000,) * 16),
    "prompt of 100": Work([(0, 100)], (100,)),
    "prompt of 700": Work([(0, 700)], (700,)),
    "mixed": Work([(200, 1)] * 8 + [(0, 256)], (200,) * 8, 256),
}
QUANTITIES = ("step", "ttft", "itl", "throughput")
RUNNING = "running"  # running steps: whether each one's time lies in its interval


class Passed(NamedTuple):
    """Seconds since a moment: measured, and as predicted by the steps meanwhile, with both ends of their intervals."""

    predicted: float = 0.0
    measured: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def since(self, earlier: Passed) -> Passed:
        """The seconds since an earlier moment."""
        return Passed(*(now - before for now, before in zip(self, earlier, strict=True)))

    def rate(self, count: int) -> Passed:
        """The things per second, if `count` come in this time."""
        return Passed(count / self.predicted, count / self.measured, count / self.high, count / self.low)


def is_inside(value: Sequence[float]) -> bool:
    """Whether a measured value, from `Passed`, lies in the interval of its prediction."""
    _, measured, low, high = value
    return low <= measured <= high


def measure(model: Path, quantization: str | None, names: Sequence[str]) -> dict[str, Any]:
    """One round of a model in one format, in this process: the calibration, steps, requests and memory.

    Args:
        names: the loads.
    """
    from quire.config import EngineConfig
    from quire.engine.start import start_engine
    from quire.planning.memory_plan import plan_kv_cache, predict_memory
    from quire.planning.step_costs import ceilings
    from quire.resolve import resolve
    from quire.worker.worker import DeviceWorker

    loads = {name: LOADS[name] for name in names}
    load_format = "auto" if any(model.glob("*.safetensors")) else "dummy"
    config = EngineConfig(
        model=str(model), quantization=quantization, max_model_len=MAX_MODEL_LEN, load_format=load_format
    )
    model_config = load_model_config(model)
    worker = DeviceWorker(model_config, lambda *report: None)
    facts = worker.facts(wants_gpu=False)
    asked = resolve(config, model_config, facts, is_server=True)
    planned = plan_kv_cache(config, model_config, asked, predict_memory(asked, model_config, facts))
    engine = start_engine(
        config,
        model,
        is_server=True,
        progress=lambda *report: None,
        make_workers=lambda model_config, progress: (worker,),
    )
    core, resolved = engine.core, engine.resolved
    assert engine.calibration is not None
    assert core.cost is not None
    for work in loads.values():
        core.probe(work.rows)
    while engine.take_memory():  # of these pages
        pass
    while engine.calibrate():
        pass
    reached = ceilings(resolved, core.cost.arithmetic, facts)
    held_out = []
    for work in loads.values():
        probed = [core.probe(work.rows) for _ in range(1 + STEP_REPEATS)]
        held_out.append([packed(work.rows), [each[1] for each in probed[1:] if each is not None]])
    draw = random.Random(os.getpid())

    requests: dict[str, dict[str, list[Any]]] = {
        name: {each: [] for each in (*QUANTITIES[1:], RUNNING)} for name in loads
    }
    for turn in range(1 + RUNS):  # the first one corrects the predictions
        for name, work in loads.items():
            if turn > work.num_runs:
                continue
            while engine.take_memory():  # as a server does that waits for a request
                pass
            time.sleep(PAUSE_SECONDS)
            for quantity, pairs in run(core, work, draw, model_config.vocab_size).items():
                requests[name][quantity] += pairs if turn else []
    return {
        "form": [
            resolved.model.dtype,
            resolved.model.quantization,
            resolved.model.kv_cache_dtype,
            resolved.device.isa,
        ],
        "ceilings": [reached.read_bandwidth, reached.flops],
        "calibration": [
            [packed(rows), step.seconds, *step.times]
            for rows, step in zip(engine.calibration.rows, engine.calibration.steps, strict=True)
        ],
        "held_out": held_out,
        "requests": requests,
        "microseconds": prediction_microseconds(core.cost),
        "memory": {
            "KV tokens": [
                planned.memory.num_blocks * planned.model.block_size,
                resolved.memory.num_blocks * resolved.model.block_size,
            ],
            "KV bytes": [planned.memory.kv_cache_bytes, worker.cache.num_bytes],
            "weights": [planned.memory.weight_bytes, worker.model.weight_bytes()],
            "work": [planned.memory.work_bytes, resolved.memory.work_bytes],
        },
    }


def run(
    core: Any, work: Work, draw: random.Random, vocab_size: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Run the requests of a load. Returns values of each quantity, and for each step whether its time lies in its
    interval.
    """
    from quire.messages import AddRequest
    from quire.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
    arrivals: dict[str, Passed] = {}

    def add(length: int) -> None:
        name = f"r{len(arrivals)}"
        core.add(AddRequest(name, draw.choices(range(10, vocab_size), k=length), params, max_tokens=OUTPUT_TOKENS))
        arrivals[name] = now._replace(measured=clock() - start)

    now, start = Passed(), clock()
    firsts: dict[str, Passed] = {}
    moments: list[Passed] = []  # of the first request's tokens
    inside: list[bool] = []
    num_tokens, late = 0, work.late_prompt
    for length in work.prompts:
        add(length)
    while core.has_work():
        deltas = core.step()
        now = now._replace(measured=clock() - start)
        if (record := core.last_record) is not None:
            now = Passed(
                now.predicted + record.predicted_seconds,
                now.measured,
                now.low + record.predicted_low_seconds,
                now.high + record.predicted_high_seconds,
            )
            if not record.has_captured:
                seconds = record.step_seconds - record.draft_seconds
                inside.append(record.predicted_low_seconds <= seconds <= record.predicted_high_seconds)
        for delta in (delta for delta in deltas if delta.token_ids):
            num_tokens += len(delta.token_ids)
            firsts.setdefault(delta.request_id, now.since(arrivals[delta.request_id]))
            if delta.request_id == "r0":
                moments.append(now)
        if late and len(moments) >= LATE_AFTER:
            add(late)
            late = 0
    return {
        "ttft": list(firsts.values()),
        "itl": [after.since(before) for before, after in pairwise(moments)],
        "throughput": [now.rate(num_tokens)],
        RUNNING: inside,
    }


def prediction_microseconds(cost: CostModel) -> float:
    """The median time of one step's part in the cost model: its load, its prediction, and its correction."""
    cost, times = CostModel(cost.arithmetic, cost.fit), []
    starts, counts = [1000 + row for row in range(MOST_ROWS)], [1] * MOST_ROWS
    for _ in range(PREDICTIONS):
        start = time.perf_counter()
        load, predicted = cost.predict_rows(starts, counts, MOST_ROWS)
        cost.observe(load, predicted.seconds, predicted.seconds)
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def packed(rows: Rows) -> list[list[int]]:
    """The rows as lists [start, count, number of equal rows that follow each other]."""
    found: list[list[int]] = []
    for row in rows:
        if found and found[-1][:2] == list(row):
            found[-1][2] += 1
        else:
            found.append([*row, 1])
    return found


def demand_of(arithmetic: StepArithmetic, rows: Iterable[Sequence[int]]) -> Any:
    """The demand of a batch from the result of `packed`. Each row has logits."""
    starts, counts = zip(*((start, count) for start, count, times in rows for _ in range(times)), strict=True)
    return arithmetic.demand(arithmetic.load(starts, counts, len(starts)))


class Replay:
    """Predictions of the present cost model for the recorded steps of a round."""

    def __init__(self, arithmetic: StepArithmetic, found: dict[str, Any]) -> None:
        self._arithmetic = arithmetic
        steps = [
            MeasuredStep(demand_of(arithmetic, rows), seconds, tuple(times))
            for rows, seconds, *times in found["calibration"]
        ]
        self.fit: Fit = fit(steps, prior(*found["ceilings"]))

    def seconds(self, rows: Iterable[Sequence[int]]) -> float:
        """The predicted seconds of rows from `packed`."""
        return step_seconds(demand_of(self._arithmetic, rows), self.fit.constants)

    def is_inside(self, rows: Iterable[Sequence[int]], seconds: float) -> bool:
        """Whether a measured time lies in the interval of the prediction."""
        ratio = 1 + max(self.fit.spread, MIN_SPREAD)
        return 1 / ratio <= seconds / self.seconds(rows) <= ratio


def step_errors(folder: Path, rounds: Sequence[dict[str, Any]]) -> list[float]:
    """The errors for steps that were not in the calibration, over all loads and rounds of a model in one format.

    Args:
        folder: the folder with the model's config.json.
    """
    arithmetic = StepArithmetic(load_model_config(folder), *rounds[0]["form"])
    errors = []
    for found in rounds:
        replay = Replay(arithmetic, found)
        errors += [
            abs(replay.seconds(rows) / statistics.median(seconds) - 1) for rows, seconds in found["held_out"] if seconds
        ]
    return errors


def median_error(folder: Path, rounds: Sequence[dict[str, Any]]) -> float:
    """The median of `step_errors`."""
    return statistics.median(step_errors(folder, rounds))


def config_folder(config: dict[str, Any], place: str) -> Path:
    """A folder that contains only the config.json of a recording."""
    folder = Path(place)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rescore(file: Path) -> None:
    """Write the errors of the present predictions into a recording."""
    recording = json.loads(file.read_text())
    with tempfile.TemporaryDirectory() as place:
        folder = config_folder(recording["config"], place)
        for name, form in recording["formats"].items():
            before, form["median_error"] = form["median_error"], round(median_error(folder, form["rounds"]), 4)
            print(f"{file.stem:<12} {name:<6} {before:7.1%} -> {form['median_error']:.1%}")
    write_recording(file, recording)


def write_recording(file: Path, recording: dict[str, Any]) -> None:
    """Write a recording as JSON, with a line for each round."""
    file.write_text(json.dumps(recording).replace('{"form": ', '\n{"form": ') + "\n")


def record(folder: Path, config: dict[str, Any], name: str, rounds: dict[str, list[dict[str, Any]]]) -> None:
    """Write the measured rounds of a model by format, with the errors of the predictions."""
    kept = ("form", "ceilings", "calibration", "held_out")
    forms: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for form, found in rounds.items():
            error = round(median_error(config_folder(config, place), found), 4)
            forms[form] = {"median_error": error, "rounds": [{key: each[key] for key in kept} for each in found]}
    machine = report.environment("python", "benchmarks/predict.py")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    write_recording(file, {"model": name, "machine": machine["machine"], "config": config, "formats": forms})
    print(f"recorded in {file}")


def errors_of(values: Iterable[Sequence[float]]) -> list[float]:
    """The relative errors of values that begin with the predicted and the measured one."""
    return [abs(predicted / measured - 1) for predicted, measured, *_ in values]


def summary(errors: Sequence[float]) -> dict[str, float]:
    """The median error and the 90th percentile."""
    return {
        "median": statistics.median(errors),
        "p90": statistics.quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0],
        "count": len(errors),
    }


def cells(folder: Path, rounds: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each load, the errors of each quantity, the noise of the machine, and the limits that are not kept."""
    arithmetic = StepArithmetic(load_model_config(folder), *rounds[0]["form"])
    replays = [Replay(arithmetic, found) for found in rounds]
    result: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(rounds[0]["requests"]):
        steps = [(replay, *found["held_out"][index]) for replay, found in zip(replays, rounds, strict=True)]
        pairs = [(replay.seconds(rows), seconds) for replay, rows, measured in steps for seconds in measured]
        if not pairs:
            continue  # its rows do not fit into the KV cache
        cell: dict[str, Any] = {"step": summary(errors_of(pairs))}
        inside = {"step": [replay.is_inside(rows, each) for replay, rows, measured in steps for each in measured]}
        for quantity in QUANTITIES[1:]:
            values = [value for found in rounds for value in found["requests"][name][quantity]]
            cell[quantity], inside[quantity] = summary(errors_of(values)), [is_inside(value) for value in values]
        inside[RUNNING] = [each for found in rounds for each in found["requests"][name][RUNNING]]
        cell["inside"] = {quantity: [sum(each), len(each)] for quantity, each in inside.items()}
        medians = [statistics.median(measured) for *_, measured in steps]
        cell["noise"] = statistics.median(errors_of(pairwise(medians))) if len(medians) > 1 else None
        cell["measured_ms"] = 1e3 * statistics.median(medians)
        cell["ratio"] = statistics.median(predicted / measured for predicted, measured in pairs)
        cell["exceeds"] = [
            f"{quantity} {what}"
            for quantity in QUANTITIES
            for what, limit in (("median", MOST_MEDIAN), ("p90", MOST_P90))
            if cell[quantity][what] > limit
        ]
        result[name] = cell
    return result


def memory_errors(rounds: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each term in the last round, the planned bytes before loading, the real bytes, and the error."""
    found = {}
    for name, (planned, real) in rounds[-1]["memory"].items():
        limit = MOST_KV_ERROR if name.startswith("KV") else MOST_MEMORY_ERROR
        error = abs(planned / real - 1) if real else 0.0
        found[name] = {"planned": planned, "real": real, "error": error, "exceeds": error > limit}
    return found


def markdown(result: dict[str, Any]) -> str:
    lines = [
        *report.heading("Predicted against measured", result),
        f"- Rounds: {result['rounds']}, which take turns over models and formats, with an engine and a calibration of "
        "their own.",
        "- Errors are |predicted / measured - 1|: median, then P90 over single steps, requests, tokens and runs. "
        f"**Bold**: above {MOST_MEDIAN:.0%} or {MOST_P90:.0%}.",
        "- Steps are predicted by the calibration alone. Requests are predicted by the engine after it has answered "
        f"the same load once. Then a load runs once, or {RUNS} times if its prompts have at most {REPEATED_TOKENS:,} "
        "tokens.",
        "- noise: the median of a round's measured steps against the next round's. ratio: predicted / measured.",
        "",
        *report.table_head("model | format | load | measured ms | ratio | step | TTFT | ITL | throughput | noise"),
    ]
    for model, formats in result["models"].items():
        for form, found in formats.items():
            for load, cell in found["cells"].items():
                shares = " | ".join(
                    ", ".join(
                        (
                            f"**{cell[quantity][what]:.1%}**"
                            if cell[quantity][what] > limit
                            else f"{cell[quantity][what]:.1%}"
                        )
                        for what, limit in (("median", MOST_MEDIAN), ("p90", MOST_P90))
                    )
                    for quantity in QUANTITIES
                )
                noise = "" if cell["noise"] is None else f"{cell['noise']:.1%}"
                measured = f"{cell['measured_ms']:.3g} | {cell['ratio']:.2f}"
                lines.append(f"| {model} | {form} | {load} | {measured} | {shares} | {noise} |")
    lines += ["", *report.table_head("model | format | memory | planned | real | error")]
    for model, formats in result["models"].items():
        for form, found in formats.items():
            for name, term in found["memory"].items():
                error = f"**{term['error']:.2%}**" if term["exceeds"] else f"{term['error']:.2%}"
                lines.append(f"| {model} | {form} | {name} | {term['planned']:,} | {term['real']:,} | {error} |")
    good, total = result["cells_within"], result["cells"]
    others = [
        each["others"]
        for formats in result["models"].values()
        for found in formats.values()
        for each in found["measured"]
    ]
    shares = ", ".join(f"{quantity} {count}" for quantity, count in result["within"].items())
    lines += [
        "",
        f"{good} of {total} cells are within both limits in every quantity; by quantity: {shares}.",
        "Inside the interval of their prediction (wanted: 90%): "
        + "; ".join(f"{what} {count} of {of}" for what, (count, of) in result["inside"].items())
        + ". The intervals of running steps, times and throughput are the engine's.",
        f"Other programs had {min(others):.2f} to {max(others):.2f} of a core meanwhile.",
        "",
        f"The cost model's part of a step of {MOST_ROWS} rows takes {result['microseconds']:.1f} microseconds (at most "
        f"{MOST_MICROSECONDS} are wanted): the median of {PREDICTIONS} in each engine, and of the engines.",
    ]
    return "\n".join(lines) + "\n"


def measured_apart(model: Path, form: str, loads: Sequence[str]) -> dict[str, Any]:
    """`measure` in its own process, which finds no calibration."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, str(model), "--formats", form, "--loads", *loads, "--here"],
            env=os.environ | {"QUIRE_CACHE_DIR": cache},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"folders, or of {', '.join(SHAPES)}: the default")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    parser.add_argument("--rescore", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rescore:
        for file in given.rescore:
            rescore(file)
        return
    if given.here:
        (model,), (form,) = given.models, given.formats
        print(json.dumps(measure(Path(model), None if form == "none" else form, given.loads)))
        return
    with tempfile.TemporaryDirectory() as place:
        measure_all(given, [model_folder(name, Path(place)) for name in given.models or SHAPES])


def model_folder(name: str, place: Path) -> Path:
    """The folder of a model. For a shape, a folder is made in `place`."""
    if name not in SHAPES:
        return Path(name)
    (place / name).mkdir()
    return config_folder(SHAPES[name], str(place / name))


def measure_all(given: argparse.Namespace, folders: Sequence[Path]) -> None:
    """Run all rounds, and write their results."""
    rounds: dict[Path, dict[str, list[dict[str, Any]]]] = {
        folder: {form: [] for form in given.formats} for folder in folders
    }
    for number in range(given.rounds):
        for model, formats in rounds.items():
            for form, found in formats.items():
                start, others = time.monotonic(), report.others_seconds()
                found.append(measured_apart(model, form, given.loads))
                seconds = time.monotonic() - start
                found[-1]["others"] = share = (report.others_seconds() - others) / seconds
                where = f"round {number + 1}: {model.name} {form}"
                print(f"{where}, {seconds:.0f} s, others had {share:.2f} of a core", file=sys.stderr)
    models: dict[str, dict[str, Any]] = {
        model.name: {
            form: {"cells": cells(model, found), "memory": memory_errors(found), "measured": found}
            for form, found in formats.items()
        }
        for model, formats in rounds.items()
    }
    costs = [each["microseconds"] for formats in rounds.values() for found in formats.values() for each in found]
    every = [cell for formats in models.values() for form in formats.values() for cell in form["cells"].values()]
    result = {
        **report.environment("python", "benchmarks/predict.py"),
        "rounds": given.rounds,
        "cells": len(every),
        "cells_within": sum(not cell["exceeds"] for cell in every),
        "within": {
            quantity: sum(not any(each.startswith(quantity) for each in cell["exceeds"]) for cell in every)
            for quantity in QUANTITIES
        },
        "inside": {
            quantity: [sum(cell["inside"][quantity][at] for cell in every) for at in (0, 1)]
            for quantity in (*QUANTITIES, RUNNING)
        },
        "microseconds": statistics.median(costs),
        "models": models,
    }
    some = [*(models if len(models) == 1 else []), *(given.formats if len(given.formats) < len(FORMATS) else [])]
    loads = given.loads if len(given.loads) < len(LOADS) else []
    what = "_".join(["predict", *some, *(re.sub(r"\W+", "-", load) for load in loads)])
    report.publish(__file__, given.save, what, result, markdown(result))
    if given.record:
        for model, formats in rounds.items():
            config = json.loads((model / "config.json").read_text())
            record(given.record, config, model.name, formats)


if __name__ == "__main__":
    main()
