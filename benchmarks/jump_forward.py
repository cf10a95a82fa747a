"""Steps and time of constrained answers, with jump forward and with a step for each forced token.

In each round an engine answers the same requests in both ways, in turns. The engines differ in their drafter and in the
number of steps in flight. Drafters always draft, whether it pays or not.

    python benchmarks/jump_forward.py [MODEL] [--requests 1 8] [--rounds 5] [--drafters none ngram draft_model eagle3]
                                      [--device cpu] [--save HARDWARE]

MODEL: none is the bundled demo model; draft_model and eagle3 need that. --save writes
benchmarks/results/HARDWARE/jump_forward_MODEL_DATE.md and .json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire import demo
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.start import start_engine
from quire.entry.launch import find_model
from quire.grammar.matchers import RowGrammar
from quire.grammar.text import grammar_text
from quire.measure import report
from quire.messages import AddRequest, UseTokenizer
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.speculative_config import SpeculativeConfig

KEYS = (
    "is_the_customer_already_known_to_us",
    "number_of_items_in_the_shopping_cart",
    "preferred_language_of_the_conversation",
    "does_the_customer_want_to_be_called_back",
    "number_of_days_since_the_last_purchase",
    "what_the_customer_wants_to_do_next",
)
VALUES: tuple[dict[str, Any], ...] = (
    {"type": "boolean"},
    {"type": "integer", "minimum": 0, "maximum": 99},
    {"enum": ["English", "Deutsch", "français"]},
    {"type": "boolean"},
    {"type": "integer", "minimum": 0, "maximum": 999},
    {"enum": ["buy", "return", "ask"]},
)
SCHEMA = {
    "type": "object",
    "properties": dict(zip(KEYS, VALUES, strict=True)),
    "required": list(KEYS),
    "additionalProperties": False,
}
WAYS = ("a step each", "jump forward")
NUM_DRAFTS = 3


@contextmanager
def stepping(way: str) -> Iterator[None]:
    """In the block there is no jump forward, if `way` says so."""
    forced_token = RowGrammar.forced_token
    if way == "a step each":
        RowGrammar.forced_token = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        RowGrammar.forced_token = forced_token  # type: ignore[method-assign]


def answer(core: EngineCore, name: str, num_requests: int) -> tuple[dict[str, float], list[list[int]]]:
    """The number of steps and the milliseconds until all requests are answered, and their tokens."""
    grammar = grammar_text(StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True))
    for row in range(num_requests):
        params = SamplingParams(
            temperature=0.7, seed=row, max_tokens=256, grammar=grammar, skip_reading_prefix_cache=True
        )
        core.add(AddRequest(f"{name} {row}", list(range(10, 26)), params, 256, stop_token_ids=[2]))
    tokens: dict[str, list[int]] = {}
    num_steps, started = 0, time.perf_counter()
    while core.has_work():
        for delta in core.step():
            assert delta.error is None, delta.error
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        num_steps += core.last_record is not None
    found = {"steps": num_steps, "ms": 1000 * (time.perf_counter() - started)}
    return found, [tokens[request_id] for request_id in sorted(tokens)]


def measure(core: EngineCore, num_requests: int, rounds: int) -> dict[str, Any]:
    """Run rounds of both ways in turns. The first round warms up and compiles the grammar."""
    found, expected = list[dict[str, dict[str, float]]](), None
    for number in range(rounds + 1):
        turn = {}
        for way in WAYS if number % 2 else reversed(WAYS):
            with stepping(way):
                turn[way], tokens = answer(core, f"{number} {way}", num_requests)
            expected = expected or tokens
            assert tokens == expected, "another token"
        if number:
            found.append(turn)
    assert expected is not None
    return {"requests": num_requests, "tokens": sum(map(len, expected)), "rounds": found}


def engine_of(model: str | None, device: str, drafter: str, is_async: bool) -> EngineCore:
    drafter_folder = {"draft_model": demo.path("draft"), "eagle3": demo.path("eagle3")}.get(drafter)
    speculation = None
    if drafter != "none":
        speculation = SpeculativeConfig(
            method=drafter,  # type: ignore[arg-type]
            model=None if drafter_folder is None else str(drafter_folder),
            num_speculative_tokens=NUM_DRAFTS,
            adaptive=False,
        )
    config = EngineConfig(
        model=model,
        device=device,
        async_scheduling=is_async,
        speculative_config=speculation,
        max_model_len=512,
        max_num_seqs=32,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False,
    )
    folder = find_model(config, None, weights=True)[0]
    engine = start_engine(
        config,
        folder,
        is_server=False,
        progress=lambda phase, share, detail: None,
        drafter_folder=drafter_folder,
    )
    engine.core.use_tokenizer(UseTokenizer((folder / "tokenizer.json").read_text(), [2]))
    return engine.core


def markdown(result: dict[str, Any]) -> str:
    lines = [
        *report.heading("Jump forward", result),
        f"- Model: {result['model']}. A schema with six long keys; drafters make {NUM_DRAFTS} drafts in every step.",
        f"- {len(result['cases'][0]['rounds'])} rounds in turns. Medians, and the medians of the ratios within a round "
        "(least, most).",
        "",
        "| drafter | steps in flight | requests | tokens | steps, a step each | jump forward | ms, a step each | "
        "jump forward | ratio of times |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        rounds = case["rounds"]
        of = {
            (way, key): statistics.median(each[way][key] for each in rounds) for way in WAYS for key in ("steps", "ms")
        }
        ratios = [each[WAYS[1]]["ms"] / each[WAYS[0]]["ms"] for each in rounds]
        lines.append(
            f"| {case['drafter']} | {1 + case['is_async']} | {case['requests']} | {case['tokens']} "
            f"| {of[WAYS[0], 'steps']:.0f} | {of[WAYS[1], 'steps']:.0f} "
            f"| {of[WAYS[0], 'ms']:.1f} | {of[WAYS[1], 'ms']:.1f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model", nargs="?", help="none: the bundled demo model")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafters", nargs="+", default=["none", "ngram", "draft_model", "eagle3"])
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    environment = report.environment("python", "benchmarks/jump_forward.py")
    cases = []
    for drafter in arguments.drafters:
        for is_async in (False, True):
            core = engine_of(arguments.model, arguments.device, drafter, is_async)
            for num_requests in arguments.requests:
                found = measure(core, num_requests, arguments.rounds)
                cases.append({"drafter": drafter, "is_async": is_async, **found})
            core.shutdown()
    name = "demo" if arguments.model is None else Path(arguments.model).name
    result = {**environment, "model": name, "cases": cases}
    report.publish(__file__, arguments.save, f"jump_forward_{name}", result, markdown(result))


if __name__ == "__main__":
    main()
