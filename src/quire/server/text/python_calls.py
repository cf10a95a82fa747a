"""Calls that are written as a Python list: `[get_weather(city="Paris", days=3), ...]`."""

from __future__ import annotations

import json
import re

from quire.server.text.json_calls import read_hex, read_scalar, read_value, read_word
from quire.server.text.output import Output
from quire.server.text.reader import SPACE, Malformed, Reader, Steps, drop

_NAME = re.compile(r"[\w.-]*")
_PLAIN = {quote: re.compile(rf"[^{quote}\\\n]*") for quote in "\"'"}
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}


def read_calls(reader: Reader, output: Output) -> Steps[None]:
    """Read a list of calls with keyword arguments; the values are literals. Raises Malformed."""
    yield from reader.take(SPACE)
    yield from reader.expect("[")
    while True:
        yield from _read_call(reader, output)
        yield from reader.take(SPACE)
        if (yield from reader.peek()) != ",":
            break
        reader.skip(1)
    yield from reader.expect("]")


def _read_call(reader: Reader, output: Output) -> Steps[None]:
    yield from reader.take(SPACE)
    name = yield from reader.take(_NAME)
    yield from reader.expect("(")
    key = yield from _read_key(reader)
    reader.flush()
    output.start(name)
    output.arguments("{")
    literals = _Literals(output)
    while key:
        output.arguments(json.dumps(key, ensure_ascii=False) + ": ")
        yield from reader.take(SPACE)
        reader.to(output.arguments)
        yield from read_value(reader, literals.read_string, literals.read_scalar)
        reader.to(drop)
        yield from reader.take(SPACE)
        if (yield from reader.peek()) != ",":
            break
        reader.skip(1)
        output.arguments(", ")
        if not (key := (yield from _read_key(reader))):
            raise Malformed
    yield from reader.expect(")")
    output.arguments("}")
    reader.to(output.hold)
    output.end()


def _read_key(reader: Reader) -> Steps[str]:
    """The name of the next argument; "" before the closing parenthesis. Raises Malformed."""
    yield from reader.take(SPACE)
    if (yield from reader.peek()) == ")":
        return ""
    key = yield from reader.take(_NAME)
    if not key:
        raise Malformed
    yield from reader.take(SPACE)
    yield from reader.expect("=")
    return key


class _Literals:
    """Reads Python's literals and writes them as JSON. Structure between them is the same in both."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def read_scalar(self, reader: Reader) -> Steps[str]:
        if (yield from reader.peek()) not in ("T", "F", "N"):
            return (yield from read_scalar(reader))
        reader.to(drop)
        word = yield from read_word(reader)
        reader.to(self._output.arguments)
        if word not in _CONSTANTS:
            raise Malformed
        self._output.arguments(_CONSTANTS[word])
        return word

    def read_string(self, reader: Reader) -> Steps[str]:
        reader.to(drop)
        quote = yield from reader.peek()
        if not quote or quote not in "\"'":
            raise Malformed
        reader.skip(1)
        self._output.arguments('"')
        while True:
            reader.to(self._write)
            yield from reader.take(_PLAIN[quote])
            reader.to(drop)
            if (yield from reader.peek()) != "\\":
                break
            reader.skip(1)
            yield from self._read_escape(reader)
        yield from reader.expect(quote)
        self._output.arguments('"')
        reader.to(self._output.arguments)
        return ""

    def _read_escape(self, reader: Reader) -> Steps[None]:
        char = yield from reader.peek()
        reader.skip(len(char))
        if char in _HEX_LENGTHS:
            digits = yield from read_hex(reader, _HEX_LENGTHS[char])
            code = int(digits, 16)
            if code <= 0xFFFF:
                self._output.arguments(f"\\u{code:04x}")  # a half of a pair too, which is no text
            elif code <= 0x10FFFF:
                self._write(chr(code))
            else:
                raise Malformed
        else:
            self._write(_ESCAPES.get(char, "\\" + char))

    def _write(self, text: str) -> None:
        self._output.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
