"""Grammar engines beside each other: coverage of the JSON Schema Test Suite, and the time of a mask.

Coverage: the required tests of draft 2020-12. A schema is accepted if the engine compiles it. An instance is accepted
if the grammar of its schema takes it as a whole, byte by byte, in any order of its keys. llguidance is asked as Quire
asks it: a keyword that it does not know is refused. xgrammar compiles such a schema and ignores the keyword.

Masks: an instance of each of some schemas is walked token by token, with a mask before each token. The first walk is
not counted. A reading is the median of the rounds at that place. Both use one thread for masks.

    python benchmarks/grammar_engines.py SUITE TOKENIZER [--rounds 7] [--save HARDWARE]

SUITE: a copy of github.com/json-schema-org/JSON-Schema-Test-Suite. TOKENIZER: a byte-level tokenizer.json, for example
of Qwen3, which has about 152,000 tokens. It needs xgrammar (`pip install xgrammar`). --save writes
benchmarks/results/HARDWARE/grammar_engines_DATE.md and .json.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import llguidance
import numpy as np
import xgrammar
from numpy.typing import NDArray
from tokenizers import Tokenizer

from quire.errors import InvalidRequestError
from quire.grammar.limits import parser_limits
from quire.grammar.text import grammar_text
from quire.measure import report
from quire.sampling_params import StructuredOutputsParams

MOST_ORDERS = 200  # the most orders of the keys of an instance that are tried
ROW = {"type": "object", "properties": {"name": {"type": "string"}, "amount": {"type": "number"}}}
SCHEMAS: dict[str, tuple[Any, Any]] = {  # a schema and an instance
    "call of a tool": (
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
        {"city": "San Francisco", "unit": "celsius", "days": 10},
    ),
    "nested invoice": (
        {
            "type": "object",
            "properties": {
                "number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,8}$"},
                "date": {"type": "string", "format": "date"},
                "note": {"type": "string", "maxLength": 80},
                "rows": {"type": "array", "items": ROW, "minItems": 1},
                "is_paid": {"type": "boolean"},
            },
            "required": ["number", "date", "note", "rows", "is_paid"],
            "additionalProperties": False,
        },
        {
            "number": "AB-20260",
            "date": "2026-05-01",
            "note": "Please pay within thirty days",
            "rows": [{"name": "apples and pears", "amount": 12.5}, {"name": "milk", "amount": 3}],
            "is_paid": True,
        },
    ),
    "recursive tree": (
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    "required": ["name", "children"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/node",
        },
        {"name": "root", "children": [{"name": "left", "children": []}, {"name": "right", "children": []}]},
    ),
    "any object": ({"type": "object"}, {"title": "A short story", "words": [1, "two", None], "by": {"name": "me"}}),
}


class Matcher(Protocol):
    """A place in a grammar."""

    def takes(self, text: bytes) -> bool:
        """Whether the grammar takes a text as a whole. The vocabulary is bytes."""
        ...

    def mask(self) -> NDArray[np.int32]:
        """The mask with a bit for each token. The next call overwrites it."""
        ...

    def append(self, token_id: int) -> bool: ...


class LLGuidance:
    """llguidance with Quire's settings. `tokenizer` None: the vocabulary is bytes."""

    def __init__(self, tokenizer: Path | None) -> None:
        if tokenizer is None:
            self._tokenizer = llguidance.LLTokenizer("byte")
        else:
            self._tokenizer = llguidance.LLTokenizer(tokenizer.read_text(encoding="utf-8"))

    def matcher(self, schema: Any) -> Matcher | None:
        """None: the schema is refused."""
        try:
            text = grammar_text(StructuredOutputsParams(json=schema))
        except InvalidRequestError:
            return None
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=parser_limits())
        return None if matcher.is_error() else _LLGuidanceMatcher(matcher, self._tokenizer.vocab_size)


class _LLGuidanceMatcher:
    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher, self._executor = matcher, llguidance.LLExecutor(1)
        self._mask_W = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    def takes(self, text: bytes) -> bool:
        matcher = self._matcher.deep_copy()
        return bool(matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting())

    def mask(self) -> NDArray[np.int32]:
        mask_W = self._mask_W
        self._executor.unsafe_compute_mask_ptr([(self._matcher, 0)], mask_W.ctypes.data, mask_W.nbytes, 1)
        return mask_W

    def append(self, token_id: int) -> bool:
        return self._matcher.consume_token(token_id)


class XGrammar:
    """xgrammar with the settings of an engine that allows further properties if the schema does."""

    def __init__(self, tokenizer: Path | None) -> None:
        if tokenizer is None:
            vocabulary: list[Any] = [bytes([byte]) for byte in range(256)]
            kind = xgrammar.VocabType.RAW
        else:
            by_id = {id_: token for token, id_ in Tokenizer.from_file(str(tokenizer)).get_vocab().items()}
            vocabulary, kind = [by_id.get(id_, "") for id_ in range(max(by_id) + 1)], xgrammar.VocabType.BYTE_LEVEL
        self._stop = len(vocabulary)
        info = xgrammar.TokenizerInfo([*vocabulary, "<stop>"], kind, stop_token_ids=[self._stop])
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)

    def matcher(self, schema: Any) -> Matcher | None:
        """None: the schema is refused."""
        try:
            compiled = self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        except (RuntimeError, ValueError):
            return None
        return _XGrammarMatcher(compiled, self._stop)


class _XGrammarMatcher:
    def __init__(self, compiled: xgrammar.CompiledGrammar, stop: int) -> None:
        self._matcher, self._stop = xgrammar.GrammarMatcher(compiled), stop
        self._mask_1W = np.zeros((1, stop // 32 + 1), dtype=np.int32)

    def takes(self, text: bytes) -> bool:
        self._matcher.reset()
        return self._matcher.accept_string(text) and self._matcher.accept_token(self._stop)

    def mask(self) -> NDArray[np.int32]:
        # It does not write a mask that allows every token.
        if not self._matcher.fill_next_token_bitmask(self._mask_1W):
            self._mask_1W.fill(-1)
        return self._mask_1W[0]

    def append(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id)


Engine = LLGuidance | XGrammar
ENGINES: dict[str, Callable[[Path | None], Engine]] = {
    f"llguidance {version('llguidance')}": LLGuidance,
    f"xgrammar {version('xgrammar')}": XGrammar,
}


def orders(value: Any) -> Iterator[Any]:
    """The value with its keys in every order."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*(list(orders(each)) for each in value)))
    elif isinstance(value, dict):
        for keys in itertools.permutations(value):
            for values in itertools.product(*(list(orders(value[key])) for key in keys)):
                yield dict(zip(keys, values, strict=True))
    else:
        yield value


def coverage(engine: Engine, suite: Path) -> dict[str, int]:
    """The numbers of schemas and of the instances of accepted schemas, by outcome."""
    found = dict.fromkeys(("schemas", "accepted", "valid", "valid_accepted", "invalid", "invalid_rejected"), 0)
    for file in sorted((suite / "tests" / "draft2020-12").glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            found["schemas"] += 1
            if (matcher := engine.matcher(group["schema"])) is None:
                continue
            found["accepted"] += 1
            for test in group["tests"]:
                texts = itertools.islice(orders(test["data"]), MOST_ORDERS)
                is_taken = any(matcher.takes(json.dumps(each, ensure_ascii=False).encode()) for each in texts)
                kind = "valid" if test["valid"] else "invalid"
                found[kind] += 1
                found["valid_accepted" if test["valid"] else "invalid_rejected"] += is_taken == test["valid"]
    return found


def mask_times(engine: Engine, schema: Any, token_ids: list[int], rounds: int) -> dict[str, float]:
    """The milliseconds to the first mask of a new schema, and the mean and the most microseconds of a mask."""
    readings: list[list[float]] = []
    first = 0.0
    for number in range(rounds + 1):
        started = time.perf_counter()
        matcher = engine.matcher(schema)
        assert matcher is not None
        row = []
        for token_id in token_ids:
            begun = time.perf_counter()
            mask_W = matcher.mask()
            row.append(1e6 * (time.perf_counter() - begun))
            if number == 0 and len(row) == 1:
                first = 1e3 * (time.perf_counter() - started)
            assert mask_W[token_id // 32] >> token_id % 32 & 1, "the instance does not fit its schema"
            assert matcher.append(token_id)
        readings.append(row)
    places = [statistics.median(each) for each in zip(*readings[1:], strict=True)]
    return {"first_ms": first, "mean_us": statistics.mean(places), "most_us": max(places)}


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({math.floor(100 * part / whole)} %)"


def markdown(result: dict[str, Any]) -> str:
    lines = [
        *report.heading("Grammar engines", result),
        f"- A vocabulary of {result['vocabulary']:,} tokens. JSON Schema Test Suite, draft 2020-12, required tests; "
        "instances of the schemas that the engine accepts.",
        "",
        *report.table_head("engine | schemas accepted | valid instances accepted | invalid instances rejected"),
    ]
    for name, found in result["coverage"].items():
        lines.append(
            f"| {name} | {share(found['accepted'], found['schemas'])} | "
            f"{share(found['valid_accepted'], found['valid'])} | {share(found['invalid_rejected'], found['invalid'])} |"
        )
    lines += ["", *report.table_head("schema | engine | first mask, ms | mean mask, us | longest mask, us")]
    for schema, engines in result["masks"].items():
        for name, found in engines.items():
            lines.append(
                f"| {schema} | {name} | {found['first_ms']:.1f} | {found['mean_us']:.0f} | {found['most_us']:.0f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    masks: dict[str, dict[str, dict[str, float]]] = {name: {} for name in SCHEMAS}
    covered = {name: coverage(make(None), arguments.suite) for name, make in ENGINES.items()}
    for engine_name, make in ENGINES.items():
        engine = make(arguments.tokenizer)
        for name, (schema, instance) in SCHEMAS.items():
            token_ids = tokenizer.encode(json.dumps(instance), add_special_tokens=False).ids
            masks[name][engine_name] = mask_times(engine, schema, token_ids, arguments.rounds)
    result = {
        **report.environment("python", "benchmarks/grammar_engines.py"),
        "vocabulary": tokenizer.get_vocab_size(),
        "coverage": covered,
        "masks": masks,
    }
    report.publish(__file__, arguments.save, "grammar_engines", result, markdown(result))


if __name__ == "__main__":
    main()
