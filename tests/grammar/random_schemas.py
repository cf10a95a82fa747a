"""Random JSON Schemas of the supported keywords. Each one has a value that satisfies it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_FORMATS = ("date-time", "time", "date", "duration", "ipv4", "uuid")
_PATTERNS = (r"^[A-Z]{2}-\d{1,3}$", r"^(ab|cd)+$", r"^\w{0,5}$", r"x{2,4}")
_VALUES = (None, True, -3, 0.5, "a", 'quote "', "tab\t", "ü€😀", [1, {"k": []}], {"a": None})


def random_schema(seed: int) -> Schema:
    """An object with up to five properties, three levels deep at most, and sometimes with definitions."""
    numbers = random.Random(seed)
    schema = _object(numbers, 3)
    if numbers.random() < 0.3:
        schema["$defs"] = {"item": _schema(numbers, 1)}
        schema.setdefault("properties", {})["ref"] = {"$ref": "#/$defs/item"}
        schema["required"] = ["ref"]
    return schema


def _schema(numbers: random.Random, depth: int) -> Schema:
    flat = [_text, _integer, _number, _plain, _enum]
    nested = [_object, _array, _any_of, _all_of] if depth else []
    make: Callable[[random.Random, int], Schema] = numbers.choice(flat + nested)
    return make(numbers, depth - 1)


def _text(numbers: random.Random, depth: int) -> Schema:
    kind = numbers.randrange(4)
    if kind == 0:
        return {"type": "string", "format": numbers.choice(_FORMATS)}
    if kind == 1:
        return {"type": "string", "pattern": numbers.choice(_PATTERNS)}
    least = numbers.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + numbers.randrange(8)}


def _integer(numbers: random.Random, depth: int) -> Schema:
    least = numbers.randint(-500, 500)
    schema: Schema = {"type": "integer", "minimum": least, "maximum": least + numbers.randint(10, 2000)}
    if numbers.random() < 0.2:
        schema["multipleOf"] = numbers.choice([2, 5, 7])
    return schema


def _number(numbers: random.Random, depth: int) -> Schema:
    least, width = round(numbers.uniform(-9, 9), 2), numbers.choice([0.5, 3, 100])
    if least.is_integer() and width < 1:  # refused, see grammar.text
        width = 3
    return {"type": "number", "exclusiveMinimum": least, "maximum": least + width}


def _plain(numbers: random.Random, depth: int) -> Schema:
    return {"type": numbers.choice(["boolean", "null", ["boolean", "null"]])}


def _enum(numbers: random.Random, depth: int) -> Schema:
    values = numbers.sample(_VALUES, numbers.randint(1, 4))
    return {"const": values[0]} if len(values) == 1 else {"enum": values}


def _object(numbers: random.Random, depth: int) -> Schema:
    names = numbers.sample(["a", "b c", 'q"', "ä", "id", "$x"], numbers.randint(0, 5))
    schema: Schema = {
        "type": "object",
        "properties": {name: _schema(numbers, depth) for name in names},
        "required": [name for name in names if numbers.random() < 0.7],
        "additionalProperties": False,
    }
    if not names:
        schema["additionalProperties"] = _schema(numbers, 0)
        schema["maxProperties"] = 2
    return schema


def _array(numbers: random.Random, depth: int) -> Schema:
    least = numbers.randrange(3)
    schema: Schema = {"type": "array", "items": _schema(numbers, depth), "minItems": least, "maxItems": least + 2}
    if numbers.random() < 0.3:
        schema["prefixItems"] = [_schema(numbers, 0)]
    return schema


def _any_of(numbers: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(numbers, depth) for _ in range(2)]}


def _all_of(numbers: random.Random, depth: int) -> Schema:
    schema = _object(numbers, depth)
    return {"allOf": [schema, {"type": "object", "minProperties": min(1, len(schema["properties"]))}]}
