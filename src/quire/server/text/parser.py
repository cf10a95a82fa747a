"""Parses the text of one answer as it comes."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from types import MappingProxyType

from quire.formats.answer_formats import HARMONY_REASONING, HARMONY_TOOLS
from quire.server.text.events import Event
from quire.server.text.harmony import read_messages
from quire.server.text.json_calls import read_arguments
from quire.server.text.output import Output
from quire.server.text.reader import Malformed, Reader, Steps
from quire.server.text.reasoning import REASONING_FORMATS
from quire.server.text.tagged_calls import ParameterTypes
from quire.server.text.tools import CALL_LIST, TOOL_FORMATS

__all__ = ["CALL_LIST", "AnswerParser", "new_call_id"]

_ID_CHARS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Nine letters and digits, as the strictest chat templates (Mistral's) require."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


class AnswerParser:
    """Splits an answer into content, reasoning and tool calls. The joined events do not depend on the cut of the text.

    Text that is no well-formed call is content. If arguments stop being JSON, the call ends there, and the rest is
    content.

    Args:
        reasoning: the name of the format of reasoning; None: there is none.
        tools: the name of the format of tool calls; None: nothing is a call.
        named: the tool that the answer behind the reasoning is the arguments of.
        prompt: the text before the answer, which may have opened the reasoning.
        types: the types of the parameters of the request's tools, for tagged arguments: see `parameter_types`.
        most_calls: further calls are left out; None: no limit.
        new_id: makes the id of a call that the model gave none.
    """

    def __init__(
        self,
        reasoning: str | None = None,
        tools: str | None = None,
        *,
        named: str | None = None,
        prompt: str = "",
        types: ParameterTypes = MappingProxyType({}),
        most_calls: int | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._output = Output(new_id, most_calls)
        self._reader = Reader(self._output.content)
        self._is_named = named is not None
        if reasoning == HARMONY_REASONING or tools == HARMONY_TOOLS:
            parts = [read_messages(self._reader, self._output, has_tools=tools is not None)]
        else:
            parts = []
            if reasoning is not None:
                parts.append(REASONING_FORMATS[reasoning].read(self._reader, self._output, prompt))
            if named is not None:
                parts.append(_read_named(self._reader, self._output, named))
            elif tools is not None:
                parts.append(TOOL_FORMATS[tools].read(self._reader, self._output, types))
        self._steps = self._read(parts)

    def _read(self, parts: Sequence[Steps[None]]) -> Steps[None]:
        for part in parts:
            yield from part
        yield from self._reader.rest()
        self._reader.flush()

    def feed(self, text: str) -> list[Event]:
        """The events that this text completes."""
        self._reader.add(text)
        next(self._steps)
        return self._output.take()

    def finish(self) -> list[Event]:
        """The last events, at the end of the answer."""
        self._reader.is_ended = True
        next(self._steps, None)
        return self._output.finish()

    @property
    def num_tags(self) -> int:
        """The number of tags so far. A call counts as one where its arguments begin."""
        return self._output.num_tags

    @property
    def is_at_tag(self) -> bool:
        """Whether nothing but space has come since the last tag, or a call is open. This space is dropped."""
        return self._output.is_edge

    def finish_reason(self, reason: str) -> str:
        """Why the answer ended: `tool_calls` in place of `stop` if the model has chosen to call tools."""
        has_calls = self._output.num_calls > 0 and not self._output.is_broken and not self._is_named
        return "tool_calls" if reason == "stop" and has_calls else reason


def _read_named(reader: Reader, output: Output, name: str) -> Steps[None]:
    try:
        yield from read_arguments(reader, output, name)
    except Malformed:
        reader.flush()
        output.give_up()
    reader.to(output.content)


def marks(reasoning: str | None, tools: str | None) -> frozenset[str]:
    """The tags by which reasoning and calls are found: the text must hold them, even where they are special tokens."""
    found: frozenset[str] = frozenset()
    if reasoning == HARMONY_REASONING or tools == HARMONY_TOOLS:
        return found | {"<|channel|>"}
    if reasoning is not None:
        found |= REASONING_FORMATS[reasoning].opening.names | REASONING_FORMATS[reasoning].closing.names
    if tools is not None:
        found |= TOOL_FORMATS[tools].opening.names
    return found
