"""OpenAI's harmony format: an answer is a list of messages, each with a channel, and calls are messages to a tool."""

from __future__ import annotations

import re

from msgspec.structs import replace

from quire.sampling_params import StructuredOutputsParams
from quire.server.text.json_calls import read_arguments
from quire.server.text.output import Output
from quire.server.text.reader import SPACE, Malformed, Reader, Steps, Tags, drop

_HEADERS = Tags("<|start|>", "<|channel|>", "to=")
_BODY = Tags("<|message|>")
ENDS = Tags("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_MARKS = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.:/-]+)")
NEXT_MESSAGE = "<|end|><|start|>assistant"  # the end of a message, before another message of the same answer

# The token that ends reasoning, and the tokens that begin it.
REASONING_TOKENS = ("<|end|>", "<|channel|>", "analysis", "<|message|>")


def header(channel: str) -> str:
    """What begins a message, behind `<|start|>assistant`."""
    return f"<|channel|>{channel}<|message|>"


def has_begun(prompt: str) -> bool:
    """Whether a prompt ends inside of a message."""
    return prompt.rfind("<|message|>") > prompt.rfind("<|start|>")


def constrained(constraint: StructuredOutputsParams, prompt: str) -> StructuredOutputsParams:
    """The constraint for the final message, behind any reasoning; for what follows, if the prompt has begun it."""
    if has_begun(prompt):
        return constraint
    return replace(
        constraint,
        reasoning_start=[header("analysis")],
        reasoning_end=[NEXT_MESSAGE],
        answer_start=[header("final"), header("final <|constrain|>json")],
    )


def read_messages(reader: Reader, output: Output, *, has_tools: bool) -> Steps[None]:
    """Read every message. Without a header a text is content, and without tools a call is content too."""
    while (yield from reader.peek()):
        yield from reader.take(SPACE)
        if not (yield from reader.at(_HEADERS)):
            yield from _read_text(reader)
            continue
        header: list[str] = []
        reader.to(header.append)
        tag = yield from reader.until(_BODY)
        reader.flush()
        text = "".join(header)
        if not tag:
            output.content(text)
            return
        reader.to(drop)
        reader.skip(len(tag))
        channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
        output.edge()
        if has_tools and recipient is not None:
            reader.to(output.hold)
            try:
                yield from read_arguments(reader, output, recipient[1])
                reader.to(drop)
            except Malformed:
                reader.flush()
                output.give_up()
                reader.to(output.content)
        elif channel is not None and channel[1] == "analysis":
            reader.to(output.reasoning)
        else:
            reader.to(output.content)
        yield from _read_text(reader)
        output.edge()
        reader.to(output.content)


def _read_text(reader: Reader) -> Steps[None]:
    """Read a text, and the tag that ends it, if the tag does not begin the next message."""
    tag = yield from reader.until(ENDS)
    reader.flush()
    if tag in _MARKS:
        reader.to(drop)
        reader.skip(len(tag))
        reader.flush()
