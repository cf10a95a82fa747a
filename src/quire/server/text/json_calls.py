"""JSON as it comes, and the calls that are written as JSON objects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.server.text.output import Output
from quire.server.text.reader import SPACE, Malformed, Reader, Steps

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.\w]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")


def read_string(reader: Reader) -> Steps[str]:
    """Read a JSON string -> its JSON text. Raises Malformed."""
    yield from reader.expect('"')
    pieces = ['"']
    while True:
        pieces.append((yield from reader.take(_PLAIN)))
        if (yield from reader.peek()) != "\\":
            yield from reader.expect('"')
            return "".join(pieces) + '"'
        reader.skip(1)
        char = yield from reader.peek()
        if not char or char not in '"\\/bfnrtu':
            raise Malformed
        reader.skip(1)
        pieces.append("\\" + char)
        if char == "u":
            pieces.append((yield from read_hex(reader, 4)))


def read_hex(reader: Reader, count: int) -> Steps[str]:
    """Read hexadecimal digits. Raises Malformed."""
    digits = ""
    while len(digits) < count:
        char = yield from reader.peek()
        if not char or char not in "0123456789abcdefABCDEF":
            raise Malformed
        reader.skip(1)
        digits += char
    return digits


def read_word(reader: Reader) -> Steps[str]:
    """Read letters, digits and signs, such as a number has."""
    return (yield from reader.take(_WORD))


def read_scalar(reader: Reader) -> Steps[str]:
    """Read a JSON number, true, false or null. Raises Malformed."""
    word = yield from read_word(reader)
    if not _SCALAR.fullmatch(word):
        raise Malformed
    return word


def read_value(
    reader: Reader,
    string: Callable[[Reader], Steps[str]] = read_string,
    scalar: Callable[[Reader], Steps[str]] = read_scalar,
) -> Steps[None]:
    """Read a value with all that it contains. It may be nested as deep as it likes. Raises Malformed.

    Args:
        string, scalar: read the text between brackets, braces, commas and colons.
    """
    closers: list[str] = []
    while True:
        yield from reader.take(SPACE)
        char = yield from reader.peek()
        if char and char in "{[":
            reader.skip(1)
            closers.append("}" if char == "{" else "]")
            yield from reader.take(SPACE)
            if (yield from reader.peek()) != closers[-1]:
                if char == "{":
                    yield from _read_key(reader, string)
                continue
        elif char and char in "\"'":
            yield from string(reader)
        else:
            yield from scalar(reader)
        while closers:  # a value has ended
            yield from reader.take(SPACE)
            if (yield from reader.peek()) == ",":
                reader.skip(1)
                if closers[-1] == "}":
                    yield from _read_key(reader, string)
                break
            yield from reader.expect(closers.pop())
        else:
            return


def _read_key(reader: Reader, string: Callable[[Reader], Steps[str]]) -> Steps[None]:
    yield from reader.take(SPACE)
    yield from string(reader)
    yield from reader.take(SPACE)
    yield from reader.expect(":")


def read_arguments(reader: Reader, output: Output, name: str, call_id: str | None = None) -> Steps[None]:
    """Read a call's arguments: a JSON object, which is written as it comes. Raises Malformed."""
    yield from reader.take(SPACE)
    if (yield from reader.peek()) != "{":
        raise Malformed
    reader.flush()
    output.start(name, call_id)
    reader.to(output.arguments)
    yield from read_value(reader)
    reader.to(output.hold)
    output.end()


def read_call(reader: Reader, output: Output) -> Steps[None]:
    """Read `{"name": ..., "arguments": {...}}`: the keys in any order, further keys ignored. Raises Malformed."""
    name: str | None = None
    early: str | None = None  # arguments that came before the name
    is_written = False
    yield from reader.take(SPACE)
    yield from reader.expect("{")
    while True:
        yield from reader.take(SPACE)
        key = json.loads((yield from read_string(reader)))
        yield from reader.take(SPACE)
        yield from reader.expect(":")
        yield from reader.take(SPACE)
        if key == "name":
            name = json.loads((yield from read_string(reader)))
        elif key not in ("arguments", "parameters"):
            yield from read_value(reader)
        elif is_written or early is not None:
            raise Malformed
        elif name is not None:
            yield from read_arguments(reader, output, name)
            is_written = True
        else:
            reader.flush()
            num_held = len(output.held)
            if (yield from reader.peek()) != "{":
                raise Malformed
            yield from read_value(reader)
            reader.flush()
            early = "".join(output.held[num_held:])
        yield from reader.take(SPACE)
        if (yield from reader.peek()) != ",":
            break
        reader.skip(1)
    yield from reader.expect("}")
    if not is_written:
        reader.flush()
        output.start(name or "")
        output.arguments(early or "{}")
        output.end()


def read_calls(reader: Reader, output: Output) -> Steps[None]:
    """Read one call, or a JSON list of calls. Raises Malformed."""
    yield from reader.take(SPACE)
    if (yield from reader.peek()) != "[":
        yield from read_call(reader, output)
        return
    reader.skip(1)
    yield from read_call(reader, output)
    yield from reader.take(SPACE)
    while (yield from reader.peek()) == ",":
        reader.skip(1)
        yield from read_call(reader, output)
        yield from reader.take(SPACE)
    yield from reader.expect("]")
