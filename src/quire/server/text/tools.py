"""The formats of tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.server.text import python_calls
from quire.server.text.json_calls import read_arguments, read_call, read_calls
from quire.server.text.output import Output
from quire.server.text.reader import SPACE, Malformed, Reader, Steps, Tags, drop
from quire.server.text.tagged_calls import ParameterTypes, TaggedArguments

_NAME = re.compile(r"[\w.:/-]*")

# Reads the text after an opening tag ("" at the start of an answer). Raises Malformed.
Body = Callable[[Reader, Output, str, ParameterTypes], Steps[None]]


@dataclass(frozen=True)
class ToolFormat:
    """How calls stand in an answer.

    Args:
        opening: the tags that begin calls.
        body: reads the text after them.
        closing: tags that may follow a call, and say nothing more.
        start: an answer that begins with this character is a call without a tag.
    """

    opening: Tags
    body: Body
    closing: frozenset[str] = frozenset()
    start: str = ""
    _tags: Tags = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_tags", Tags(*self.opening.names, *self.closing))

    def read(self, reader: Reader, output: Output, types: ParameterTypes) -> Steps[None]:
        """Read content and calls up to the end."""
        if self.start:
            yield from reader.take(SPACE)
            if (yield from reader.peek()) == self.start:
                yield from self._try_call(reader, output, "", types)
        while tag := (yield from reader.until(self._tags)):
            if tag in self.opening.names:
                yield from self._try_call(reader, output, tag, types)
                continue
            reader.flush()
            reader.to(drop if output.is_after_call else output.content)
            reader.skip(len(tag))
            reader.to(output.content)

    def _try_call(self, reader: Reader, output: Output, tag: str, types: ParameterTypes) -> Steps[None]:
        """Read a call; text that turns out to be none is content."""
        reader.to(output.hold)
        reader.skip(len(tag))
        try:
            yield from self.body(reader, output, tag, types)
            reader.flush()
            output.held.clear()
        except Malformed:
            reader.flush()
            output.give_up()
        reader.to(output.content)


def _json(reader: Reader, output: Output, tag: str, types: ParameterTypes) -> Steps[None]:
    yield from read_calls(reader, output)


def _python(reader: Reader, output: Output, tag: str, types: ParameterTypes) -> Steps[None]:
    yield from python_calls.read_calls(reader, output)


def _llama(reader: Reader, output: Output, tag: str, types: ParameterTypes) -> Steps[None]:
    yield from read_call(reader, output)
    while True:
        yield from reader.take(SPACE)
        if (yield from reader.peek()) not in (";", ","):
            return
        reader.skip(1)
        yield from read_call(reader, output)


def _phi(reader: Reader, output: Output, tag: str, types: ParameterTypes) -> Steps[None]:
    if (yield from reader.peek()) != "[":
        raise Malformed
    yield from read_calls(reader, output)


def _mistral(reader: Reader, output: Output, tag: str, types: ParameterTypes) -> Steps[None]:
    yield from reader.take(SPACE)
    name = yield from reader.take(_NAME)
    if not name:
        yield from read_calls(reader, output)
        return
    call_id = None
    if (tag := (yield from reader.at(_MISTRAL_PARTS))) == "[CALL_ID]":
        reader.skip(len(tag))
        call_id = yield from reader.take(_NAME)
        tag = yield from reader.at(_MISTRAL_PARTS)
    if tag == "[ARGS]":
        reader.skip(len(tag))
    yield from read_arguments(reader, output, name, call_id)


_MISTRAL_PARTS = Tags("[CALL_ID]", "[ARGS]")


def _deepseek_v3(reader: Reader, output: Output, tag: str, types: ParameterTypes) -> Steps[None]:
    yield from _enter(reader, tag, _DEEPSEEK_CALL)
    yield from reader.take(_NAME)  # "function"
    yield from reader.expect(_DEEPSEEK_SEPARATOR)
    name = yield from reader.take(_NAME)
    yield from reader.take(SPACE)
    yield from reader.expect("```json")
    yield from read_arguments(reader, output, name)
    yield from reader.take(SPACE)
    yield from reader.expect("```")


def _deepseek_v31(reader: Reader, output: Output, tag: str, types: ParameterTypes) -> Steps[None]:
    yield from _enter(reader, tag, _DEEPSEEK_CALL)
    name = yield from reader.take(_NAME)
    yield from reader.expect(_DEEPSEEK_SEPARATOR)
    yield from read_arguments(reader, output, name)


def _kimi(reader: Reader, output: Output, tag: str, types: ParameterTypes) -> Steps[None]:
    yield from _enter(reader, tag, _KIMI_CALL)
    yield from reader.take(SPACE)
    call_id = yield from reader.take(_NAME)  # functions.get_weather:0
    yield from reader.take(SPACE)
    yield from reader.expect("<|tool_call_argument_begin|>")
    name = call_id.rpartition(":")[0].removeprefix("functions.")
    yield from read_arguments(reader, output, name, call_id)


def _enter(reader: Reader, tag: str, call: str) -> Steps[None]:
    """Read the tag of the first call of a section, if the section's own tag was read."""
    if tag != call:
        yield from reader.take(SPACE)
        yield from reader.expect(call)


def _qwen(reader: Reader, output: Output, tag: str, types: ParameterTypes) -> Steps[None]:
    yield from _enter(reader, tag, "<function=")
    name = yield from reader.take(_NAME)
    yield from reader.expect(">")
    yield from _QWEN_ARGUMENTS.read(reader, output, name, types)


_QWEN_ARGUMENTS = TaggedArguments(
    key="<parameter=",
    key_end=Tags(">"),
    value="",
    value_end=Tags("\n</parameter>", "</parameter>"),
    padding="\n",
    ends=Tags("</function>", "</tool_call>"),
)


def _glm(reader: Reader, output: Output, tag: str, types: ParameterTypes) -> Steps[None]:
    yield from reader.take(SPACE)
    name = yield from reader.take(_NAME)
    yield from _GLM_ARGUMENTS.read(reader, output, name, types)


_GLM_ARGUMENTS = TaggedArguments(
    key="<arg_key>",
    key_end=Tags("</arg_key>"),
    value="<arg_value>",
    value_end=Tags("</arg_value>"),
    padding="",
    ends=Tags("</tool_call>"),
)

_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK_OPENING = Tags("<｜tool▁calls▁begin｜>", _DEEPSEEK_CALL)
_DEEPSEEK_CLOSING = frozenset(("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"))
_KIMI_CALL = "<|tool_call_begin|>"
_TOOL_CALL_END = frozenset(("</tool_call>",))

_PYTHONIC = ToolFormat(Tags("<|python_start|>"), _python, frozenset(("<|python_end|>",)), start="[")
_QWEN = ToolFormat(Tags("<tool_call>", "<function="), _qwen, _TOOL_CALL_END)

CALL_LIST = "call_list"  # the form of the answer with tool_choice `required`

TOOL_FORMATS: dict[str, ToolFormat] = {
    CALL_LIST: ToolFormat(Tags(), _json, start="["),
    "deepseek_v3": ToolFormat(_DEEPSEEK_OPENING, _deepseek_v3, _DEEPSEEK_CLOSING),
    "deepseek_v31": ToolFormat(_DEEPSEEK_OPENING, _deepseek_v31, _DEEPSEEK_CLOSING),
    "glm45": ToolFormat(Tags("<tool_call>"), _glm),
    "granite": ToolFormat(Tags("<|tool_call|>", "<tool_call>"), _json, _TOOL_CALL_END, start="["),
    "hermes": ToolFormat(Tags("<tool_call>"), _json, _TOOL_CALL_END),
    "kimi_k2": ToolFormat(
        Tags("<|tool_calls_section_begin|>", _KIMI_CALL),
        _kimi,
        frozenset(("<|tool_call_end|>", "<|tool_calls_section_end|>")),
    ),
    "llama3_json": ToolFormat(Tags("<|python_tag|>"), _llama, start="{"),
    "llama4_pythonic": _PYTHONIC,
    "mistral": ToolFormat(Tags("[TOOL_CALLS]"), _mistral),
    "phi4_mini_json": ToolFormat(Tags("functools"), _phi),
    "pythonic": _PYTHONIC,
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
}
