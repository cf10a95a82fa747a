"""The formats of reasoning: the reasoning stands between two tags before the answer."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from quire.sampling_params import StructuredOutputsParams
from quire.server.text.output import Output
from quire.server.text.reader import SPACE, Reader, Steps, Tags, drop

_TAIL = 64  # the characters at the end of a prompt in which a tag may be


@dataclass(frozen=True)
class ReasoningFormat:
    """The tags, and whether an answer begins with reasoning if its prompt and the answer have no tag."""

    opening: Tags
    closing: Tags
    is_assumed: bool = False

    def is_open(self, prompt: str) -> bool | None:
        """Whether an answer begins with reasoning: the prompt may have opened or closed it; None: the model decides."""
        tail = prompt[-_TAIL:].rstrip()
        if tail.endswith(tuple(self.closing.names)):
            return False
        return True if self.is_assumed or tail.endswith(tuple(self.opening.names)) else None

    def constrained(self, constraint: StructuredOutputsParams, prompt: str) -> StructuredOutputsParams:
        """The constraint for the text after the reasoning."""
        if (is_open := self.is_open(prompt)) is False:
            return constraint
        start = None if is_open else sorted(self.opening.names)
        return replace(constraint, reasoning_start=start, reasoning_end=sorted(self.closing.names))

    def read(self, reader: Reader, output: Output, prompt: str) -> Steps[None]:
        """Read the reasoning, if there is any, and the space after it."""
        yield from reader.take(SPACE)
        if tag := (yield from reader.at(self.opening)):
            reader.to(drop)
            reader.skip(len(tag))
        elif not self.is_open(prompt):
            return
        output.edge()
        reader.to(output.reasoning)
        tag = yield from reader.until(self.closing)
        if tag:
            reader.to(drop)
            reader.skip(len(tag))
            output.edge()
        reader.to(output.content)


_THINK = ReasoningFormat(Tags("<think>"), Tags("</think>"))

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(_THINK.opening, _THINK.closing, is_assumed=True),
    "glm45": _THINK,
    "granite": ReasoningFormat(
        Tags("Here is my thought process:", "Here's my thought process:"),
        Tags("Here is my response:", "Here's my response:"),
    ),
    "mistral": ReasoningFormat(Tags("[THINK]"), Tags("[/THINK]")),
    "qwen3": _THINK,
}
