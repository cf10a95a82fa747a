"""The cost of verifying drafts: a step with several tokens of each request, divided by a step with one of each.

The rows of a step are consecutive tokens of one request, and all need logits. Every round takes turns over formats and
numbers of rows. A time covers the whole step, from the batch to the accepted tokens.

    python benchmarks/verify_rows.py [MODEL] [--formats none int8 int4] [--requests 1 8] [--tokens 1 2 3 5 8]
                                     [--context 64] [--rounds 7] [--steps 8] [--save HARDWARE]

MODEL: a folder with weights of the measured shape; the default is the bundled demo model. --save writes
benchmarks/results/HARDWARE/verify_rows_DATE.md and .json.
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

WANTED = {"none": 1.10, "int4": 1.25}  # a step with 5 tokens of one request, over a step with one token
PARTS = ("step", "forward", "sample", "prepare")


def verify_step(core: EngineCore, requests: int, tokens: int, context: int) -> dict[str, float]:
    """Milliseconds of a step that verifies `tokens` - 1 drafts of each request, and milliseconds of its parts."""
    batch = core.scheduler.probe([(context, tokens)] * requests)
    assert batch is not None, "the KV cache is too small"
    for row in batch.new_rows:
        row.token_ids = row.token_ids[: context + 1]
    batch.num_logits = [tokens] * requests
    batch.draft_token_ids = [[1] * (tokens - 1)] * requests
    started = time.perf_counter()
    result = core.executor.submit(batch).result()
    seconds = time.perf_counter() - started
    found = (seconds, result.forward_seconds, result.sample_seconds, result.prepare_seconds)
    return dict(zip(PARTS, (1e3 * part for part in found), strict=True))


def median_step(core: EngineCore, requests: int, tokens: int, context: int, steps: int) -> dict[str, float]:
    """The median of `steps` steps; one step before them is not counted."""
    found = [verify_step(core, requests, tokens, context) for _ in range(1 + steps)][1:]
    return {part: statistics.median(each[part] for each in found) for part in PARTS}


def markdown(result: dict[str, Any]) -> str:
    lines = [
        *report.heading("The cost of verifying drafts", result),
        f"- Model: {result['model']}. {result['context']} tokens of context, greedy. {result['rounds']} rounds of "
        f"{result['steps']} steps, in turns. Values are medians of steps, of rounds, and of the rounds' "
        "ratios (least, most).",
        f"- The goals for 5 tokens of one request are {WANTED['none']:g} with unquantized weights and "
        f"{WANTED['int4']:g} with int4.",
        "",
        *report.table_head("weights | requests | tokens of each | step, ms | sampling, ms | over one token"),
    ]
    for form, found in result["formats"].items():
        for name, rounds in found.items():
            requests, tokens = name.split("x")
            ones = found[f"{requests}x1"]
            ratios = [each["step"] / one["step"] for each, one in zip(rounds, ones, strict=True)]
            step, sample = (statistics.median(each[part] for each in rounds) for part in ("step", "sample"))
            lines.append(
                f"| {form} | {requests} | {tokens} | {step:.2f} | {sample:.2f} | "
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f}) |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--formats", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 5, 8])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    if 1 not in arguments.tokens:
        parser.error("--tokens needs 1: the other steps are compared with it")
    environment = report.environment("python", "benchmarks/verify_rows.py")
    cores: dict[str, EngineCore] = {}
    for form in arguments.formats:
        config = EngineConfig(
            model=arguments.model,
            quantization=None if form == "none" else form,
            max_model_len=2048,
            max_num_seqs=max(arguments.requests),
            kv_cache_memory_bytes=512 << 20,
        )
        folder, name, _ = find_model(config, None, weights=True)
        cores[form] = start_engine(config, folder, is_server=False, progress=lambda *report: None).core
    cases = [(requests, tokens) for requests in arguments.requests for tokens in arguments.tokens]
    formats: dict[str, dict[str, list[dict[str, float]]]] = {
        form: {f"{requests}x{tokens}": [] for requests, tokens in cases} for form in cores
    }
    for number in range(arguments.rounds + 1):
        for form, core in cores.items():
            for requests, tokens in cases if number % 2 else reversed(cases):
                found = median_step(core, requests, tokens, arguments.context, arguments.steps)
                if number:  # the first round warms up
                    formats[form][f"{requests}x{tokens}"].append(found)
    result = {
        **environment,
        "model": name,
        "context": arguments.context,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "formats": formats,
    }
    report.publish(__file__, arguments.save, "verify_rows", result, markdown(result))


if __name__ == "__main__":
    main()
