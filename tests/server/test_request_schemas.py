"""/openapi.json describes the answered bodies exactly: a body that a schema accepts is not refused for its form, and
one that it refuses is. Bodies are made from the schemas, at the bounds they name and one step beyond.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from quire.server.openapi import build
from quire.server.request_schemas import SchemaBounds, decimals_below
from quire.server.state import AppSettings
from tests.examples import IS_FULL, examples
from tests.server.refusals import REASONS, reasons_of
from tests.server.serving import LIMITS, RunningServer
from tests.server.test_errors import MESSAGES, error_of
from tests.server.test_poison import poisoned  # noqa: F401 (a fixture)

DOCUMENT = build(SchemaBounds(LIMITS), AppSettings(("m",)))
TYPES = {"string": str, "integer": int, "boolean": bool, "null": type(None), "array": list, "object": dict}
# Good bodies of each route. Tests replace one field or several.
BASES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": MESSAGES, "max_tokens": 1},
        {"messages": MESSAGES, "max_tokens": 1, "logprobs": True, "stream": True},
        {"messages": MESSAGES, "max_tokens": 1, "use_beam_search": True},
    ],
    "/v1/completions": [
        {"prompt": "Hi", "max_tokens": 1},
        {"prompt": "Hi", "max_tokens": 1, "echo": True, "truncate_prompt_tokens": 5},
        {"prompt": "Hi", "max_tokens": 1, "use_beam_search": True},
    ],
    "/v1/chat/completions/batch": [{"messages": [MESSAGES, MESSAGES], "max_tokens": 1}],
    "/v1/messages": [
        {"messages": MESSAGES, "max_tokens": 1},
        {"messages": MESSAGES, "max_tokens": 1, "stream": True, "system": [{"type": "text", "text": "Be short"}]},
    ],
    "/v1/messages/count_tokens": [{"messages": MESSAGES}],
    "/v1/responses": [
        {"input": "Hi", "max_output_tokens": 1},
        {"input": MESSAGES, "max_output_tokens": 1, "stream": True, "background": True},
    ],
    "/v1/responses/input_tokens": [{"input": "Hi"}],
    "/tokenize": [{"prompt": "Hi"}, {"messages": MESSAGES}],
    "/detokenize": [{"tokens": [1]}],
}
STRANGE = [None, True, 0, 1.5, 2**64, "", "1", [], [None], [[]], [""], {}, {"a": "b"}]
NAMES = ("model", "previous_response_id")  # of what there is: others answer 404
MAX_ITEMS = 2000  # of lists that are tried


def schema_of(path: str) -> dict[str, Any]:
    return resolved(DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])


def fields_of(path: str) -> set[str]:
    return set(schema_of(path)["properties"])


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    return DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


SHARED = fields_of("/v1/chat/completions") & fields_of("/v1/completions")
# The first of their values, and every which one.
SHARES = {"/v1/chat/completions": (0, 2), "/v1/completions": (1, 2), "/v1/chat/completions/batch": (0, 3)}


def part(path: str, name: str, is_first: bool) -> tuple[int, int]:
    """Of the values of a field: the first one that is tried, and every which one."""
    if IS_FULL:
        return 0, 1
    if not is_first:
        return 0, 6
    return SHARES.get(path, (0, 1)) if name in SHARED else (0, 1)


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """JSON Schema, as far as the document uses it. An unknown keyword fails."""
    schema = resolved(schema)
    is_number = type(value) in (int, float)
    numbers = ("number", "integer") if is_number and value == int(value) else ("number",)  # 1.0 is an integer
    checks = {
        "type": lambda kind: (is_number and kind in numbers) or type(value) is TYPES.get(kind),
        "const": lambda only: same(value, only),
        "enum": lambda values: any(same(value, item) for item in values),
        "anyOf": lambda kinds: any(accepts(kind, value) for kind in kinds),
        "allOf": lambda kinds: all(accepts(kind, value) for kind in kinds),
        "not": lambda kind: not accepts(kind, value),
        "minimum": lambda least: not is_number or value >= least,
        "exclusiveMinimum": lambda least: not is_number or value > least,
        "maximum": lambda most: not is_number or value <= most,
        "minLength": lambda least: type(value) is not str or len(value) >= least,
        "maxLength": lambda most: type(value) is not str or len(value) <= most,
        "pattern": lambda text: type(value) is not str or re.search(text, value) is not None,
        "minItems": lambda least: type(value) is not list or len(value) >= least,
        "maxItems": lambda most: type(value) is not list or len(value) <= most,
        "items": lambda kind: type(value) is not list or all(accepts(kind, item) for item in value),
        "required": lambda names: type(value) is not dict or set(names) <= value.keys(),
        "minProperties": lambda least: type(value) is not dict or len(value) >= least,
        "maxProperties": lambda most: type(value) is not dict or len(value) <= most,
        "propertyNames": lambda kind: type(value) is not dict or all(accepts(kind, name) for name in value),
        "properties": lambda kinds: (
            type(value) is not dict or all(accepts(kinds[name], value[name]) for name in kinds.keys() & value.keys())
        ),
        "additionalProperties": lambda kind: (
            type(value) is not dict
            or all(
                kind is not False and accepts(kind, value[name])
                for name in value.keys() - schema.get("properties", {}).keys()
            )
        ),
    }
    about = ("title", "description", "default", "discriminator")
    return all(checks[keyword](argument) for keyword, argument in schema.items() if keyword not in about)


def same(value: Any, other: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def values_of(schema: dict[str, Any]) -> Iterator[Any]:
    """Values at the bounds of a schema, and beyond them."""
    schema = resolved(schema)
    yield from schema.get("enum", ())
    yield from [schema["const"]] if "const" in schema else ()
    for kind in schema.get("anyOf", ()):
        yield from values_of(kind)
    match schema.get("type"):
        case "boolean":
            yield from (True, False)
        case "integer":
            low, high = schema.get("minimum", 0), schema.get("maximum", 2**40)
            yield from (low, high, low - 1, high + 1, min(low + 1, high), float(low), low + 0.5)
        case "number":
            low, high = schema.get("minimum", 1e-9), schema["maximum"]
            yield from (low, high, low - 0.01, high + 0.01, 1, 5e-324)
        case "string":
            most = schema.get("maxLength", 20)
            yield from ("x", "a b", "", "x" * most, "x" * (most + 1), " ", "é")
        case "array":
            items = list(values_of(schema["items"]))
            yield []
            yield from ([item] for item in items)
            if (most := schema.get("maxItems", MAX_ITEMS)) < MAX_ITEMS:
                good = next(item for item in items if accepts(schema["items"], item))
                yield from ([good] * most, [good] * (most + 1))
        case "object":
            yield {}
            names = schema.get("properties", {})
            good = {
                name: next(value for value in values_of(kind) if value is not None and accepts(kind, value))
                for name, kind in names.items()
                if "enum" not in kind or kind["enum"] != [None]
            }
            yield good
            for name in good:
                yield {key: value for key, value in good.items() if key != name}
                yield from ({**good, name: value} for value in values_of(names[name]))
            yield from ({name: 1} for name in ("x", "1", "-1", "01", "4095", "4096", "_a", "eos_token", "tools"))


def bodies(path: str) -> Iterator[dict[str, Any]]:
    """One field after the other at each of its values, and at values of other types; then several fields at once.

    `make test` brings all values to the first good body, and a sixth of them to the others; of the fields that chat and
    completions share, each of the two gets half of the values, and the batch a third.
    """
    properties = {name: kind for name, kind in schema_of(path)["properties"].items() if name not in NAMES}
    good = {name: [value for value in values_of(kind) if accepts(kind, value)] for name, kind in properties.items()}
    for base in BASES[path]:
        is_first = base is BASES[path][0]
        yield from ({key: value for key, value in base.items() if key != name} for name in base)
        yield {**base, "no_such_field": None}
        for name, kind in properties.items():
            is_known = "default" in kind or name in base  # else it is ignored, or refused but for what asks for nothing
            if is_first or is_known:
                first, every = part(path, name, is_first)
                values = itertools.chain(values_of(kind), STRANGE if is_first and is_known else ())
                yield from ({**base, name: value} for value in itertools.islice(values, first, None, every))
    draw = random.Random(13)
    for _ in range(examples(200)):
        names = draw.sample(sorted(good), min(draw.randint(2, 6), len(good)))
        yield {**draw.choice(BASES[path]), **{name: draw.choice(good[name] or [None]) for name in names}}


@pytest.mark.parametrize("path", BASES)
def test_the_schema_accepts_what_the_server_does(server: RunningServer, path: str) -> None:
    schema = schema_of(path)
    num_accepted = num_refused = 0
    for body in bodies(path):
        response = server.ask("POST", path, json.dumps(body).encode())
        said = response.text[:300]
        if accepts(schema, body):
            num_accepted += 1
            if response.status_code == 400:
                assert reasons_of(error_of(response, 400)["message"]), (body, said)
            else:
                assert response.status_code == 200, (body, said)
        else:
            num_refused += 1
            assert response.status_code == 400, (body, said)
    assert num_accepted > 10 < num_refused


DEEP: Any = None
for _ in range(80):
    DEEP = [DEEP]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CALL = {"function": {"name": "a", "arguments": "{"}}
OTHER = {"tools": [{"type": "function", "function": {"name": "a"}}], "tool_choice": {"function": {"name": "b"}}}
FORCED = {"tools": [{"type": "function", "function": {"name": "a"}}], "tool_choice": "required"}
# A body that the document allows and that is refused, for each reason.
UNSAYABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "maximum context length|tokens can hold": (TEXT, {"prompt": [1] * (LIMITS.max_model_len + 1)}),
    "no token is left": (TEXT, {"prompt": "Hi", "allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}),
    "contains a string that is too long": (TEXT, {"prompt": "Hi", "stop": "é" * 200}),
    "is not JSON": (CHAT, {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}, *MESSAGES]}),
    "min_tokens is greater": (TEXT, {"prompt": "Hi", "min_tokens": 5, "max_tokens": 2}),
    "twice as many tokens": (TEXT, {"prompt": "Hi", "use_beam_search": True, "logprobs": 3}),
    "form is given do not work with beam search": (CHAT, {"messages": MESSAGES, "use_beam_search": True, **FORCED}),
    "too many continuations": (TEXT, {"prompt": ["Hi"] * 1000, "n": 2}),
    "not among the tools": (CHAT, {"messages": MESSAGES, **OTHER}),
    "nested too deeply": (CHAT, {"messages": MESSAGES, "documents": [{"a": DEEP}]}),
    r"structured_outputs\.\w+ cannot be used: ": (TEXT, {"prompt": "Hi", "structured_outputs": {"regex": "("}}),
}
# Of limits, of a template that refuses, and of a tokenizer with a text that has no tokens: not with this server.
ELSEWHERE = {"has no tokens", "token budget would be smaller", "is below the fastest step", "chat template"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("name", [None, "a"])
def test_a_chosen_tool_has_a_name(server: RunningServer, path: str, name: str | None) -> None:
    body = {
        "messages": MESSAGES,
        "tools": [{"name": "a", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": name},
        **({"max_tokens": 1} if path == "/v1/messages" else {}),
    }
    assert accepts(schema_of(path), body) == (name is not None)
    assert server.http.post(path, json=body).status_code == (200 if name else 400)


@pytest.mark.parametrize("reason", UNSAYABLE)
def test_what_no_schema_says(server: RunningServer, reason: str) -> None:
    path, body = UNSAYABLE[reason]
    assert accepts(schema_of(path), body)
    assert reasons_of(error_of(server.http.post(path, json=body), 400)["message"]) == [reason]


def test_every_reason_is_shown() -> None:
    assert UNSAYABLE.keys() | ELSEWHERE == REASONS.keys()


def test_the_schema_of_limits(poisoned: RunningServer) -> None:  # noqa: F811
    document = poisoned.http.get("/openapi.json").json()
    schema = document["paths"]["/v1/config"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for body in ({}, {"x": 1}, *({"max_num_seqs": wrong} for wrong in (0, "1", 1.5, None))):
        assert not accepts(schema, body)
        error_of(poisoned.http.post("/v1/config", json=body), 400)
    assert accepts(schema, {"max_num_seqs": 4})
    assert poisoned.http.post("/v1/config", json={"max_num_seqs": 4}).status_code == 200


@pytest.mark.parametrize("limit", [1, 2, 9, 10, 11, 99, 100, 101, 4096, 50257])
def test_decimals_below(limit: int) -> None:
    pattern = re.compile(f"^({decimals_below(limit)})$")
    assert {number for number in range(2 * limit + 20) if pattern.match(str(number))} == set(range(limit))
    assert not any(map(pattern.match, ("", "00", "01", "-1", "+1", "1.0", " 1", "x")))
