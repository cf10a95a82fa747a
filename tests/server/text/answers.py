"""Parses texts for the tests."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import count, groupby
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from quire import demo
from quire.frontend.tokenizer import Tokenizer
from quire.grammar.compiled import compiled_matcher, vocabulary
from quire.server.text.events import Content, Event, Reasoning, ToolArguments, ToolCallStart
from quire.server.text.parser import AnswerParser
from quire.server.text.tagged_calls import parameter_types

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "places": {"type": "array"},
                    "exact": {"type": "boolean"},
                },
            },
        },
    }
]


def parse(pieces: str | Iterable[str], **formats: Any) -> tuple[list[Event], str]:
    """The events of an answer, with neighbouring texts joined, and its finish reason if it ends with `stop`."""
    numbers = count()
    parser = AnswerParser(types=parameter_types(TOOLS), new_id=lambda: f"id{next(numbers)}", **formats)
    pieces = [pieces] if isinstance(pieces, str) else pieces
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    return merged(events), parser.finish_reason("stop")


def merged(events: list[Event]) -> list[Event]:
    """The events with neighbouring texts joined."""
    joined: list[Event] = []
    for (kind, index), group in groupby(events, key=lambda event: (type(event), getattr(event, "index", None))):
        if kind is ToolCallStart:
            joined += group
        else:
            text = "".join(event.text for event in group if not isinstance(event, ToolCallStart))
            joined.append(ToolArguments(index, text) if index is not None else kind(text))
    return joined


def text_of(events: list[Event], kind: type[Content | Reasoning]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def calls_of(events: list[Event]) -> list[tuple[str, str, str]]:
    """(id, name, arguments) of every call."""
    arguments = {event.index: event.text for event in events if isinstance(event, ToolArguments)}
    return [(e.id, e.name, arguments.get(e.index, "")) for e in events if isinstance(e, ToolCallStart)]


TOKENIZER = Tokenizer.from_folder(demo.path("target"))


@lru_cache(maxsize=8)
def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    return vocabulary(tokenizer.backend.to_str(), [end], tokenizer.vocab_size)


@lru_cache(maxsize=8)
def _compiled(grammar: str, tokenizer: Tokenizer) -> LLMatcher:
    return compiled_matcher(_vocabulary(tokenizer), grammar)


def matcher_of(grammar: str, tokenizer: Tokenizer = TOKENIZER) -> LLMatcher:
    return _compiled(grammar, tokenizer).deep_copy()


def allows(grammar: str, text: str, tokenizer: Tokenizer = TOKENIZER) -> bool:
    """Whether an answer may be this text."""
    matcher, tokens = matcher_of(grammar, tokenizer), tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
