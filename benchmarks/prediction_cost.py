"""What the cost model costs an engine: the time in which it counts rows, predicts a step, and corrects itself.

    python benchmarks/prediction_cost.py [MODEL] [--rows 1 8 256] [--rounds 3] [--steps 30] [--quantization int4]
                                         [--save HARDWARE]

MODEL: a folder with weights of the measured shape; none: the bundled demo model.

An engine decodes that many requests at once. Between its calls of the cost model it computes steps, which drive
everything else out of the processor's caches: in a loop without steps the same calls take a fraction of the time. The
calibration is over, as in a server that was idle for ten seconds. `in caches` is the time in such a loop.

--save writes benchmarks/results/HARDWARE/prediction_cost_DATE.md and .json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from predict import MOST_MICROSECONDS, prediction_microseconds

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.start import start_engine
from quire.entry.launch import find_model
from quire.measure import report
from quire.messages import AddRequest
from quire.sampling_params import SamplingParams

PROMPT_TOKENS = 8


class Timed:
    """A function, with the microseconds of all its calls since they were last taken.

    The clock is read once before it counts, because a step has driven its code out of the caches too.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._nanoseconds: list[int] = []
        clock, note = time.perf_counter_ns, self._nanoseconds.append

        def timed(*arguments: Any) -> Any:
            clock()
            start = clock()
            answer = function(*arguments)
            note(clock() - start)
            return answer

        self.call = timed

    def take(self) -> float:
        taken = sum(self._nanoseconds) / 1e3
        self._nanoseconds.clear()
        return taken


def decode(core: EngineCore, name: str, num_rows: int, num_steps: int, parts: dict[str, Timed]) -> dict[str, float]:
    """The medians of decode steps: milliseconds of the step, and microseconds of the parts."""
    ids = [f"{name} {row}" for row in range(num_rows)]
    most = num_steps + 8
    for row, request_id in enumerate(ids):
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        core.add(AddRequest(request_id, [row + 10] * PROMPT_TOKENS, params, max_tokens=most))
    found: dict[str, list[float]] = {name: [] for name in ("step_ms", *parts, "all")}
    while len(found["all"]) < num_steps:
        core.step()
        taken = {part: timed.take() for part, timed in parts.items()}
        record = core.last_record
        if record is not None and record.num_prefill_tokens == 0 and record.num_decode_tokens == num_rows:
            numbers = {"step_ms": 1e3 * record.step_seconds, **taken, "all": sum(taken.values())}
            for each, number in numbers.items():
                found[each].append(number)
    core.abort(ids)
    while core.has_work():
        core.step()
    return {each: statistics.median(numbers) for each, numbers in found.items()}


def markdown(result: dict[str, Any]) -> str:
    lines = [
        *report.heading("What the cost model costs an engine", result),
        f"- Decodes, weights {result['quantization'] or 'as they are'}; {len(result['rounds'])} rounds of "
        f"{result['steps']} steps. Medians of steps, then of rounds (least, most).",
        f"- In the processor's caches, without steps: {result['in_caches']:.1f} us for 256 rows.",
        f"- At most {MOST_MICROSECONDS} us are wanted for a step of 256 rows.",
        "",
        "| rows | step, ms | counting and predicting, us | correcting, us | together, us |",
        "|---|---|---|---|---|",
    ]
    for num_rows in result["rounds"][0]:
        rounds = [each[num_rows] for each in result["rounds"]]
        step = statistics.median(each["step_ms"] for each in rounds)
        cells = " | ".join(_spread([each[part] for each in rounds]) for part in ("predict_rows", "observe", "all"))
        lines.append(f"| {num_rows} | {step:.1f} | {cells} |")
    return "\n".join(lines) + "\n"


def _spread(numbers: list[float]) -> str:
    return f"{statistics.median(numbers):.1f} ({min(numbers):.1f}, {max(numbers):.1f})"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--quantization")
    arguments = parser.parse_args()
    environment = report.environment("python", "benchmarks/prediction_cost.py")
    config = EngineConfig(
        model=arguments.model,
        quantization=arguments.quantization,
        max_model_len=512,
        max_num_seqs=max(arguments.rows),
        kv_cache_memory_bytes=4 << 30,
    )
    folder, _, _ = find_model(config, None, weights=True)
    started = start_engine(config, folder, is_server=False, progress=lambda phase, fraction, detail: None)
    core, cost, calibration = started.core, started.core.cost, started.calibration
    assert cost is not None
    while calibration is not None and calibration.step():
        pass
    parts = {name: Timed(getattr(cost, name)) for name in ("predict_rows", "observe")}
    for name, timed in parts.items():
        setattr(cost, name, timed.call)
    rounds = []
    for number in range(arguments.rounds + 1):
        found = {str(rows): decode(core, f"{number} {rows}", rows, arguments.steps, parts) for rows in arguments.rows}
        if number:  # the first round warms up
            rounds.append(found)
    result = {
        **environment,
        "quantization": arguments.quantization,
        "steps": arguments.steps,
        "in_caches": prediction_microseconds(cost),
        "rounds": rounds,
    }
    report.publish(__file__, arguments.save, "prediction_cost", result, markdown(result))


if __name__ == "__main__":
    main()
