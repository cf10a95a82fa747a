"""The cost of random sampling in an engine step, compared with greedy: decode steps of 32 requests, in turns.

Each round runs a batch of decode steps with each way of sampling, and steps of one round are compared with each other.
Random is temperature 0.8 and top-p 0.95. Random weights give flat logits, the hardest case: the nucleus is most of the
vocabulary. `random, peaked` divides the same logits by a temperature of 0.05, so that they spread like logits of a
trained model.

    python benchmarks/sampling_share.py [MODEL] [--rounds 10] [--steps 8] [--save HARDWARE]

MODEL: a folder with weights of the measured shape. --save writes
benchmarks/results/HARDWARE/sampling_share_DATE.md and .json, with the quantization in the name.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.start import start_engine
from quire.entry.launch import find_model
from quire.measure import report
from quire.messages import AddRequest
from quire.sampling_params import SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8, "top_p": 0.95},
    "random, peaked": {"temperature": 0.05, "top_p": 0.95},
}


def decode_steps(core: EngineCore, name: str, batch: int, steps: int) -> dict[str, float]:
    """The median milliseconds of a whole step, and of its sampling, with `batch` requests that decode."""
    ids = [f"{name} {row}" for row in range(batch)]
    for row, request_id in enumerate(ids):
        params = SamplingParams(max_tokens=steps + 2, seed=row, ignore_eos=True, **WAYS[name])
        core.add(AddRequest(request_id, [row + 10] * 8, params, max_tokens=steps + 2))
    whole, sampling = list[float](), list[float]()
    while len(whole) < steps:
        started = time.perf_counter()
        core.step()
        seconds = time.perf_counter() - started
        record = core.last_record
        assert record is not None
        if record.num_prefill_tokens == 0:
            assert record.num_decode_tokens == batch
            whole.append(1000 * seconds)
            sampling.append(1000 * record.sample_seconds)
    core.abort(ids)
    while core.has_work():
        core.step()
    return {"step_ms": statistics.median(whole), "sample_ms": statistics.median(sampling)}


def markdown(result: dict[str, Any]) -> str:
    lines = [
        *report.heading("The cost of random sampling in an engine step", result),
        f"- {result['batch']} requests that decode, vocabulary {result['vocab_size']:,}, weights "
        f"{result['quantization'] or 'as they are'}; {len(result['rounds'])} rounds",
        f"  of {result['steps']} steps, in turns. Medians of steps, then of the rounds' ratios (least, most).",
        "- Over greedy: the ratio of whole steps; and the time of sampling minus the time of greedy sampling, as a",
        "  share of a greedy step, which is free of the noise of the forward pass.",
        "- random: temperature 0.8, top-p 0.95, on the flat logits of random weights. peaked: temperature 0.05.",
        "",
        "| | step, ms | of it sampling, ms | over greedy, steps | over greedy, sampling alone |",
        "|---|---|---|---|---|",
    ]
    for way in WAYS:
        rounds = [each[way] for each in result["rounds"]]
        steps = [each[way]["step_ms"] / each["greedy"]["step_ms"] - 1 for each in result["rounds"]]
        alone = [
            (each[way]["sample_ms"] - each["greedy"]["sample_ms"]) / each["greedy"]["step_ms"]
            for each in result["rounds"]
        ]
        over = "|" if way == "greedy" else f"{_spread(steps)} | {_spread(alone)}"
        step, sample = (statistics.median(each[key] for each in rounds) for key in ("step_ms", "sample_ms"))
        lines.append(f"| {way} | {step:.2f} | {sample:.2f} | {over} |")
    return "\n".join(lines) + "\n"


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):+.1%} ({min(ratios):+.1%}, {max(ratios):+.1%})"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model", nargs="?", help="none: the bundled demo model, whose vocabulary is small")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quantization")
    arguments = parser.parse_args()
    environment = report.environment("python", "benchmarks/sampling_share.py")
    config = EngineConfig(
        model=arguments.model,
        quantization=arguments.quantization,
        max_model_len=512,
        max_num_seqs=arguments.batch,
        kv_cache_memory_bytes=1 << 30,
    )
    folder, _, model_config = find_model(config, None, weights=True)
    core = start_engine(config, folder, is_server=False, progress=lambda phase, fraction, detail: None).core
    rounds = []
    for number in range(arguments.rounds + 1):
        ways = list(WAYS) if number % 2 else list(reversed(WAYS))
        found = {way: decode_steps(core, way, arguments.batch, arguments.steps) for way in ways}
        if number:  # the first round warms up
            rounds.append(found)
    result = {
        **environment,
        "quantization": arguments.quantization,
        "batch": arguments.batch,
        "steps": arguments.steps,
        "vocab_size": model_config.vocab_size,
        "rounds": rounds,
    }
    what = "sampling_share" + (f"_{arguments.quantization}" if arguments.quantization else "")
    report.publish(__file__, arguments.save, what, result, markdown(result))


if __name__ == "__main__":
    main()
