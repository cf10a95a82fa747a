"""The cost of drafts that never hold, beside the same engine without drafts.

The drafts of a draft model, the model's own first layers, are always rejected. So a step with drafts gives as many
tokens as one without, and only takes longer. Within each answer, drafts are on and off in turns of some steps
(SetLimits). Two turns that follow each other are compared, so a machine whose speed changes from second to second
disturbs them little. The cost has two parts, which are known better than the sum: what the steps with drafts take in
addition, and what a step without drafts takes longer while they are on, because somebody must decide.

    python benchmarks/useless_drafts.py FOLDER MODEL [--formats int4] [--requests 1 8 32] [--tokens 160] [--turn 12]
                                        [--seconds 20] [--drafts 7] [--save HARDWARE [--name NAME]]

FOLDER: where the draft model is, or is written. MODEL: a folder with weights of the measured shape. --save writes
benchmarks/results/HARDWARE/NAME_DATE.md and .json.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from itertools import count
from pathlib import Path
from typing import Any

from inflated import first_layers
from speculation import CONTEXT, SHAPE_LAYERS, Engine, prompts_of

from quire.measure import report
from quire.measure.statistics import mean_interval
from quire.messages import AddRequest, SetLimits
from quire.model_config import load_model_config
from quire.sampling_params import SamplingParams
from quire.speculative_config import SpeculativeConfig

PROMPT_TOKENS = 32
LEAST_PAIRS = 5


def run(engine: Engine, prompts: list[list[int]], number: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The steps of one run without its prompts: each with its turn, whether drafts are on, and its seconds."""
    core, steps = engine.core, list[dict[str, Any]]()
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=arguments.tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.add(AddRequest(f"{number}-{index}", prompt, params, max_tokens=arguments.tokens))
    while core.has_work():
        turn = len(steps) // arguments.turn
        is_on = turn % 2 == number % 2
        core.set_limits(SetLimits(spec_tokens=arguments.drafts if is_on else 0))
        core.step()
        record = core.last_record
        if record is None or record.num_prefill_tokens:
            continue
        assert not record.num_accepted_tokens, "a draft held"
        steps.append(
            {
                "turn": turn,
                "is_on": is_on,
                "seconds": record.step_seconds,
                "schedule_seconds": record.schedule_seconds,
                "drafts": record.num_draft_tokens,
            }
        )
    return steps


def summary(runs: list[list[dict[str, Any]]], length: int) -> dict[str, Any]:
    """What drafts cost, in shares of the time without them.

    Args:
        length: the steps of a turn.

    Returns:
        "deciding" and "plain" are not a number (nan) if every step had drafts while they were on.
    """
    pairs = []
    for steps in runs:
        turns = [steps[begin : begin + length] for begin in range(0, len(steps) - length + 1, length)]
        for first, second in zip(turns[::2], turns[1::2], strict=False):
            on, off = (first, second) if first[0]["is_on"] else (second, first)
            pairs.append(sum(step["seconds"] for step in on) / sum(step["seconds"] for step in off))
    every = [step for steps in runs for step in steps]
    on, off = ([step for step in every if step["is_on"] == is_on] for is_on in (True, False))
    plain = [step for step in on if not step["drafts"]]
    usual = statistics.median(step["seconds"] for step in off)
    drafting = sum(step["seconds"] - usual for step in on if step["drafts"])
    deciding = plain_seconds = math.nan
    if plain:
        plain_seconds = statistics.median(step["seconds"] for step in plain)
        deciding = statistics.mean(step["schedule_seconds"] for step in plain) - statistics.mean(
            step["schedule_seconds"] for step in off
        )
    return {
        "pairs": pairs,
        "steps": len(on),
        "step_ms": 1e3 * usual,
        "drafts": sum(step["drafts"] for step in on),
        "drafting": drafting / (usual * len(on)),
        "deciding": deciding / usual,
        "plain": plain_seconds / usual,
    }


def markdown(result: dict[str, Any]) -> str:
    lines = [
        *report.heading("What drafts cost that never hold", result),
        f"- Model: {result['model']}; the draft model is its first {SHAPE_LAYERS} layers. Random prompts of "
        f"{PROMPT_TOKENS} tokens, {result['tokens']} tokens of each request, temperature 1, at most "
        f"{result['drafts']} drafts. Drafts are on and off in turns of {result['turn']} steps. A first run, in which "
        "the engine knows nothing of its drafts, is not counted.",
        "- pairs: time of a turn with drafts over the turn beside it, mean (95% interval) and median of the pairs. "
        "drafting: what the steps with drafts take longer, over the time of all steps. deciding: the further time of "
        "the scheduler in steps without drafts, likewise. plain: a step without drafts while they are on, over one "
        "while they are off (medians). nan: every step had drafts.",
        "",
        *report.table_head(
            "weights | requests | step, ms | steps | drafts | drafting | deciding | plain | pairs | median pair"
        ),
    ]
    for case in result["cases"]:
        low, high = mean_interval(case["pairs"])
        lines.append(
            f"| {case['format']} | {case['requests']} | {case['step_ms']:.1f} | {case['steps']} | {case['drafts']} | "
            f"{case['drafting']:.2%} | {case['deciding']:.2%} | {case['plain']:.3f} | "
            f"{statistics.mean(case['pairs']):.3f} ({low:.3f} to {high:.3f}) of {len(case['pairs'])} | "
            f"{statistics.median(case['pairs']):.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("folder", type=Path, help="where the draft model is, or is written")
    parser.add_argument("model", type=Path)
    parser.add_argument("--formats", nargs="+", default=["int4"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--turn", type=int, default=12, help="steps of a turn")
    parser.add_argument("--seconds", type=float, default=20.0, help="of runs for each number of requests, at least")
    parser.add_argument("--drafts", type=int, default=7, help="most drafts of a request in a step")
    parser.add_argument("--name", default="useless_drafts", help="of the result files")
    arguments = parser.parse_args()
    environment = report.environment("python", "benchmarks/useless_drafts.py")
    draft = arguments.folder / "first layers"
    if not draft.exists():
        arguments.folder.mkdir(parents=True, exist_ok=True)
        first_layers(arguments.model, draft, SHAPE_LAYERS)
    prompts = prompts_of("shape", load_model_config(arguments.model).vocab_size, PROMPT_TOKENS)
    speculation = SpeculativeConfig(
        method="draft_model",
        model=str(draft),
        num_speculative_tokens=arguments.drafts,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=(0.0,) * arguments.drafts,
    )
    cases: list[dict[str, Any]] = []
    for form in arguments.formats:
        quantization = None if form == "none" else form
        engine = Engine(arguments.model, quantization, max(arguments.requests), CONTEXT, speculation)
        for requests in arguments.requests:
            runs, numbers = list[list[dict[str, Any]]](), count()
            run(engine, prompts(next(numbers), requests), 0, arguments)
            started = time.perf_counter()
            while time.perf_counter() < started + arguments.seconds or len(runs) < LEAST_PAIRS:
                number = next(numbers)
                runs.append(run(engine, prompts(number, requests), number, arguments))
            cases.append({"format": form, "requests": requests} | summary(runs, arguments.turn))
        engine.core.shutdown()
    result = {
        **environment,
        "model": arguments.model.name,
        "tokens": arguments.tokens,
        "turn": arguments.turn,
        "drafts": arguments.drafts,
        "cases": cases,
    }
    report.publish(__file__, arguments.save, arguments.name, result, markdown(result))


if __name__ == "__main__":
    main()
