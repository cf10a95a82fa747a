"""Parses the text of one answer as it comes."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.server.text.events import Event
from quire.server.text.harmony import read_messages
from quire.server.text.output import Output
from quire.server.text.reader import Reader, Steps
from quire.server.text.reasoning import REASONING_FORMATS
from quire.server.text.tagged_calls import parameter_types
from quire.server.text.tools import TOOL_FORMATS

HARMONY_REASONING, HARMONY_TOOLS = "openai_gptoss", "openai"
_ID_CHARS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Nine letters and digits: what the strictest chat templates (Mistral's) want back."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


class AnswerParser:
    """Splits an answer into content, reasoning and tool calls. The joined events do not depend on the cut of the text.

    What is no well-formed call is content. If arguments stop being JSON, the call ends there, and the rest is content.

    Args:
        reasoning: the name of the format of reasoning; None: there is none.
        tools: the name of the format of tool calls; None: nothing is a call.
        prompt: the text before the answer, which may have opened the reasoning.
        schemas: the tools of the request, whose types say what a tagged argument is.
        most_calls: further calls are left out; None: no limit.
        new_id: makes the id of a call that the model gave none.
    """

    def __init__(
        self,
        reasoning: str | None = None,
        tools: str | None = None,
        *,
        prompt: str = "",
        schemas: Sequence[Mapping[str, Any]] = (),
        most_calls: int | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._output = Output(new_id, most_calls)
        self._reader = Reader(self._output.content)
        self._steps = self._read(reasoning, tools, prompt, schemas)

    def _read(
        self, reasoning: str | None, tools: str | None, prompt: str, schemas: Sequence[Mapping[str, Any]]
    ) -> Steps[None]:
        reader, output = self._reader, self._output
        if reasoning == HARMONY_REASONING or tools == HARMONY_TOOLS:
            yield from read_messages(reader, output, has_tools=tools is not None)
        else:
            if reasoning is not None:
                yield from REASONING_FORMATS[reasoning].read(reader, output, prompt)
            if tools is not None:
                yield from TOOL_FORMATS[tools].read(reader, output, parameter_types(schemas))
        yield from reader.rest()
        reader.flush()

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

    def finish_reason(self, reason: str) -> str:
        """Why the answer ended: `tool_calls` in place of `stop` if the client is to call tools."""
        has_calls = self._output.num_calls > 0 and not self._output.is_broken
        return "tool_calls" if reason == "stop" and has_calls else reason
