"""Steps of an engine whose lanes share experts: one busy lane, and lanes that are all busy.

One engine has all lanes. A round is a number of decode steps of each load, which take turns. Loads: rows on one lane
alone, as many rows on every lane, and all these rows on one lane.

    python benchmarks/lanes.py MODEL [--lanes 4] [--width 1] [--rows 8] [--context 64] [--rounds 5] [--steps 20]
                               [--dtype bfloat16] [--quantization int4] [--save HARDWARE]

MODEL: a folder with a config.json; weights are random. --save writes benchmarks/results/HARDWARE/lanes_DATE.md and
.json.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.start import start_engine
from quire.measure import report
from quire.messages import AddRequest
from quire.sampling_params import SamplingParams


def step_seconds(core: EngineCore, rows: list[int], context: int, steps: int, name: str) -> float:
    """The median time of a decode step with these rows in each lane."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True, skip_reading_prefix_cache=True)
    for lane, count in enumerate(rows):
        for row in range(count):
            prompt = [(7 * row + 3 * position + lane) % 1000 for position in range(context)]
            core.add(AddRequest(f"{name}-{lane}-{row}", prompt, params, steps + 8, lane=lane))
    seconds = []
    while core.has_work():
        core.step()
        record = core.last_record
        if record is not None and record.num_decode_tokens == sum(rows) and not record.num_prefill_tokens:
            seconds.append(record.step_seconds)
    return statistics.median(seconds[2:])  # the first ones are recorded


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model", type=Path)
    for flag, default in (("lanes", 4), ("width", 1), ("rows", 8), ("context", 64), ("rounds", 5), ("steps", 20)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    args = parser.parse_args()
    environment = report.environment("python", "benchmarks/lanes.py")
    config = EngineConfig(
        device="cpu",
        data_parallel_size=args.lanes,
        tensor_parallel_size=args.width,
        enable_expert_parallel=True,
        load_format="dummy",
        dtype=args.dtype,
        quantization=args.quantization,
        num_threads=1,
        max_model_len=args.context + args.steps + 16,
        max_num_seqs=args.lanes * args.rows,
        max_num_batched_tokens=max(512, args.lanes * args.rows),
        num_gpu_blocks_override=args.lanes * args.rows * ((args.context + args.steps) // 16 + 3),
    )
    engine = start_engine(config, args.model, is_server=False, progress=lambda phase, share, detail: None)
    idle = [0] * (args.lanes - 1)
    loads = {
        "one lane": [args.rows, *idle],
        "every lane": [args.rows] * args.lanes,
        "all rows on one lane": [args.rows * args.lanes, *idle],
    }
    found: dict[str, list[float]] = {name: [] for name in loads}
    try:
        for turn in range(args.rounds):
            for name, rows in loads.items():
                found[name].append(step_seconds(engine.core, rows, args.context, args.steps, f"{turn} {name}"))
    finally:
        engine.core.shutdown()
    result = {**environment, "model": json.loads((args.model / "config.json").read_text()), "seconds": found}
    lines = [
        *report.heading("One busy lane of several that share experts", result),
        f"- {args.lanes} lanes of {args.width} ranks with a thread each, {args.rows} rows of {args.context} tokens on",
        f"  a busy lane, {args.quantization or args.dtype}. Medians of {args.rounds} rounds in turns.",
        "",
        *report.table_head("load | ms | over every lane"),
    ]
    for name, seconds in found.items():
        ratios = [own / even for own, even in zip(seconds, found["every lane"], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(
            f"| {name} | {1e3 * statistics.median(seconds):.2f} | {statistics.median(ratios):.2f} ({spread}) |"
        )
    text = "\n".join(lines) + "\n"
    report.publish(__file__, args.save, "lanes", result, text)


if __name__ == "__main__":
    main()
