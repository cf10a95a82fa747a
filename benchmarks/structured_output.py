"""The cost of structured output: the same requests, each with a JSON schema, and without schemas.

For the throughput, --requests requests of --tokens tokens run with and without a constraint. Each request has a schema
that no earlier request had, and no schema can end before the last token. For the first token, one request runs in turns
without a constraint, with a new schema of --keys keys (cold), and with that schema again (cached). A time covers the
whole call: the check of the schema, its compilation, the prompt and the token. The order is reversed in every second
round. The first round is not counted, because it makes the tables of the vocabulary.

    python benchmarks/structured_output.py [MODEL] [--quantization int8] [--requests 32] [--tokens 128] [--keys 200]
                                           [--rounds 5] [--peer NAME COMMAND] [--refusals] [--save HARDWARE]

MODEL: a folder with weights of the measured shape; the default is the bundled demo model. --peer adds another engine by
a command that speaks the protocol of benchmarks/peers/constraining.py. This engine gets the same requests in the same
turns, and also the schemas that Quire refuses. If an engine takes such a schema, it is wrong if one of 16 answers does
not fit the schema. llama.cpp makes a GBNF grammar from a JSON schema itself, so its result shows both. With --refusals
no time is measured: the result only says what all engines, also Quire, do with the refused schemas and with some
schemas that are hard to follow. --save writes benchmarks/results/HARDWARE/structured_output_DATE.md and .json, or
structured_output_refusals_DATE.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jsonschema
from peers.process import Peer

from quire import LLM, SamplingParams
from quire.errors import InvalidRequestError
from quire.measure import report
from quire.sampling_params import StructuredOutputsParams

PROMPT = "Write the records of the library as JSON: "
MOST_ROWS = 100  # rows in the schema for the throughput, which are at least 2,000 tokens
NUM_ANSWERS = 16  # answers for each schema that Quire refuses, or that is hard to follow
ANSWER_TOKENS = 60
TEXT, COUNT = {"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 0, "maximum": 3}
LIST = {"type": "array", "items": COUNT, "minItems": 2, "maxItems": 4}
PAIR = {
    "type": "object", "properties": {"a": COUNT, "b": COUNT}, "required": ["a"], "additionalProperties": False
}  # fmt: skip
# Schemas that Quire refuses, as docs/structured_output.md says.
REFUSED: dict[str, dict[str, Any]] = {
    "not": {"type": "array", "items": {**COUNT, "not": {"enum": [0, 1]}}, "minItems": 4, "maxItems": 4},
    "if, then": {**PAIR, "if": {"properties": {"a": {"minimum": 0}}}, "then": {"required": ["b"]}},
    "if, else": {**PAIR, "if": {"properties": {"a": {"minimum": 9}}}, "else": {"required": ["b"]}},
    "contains": {**LIST, "contains": {"const": 3}},
    "uniqueItems": {**LIST, "uniqueItems": True},
    "propertyNames": {
        "type": "object", "additionalProperties": COUNT, "propertyNames": {"not": {"pattern": "^[a-z]"}},
        "minProperties": 1, "maxProperties": 1,
    },
    "dependentRequired": {**PAIR, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**PAIR, "dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluatedProperties": {
        "type": "object", "properties": {"a": COUNT}, "anyOf": [{"required": ["a"]}, {"properties": {"b": COUNT}}],
        "unevaluatedProperties": False,
    },
    "unevaluatedItems": {
        "type": "array", "minItems": 2, "maxItems": 3,
        "anyOf": [{"prefixItems": [COUNT]}, {"prefixItems": [TEXT, TEXT]}],
        "unevaluatedItems": False,
    },
    "oneOf that overlaps": {"oneOf": [COUNT, {"type": "integer", "minimum": 2, "maximum": 5}]},
    "a schema without a text": {"type": "integer", "minimum": 5, "maximum": 4},
}  # fmt: skip
# Schemas that are hard to follow.
TAKEN: dict[str, dict[str, Any]] = {
    "an exclusive bound": {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5},
    "propertyNames with a pattern": {
        "type": "object", "additionalProperties": COUNT, "propertyNames": {"pattern": "^[a-c]{1,2}$"},
    },
    "propertyNames with an enum": {
        "type": "object", "additionalProperties": COUNT, "propertyNames": {"enum": ["a", "b"]},
    },
    "an alternative without an end": {"anyOf": [COUNT, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
}  # fmt: skip


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
    return {"type": "array", "items": row, "minItems": MOST_ROWS}


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
    """The time of all requests together. Each of them gives its `max_tokens` tokens."""
    prompts = [f"{PROMPT}{number}" for number in range(len(asked))]
    started = time.perf_counter()
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    taken = time.perf_counter() - started
    assert [len(output.outputs[0].token_ids) for output in outputs] == [each.max_tokens for each in asked]
    return taken


def is_right(answer: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(answer), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def answers_of(engine: LLM | Peer, schema: dict[str, Any]) -> list[Any]:
    """One answer for each seed: the text, {"refused": why}, or None if the answer was cut off."""
    seeds = range(1, NUM_ANSWERS + 1)
    if isinstance(engine, Peer):
        question = {"schemas": [schema] * NUM_ANSWERS, "seeds": list(seeds), "num_tokens": ANSWER_TOKENS}
        return list(engine.ask(question, "answers"))
    constraint = StructuredOutputsParams(json=schema)
    asked = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=ANSWER_TOKENS, structured_outputs=constraint)
        for seed in seeds
    ]
    try:
        outputs = engine.generate(["Data: "] * NUM_ANSWERS, asked, use_tqdm=False)
    except InvalidRequestError as error:
        return [{"refused": str(error)}] * NUM_ANSWERS
    found = (output.outputs[0] for output in outputs)
    return [each.text if each.finish_reason == "stop" else None for each in found]


def verdict(engine: LLM | Peer, schema: dict[str, Any]) -> str:
    """Whether an engine refuses a schema, is right or is wrong."""
    answers = answers_of(engine, schema)
    if any(isinstance(answer, dict) for answer in answers):
        return "refused"
    ended = [answer for answer in answers if answer is not None]
    num_wrong = sum(not is_right(answer, schema) for answer in ended)
    return f"wrong in {num_wrong} of {len(ended)}" if num_wrong or not ended else f"right in {len(ended)}"


def verdicts(engine: LLM | Peer) -> dict[str, str]:
    return {name: verdict(engine, schema) for name, schema in (REFUSED | TAKEN).items()}


def check_refusals(found: dict[str, str]) -> None:
    """End the program unless Quire refuses exactly the schemas of REFUSED and is right about the others."""
    for name, what in found.items():
        if (name in REFUSED) != (what == "refused") or what.startswith("wrong"):
            raise SystemExit(f"Quire: {name}: {what}")


def refusals(of_engines: dict[str, dict[str, str]]) -> list[str]:
    """A table of the verdicts, by schema and engine."""
    lines = report.table_head("schema | " + " | ".join(of_engines))
    for name in REFUSED | TAKEN:
        lines.append(f"| {name} | " + " | ".join(found[name] for found in of_engines.values()) + " |")
    return lines


def peers(result: dict[str, Any]) -> list[str]:
    """Tables of each engine's tokens/s, first token and verdicts."""
    if not result["peers"]:
        return []
    names, tokens = ["Quire", *result["peers"]], result["requests"] * result["tokens"]
    runs = [result, *result["peers"].values()]
    middle = statistics.median
    lines = report.table_head(
        "engine | tokens/s without | with | with over without | Quire over it, with | first token, cold, ms | cached"
    )
    for name, each in zip(names, runs, strict=True):
        without, with_ = each["runs"]
        cost = middle(free / constrained for free, constrained in zip(without, with_, strict=True))
        over = middle(theirs / ours for ours, theirs in zip(result["runs"][1], with_, strict=True))
        _, cold, cached = each["first_tokens"]
        lines.append(
            f"| {name} | {tokens / middle(without):.1f} | {tokens / middle(with_):.1f} | {cost:.3f} | {over:.2f} | "
            f"{1e3 * middle(cold):.1f} | {1e3 * middle(cached):.1f} |"
        )
    of_engines = {name: each["verdicts"] for name, each in zip(names, runs, strict=True)}
    return ["", *lines, "", *refusals(of_engines)]


def refusals_markdown(result: dict[str, Any]) -> str:
    lines = [
        *report.heading("Schemas that are refused, and schemas that are hard to follow", result),
        f"- Model: {result['model']}. {NUM_ANSWERS} answers of at most {ANSWER_TOKENS} tokens for each schema, at "
        "temperature 1, each with its own seed. Right: all answers that ended fit the schema, as jsonschema says.",
        "",
        *refusals(result["verdicts"]),
    ]
    return "\n".join(lines) + "\n"


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
    return "\n".join([*lines, *peers(result)]) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quantization")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--keys", type=int, default=200, help="keys of the schema for the first token")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"))
    parser.add_argument("--refusals", action="store_true", help="only say which schemas are refused")
    arguments = parser.parse_args()
    others = {name: Peer(command) for name, command in arguments.peer}
    try:
        llm = new_llm(arguments)
        result = asked_alone(arguments, llm, others) if arguments.refusals else measured(arguments, llm, others)
    finally:
        for peer in others.values():
            peer.close()
    what, page = "structured_output", markdown
    if arguments.refusals:
        what, page = "structured_output_refusals", refusals_markdown
    report.publish(__file__, arguments.save, what, result, page(result))


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        **report.environment("python", "benchmarks/structured_output.py"),
        **vars(arguments),
        "model": Path(arguments.model).name if arguments.model else "demo",
    }


def new_llm(arguments: argparse.Namespace) -> LLM:
    return LLM(
        model=arguments.model,
        quantization=arguments.quantization,
        max_num_seqs=arguments.requests,
        max_model_len=max(arguments.tokens, ANSWER_TOKENS) + 64,
        enable_prefix_caching=False,
    )


def asked_alone(arguments: argparse.Namespace, llm: LLM, others: dict[str, Peer]) -> dict[str, Any]:
    """The verdicts of each engine, without times."""
    engines: dict[str, LLM | Peer] = {"Quire": llm, **others}
    found = {name: verdicts(engine) for name, engine in engines.items()}
    check_refusals(found["Quire"])
    return {**environment(arguments), "verdicts": found}


def measured(arguments: argparse.Namespace, llm: LLM, others: dict[str, Peer]) -> dict[str, Any]:
    """The results of all rounds of all engines."""

    def seconds_of(name: str, schemas: list[dict[str, Any] | None], tokens: int) -> float:
        if name == "Quire":
            return seconds(llm, [params(tokens, schema) for schema in schemas])
        prompts = [f"{PROMPT}{number}" for number in range(len(schemas))]
        taken: float = others[name].ask({"prompts": prompts, "schemas": schemas, "num_tokens": tokens}, "seconds")
        return taken

    names = ["Quire", *others]
    found: dict[str, dict[str, Any]] = {name: {"runs": ([], []), "first_tokens": ([], [], [])} for name in names}
    for number in range(arguments.rounds + 1):
        constrained: list[dict[str, Any] | None] = [
            schema_of_rows(f"{number}_{index}") for index in range(arguments.requests)
        ]
        keyed = schema_of_keys(str(number), arguments.keys)
        turns: list[list[dict[str, Any] | None]] = [[None] * arguments.requests, constrained]
        for name in names if number % 2 else reversed(names):
            for side in (0, 1) if number % 2 else (1, 0):
                taken = seconds_of(name, turns[side], arguments.tokens)
                if number:
                    found[name]["runs"][side].append(taken)
            for side, first in enumerate((None, keyed, keyed)):
                taken = seconds_of(name, [first], 1)
                if number:
                    found[name]["first_tokens"][side].append(taken)
    if others:
        engines: dict[str, LLM | Peer] = {"Quire": llm, **others}
        for name, engine in engines.items():
            found[name]["verdicts"] = verdicts(engine)
        check_refusals(found["Quire"]["verdicts"])
    return {
        **environment(arguments),
        **found["Quire"],
        "peers": {name: found[name] for name in others},
    }


if __name__ == "__main__":
    main()
