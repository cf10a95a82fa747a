"""The cost of structured output: the same requests with a JSON schema each, and without.

Throughput: --requests requests of --tokens tokens, each with a schema of its own that no earlier request had, over the
same requests without a constraint. No schema can end before the last token. First token: one request with a schema of
--keys keys, in turns without a constraint, with a schema that is new (cold), and with that schema again (cached). A
time covers the whole call: the check of the schema, its compilation, the prompt and the token. Rounds take turns in
which comes first. The first round is not counted; it makes the tables of the vocabulary.

    python benchmarks/structured_output.py [MODEL] [--quantization int8] [--requests 32] [--tokens 128] [--keys 200]
                                           [--rounds 5] [--save HARDWARE]

MODEL: a folder with weights of the measured shape; the default is the bundled demo model. --save writes
benchmarks/results/HARDWARE/structured_output_DATE.md and .json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.measure import report
from quire.sampling_params import StructuredOutputsParams

PROMPT = "Write the records of the library as JSON: "


def schema_of_rows(name: str) -> dict[str, Any]:
    """An array that goes on for thousands of tokens."""
    row = {
        "type": "object",
        "properties": {
            f"id_{name}": {"type": "integer", "minimum": 0, "maximum": 9999},
            "title": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["book", "map", f"box {name}"]},
            "pages": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
        },
        "required": [f"id_{name}", "title", "kind", "pages"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": row, "minItems": 5000}


def schema_of_keys(name: str, num_keys: int) -> dict[str, Any]:
    """An object with many keys of four kinds."""
    kinds: tuple[dict[str, Any], ...] = (
        {"type": "string"},
        {"type": "integer"},
        {"enum": ["low", "high"]},
        {"type": "array", "items": {"type": "number"}},
    )
    keys = {f"key_{name}_{number}": kinds[number % len(kinds)] for number in range(num_keys)}
    return {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False}


def params(tokens: int, schema: dict[str, Any] | None) -> SamplingParams:
    constraint = None if schema is None else StructuredOutputsParams(json=schema)
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, structured_outputs=constraint)


def seconds(llm: LLM, asked: list[SamplingParams]) -> float:
    """Of all requests together. Each of them gives its `max_tokens` tokens."""
    prompts = [f"{PROMPT}{number}" for number in range(len(asked))]
    started = time.perf_counter()
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    taken = time.perf_counter() - started
    assert [len(output.outputs[0].token_ids) for output in outputs] == [each.max_tokens for each in asked]
    return taken


def markdown(result: dict[str, Any]) -> str:
    without, with_ = ([result["requests"] * result["tokens"] / taken for taken in side] for side in result["runs"])
    ratios = [constrained / free for free, constrained in zip(without, with_, strict=True)]
    free, cold, cached = ([1e3 * taken for taken in side] for side in result["first_tokens"])
    lines = [
        *report.heading("The cost of structured output", result),
        f"- Model: {result['model']}. {result['rounds']} rounds in turns. Medians, and the medians of the differences "
        "and ratios within a round (least, most).",
        f"- {result['requests']} requests of {result['tokens']} tokens, each with a new schema: "
        f"{statistics.median(with_):.1f} tokens/s; without {statistics.median(without):.1f} tokens/s; "
        f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f}).",
        "",
        *report.table_head(f"first token, schema of {result['keys']} keys | ms | more than without, ms"),
        f"| without | {statistics.median(free):.1f} | |",
    ]
    for name, times in (("cold", cold), ("cached", cached)):
        more = [with_ - without for with_, without in zip(times, free, strict=True)]
        lines.append(
            f"| {name} | {statistics.median(times):.1f} | "
            f"{statistics.median(more):.1f} ({min(more):.1f}, {max(more):.1f}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quantization")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--keys", type=int, default=200, help="of the schema for the first token")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", metavar="HARDWARE", help="write result files with this name of the machine")
    arguments = parser.parse_args()
    llm = LLM(
        model=arguments.model,
        quantization=arguments.quantization,
        max_num_seqs=arguments.requests,
        max_model_len=arguments.tokens + 64,
        enable_prefix_caching=False,
    )
    runs: tuple[list[float], list[float]] = ([], [])
    first_tokens: tuple[list[float], list[float], list[float]] = ([], [], [])
    for number in range(arguments.rounds + 1):
        constrained = [
            params(arguments.tokens, schema_of_rows(f"{number}_{index}")) for index in range(arguments.requests)
        ]
        turns = [(0, [params(arguments.tokens, None)] * arguments.requests), (1, constrained)]
        keyed = params(1, schema_of_keys(str(number), arguments.keys))
        first_turns = [(0, params(1, None)), (1, keyed), (2, keyed)]
        for side, asked in turns if number % 2 else reversed(turns):
            taken = seconds(llm, asked)
            if number:
                runs[side].append(taken)
        for side, first in first_turns:
            taken = seconds(llm, [first])
            if number:
                first_tokens[side].append(taken)
    result = {
        **report.environment("python", "benchmarks/structured_output.py"),
        **vars(arguments),
        "model": Path(arguments.model).name if arguments.model else "demo",
        "runs": runs,
        "first_tokens": first_tokens,
    }
    print(markdown(result))
    if arguments.save:
        report.save_published(Path(__file__).parent, "structured_output", arguments.save, result, markdown(result))


if __name__ == "__main__":
    main()
