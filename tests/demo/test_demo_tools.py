"""Teaching the demo model to call tools: its training data, and the output of its template."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any, get_args

import jinja2.sandbox
import pytest

import quire.demo
from quire.demo.data import (
    GET_WEATHER,
    LOOK_UP,
    Entry,
    Kind,
    clean_entries,
    hermes_call,
    is_held_out,
    render,
    tool_chats,
    tool_questions,
    tools_turn,
)

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
BOTH = tools_turn([GET_WEATHER, LOOK_UP])
ASKED = ("user", "What's the weather in Paris?")
CALL = ("assistant", hermes_call("get_weather", {"city": "Paris"}))


@pytest.fixture(scope="module")
def all_entries() -> list[Entry]:
    return clean_entries()


def test_chats_with_tools_are_of_every_kind(all_entries: list[Entry]) -> None:
    chats = list(islice(tool_chats(all_entries, random.Random(0)), 2000))
    assert chats == list(islice(tool_chats(all_entries, random.Random(0)), 2000))
    listed = [dict(chat).get("tools", "").split("\n") for chat in chats]
    called = ["<tool_call>" in render(chat) for chat in chats]
    without = [not tools[0] for tools in listed]
    others = [not {GET_WEATHER, LOOK_UP} & {*tools} for tools in listed]
    for share, least, most in (
        (sum(without), 0.4, 0.6),
        (sum(called), 0.2, 0.35),
        (sum(others) - sum(without), 0.04, 0.15),
    ):
        assert least < share / len(chats) < most
    for chat, tools in zip(chats, listed, strict=True):
        for role, content in chat:
            if role == "assistant" and content.startswith("<tool_call>"):
                assert any(tool.split("(")[0] in content for tool in tools), chat
        assert not tools[0] or not any(is_held_out(content) for role, content in chat if role == "user"), chat


def test_questions_are_those_that_no_chat_has(all_entries: list[Entry]) -> None:
    for kind in get_args(Kind):
        asked = tool_questions(all_entries, kind, 30, seed=0)
        for turns, answer in asked:
            assert turns[0][0] == "tools"
            assert all(is_held_out(content) for role, content in turns if role == "user")
            assert answer.startswith("<tool_call>") == (kind == "call")
            assert (turns[-1][0] == "tool") == (kind == "result")
        assert asked != tool_questions(all_entries, kind, 30, seed=1)


def test_the_chat_template_is_the_training_format() -> None:
    """Without tools, a chat is its turns."""
    from quire.demo.train import CHAT_TEMPLATE

    assert (quire.demo.path("target") / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(CHAT_TEMPLATE)
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        {"role": "user", "content": ASKED[1]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rainy"},
    ]
    turns = [ASKED, CALL, ("tool", "rainy")]
    look_up = {"function": {"name": "look_up", "parameters": {"properties": {"entry": {}}}}}
    assert template.render(messages=messages, tools=[WEATHER, look_up]) == render([*BOTH, *turns])
    for tools in (None, ()):
        assert template.render(messages=messages, tools=tools) == render(turns)
    lies: list[Any] = [{}, {"parameters": None}, {"parameters": {"properties": ["city"]}}, {"parameters": {}}]
    for lie in lies:
        text = template.render(messages=[], tools=[{"function": {"name": "f", **lie}}])
        assert text == render(tools_turn(["f()"]))


def test_only_what_the_model_says_is_learned(all_entries: list[Entry]) -> None:
    """Chats lie whole beside each other in a row, each with positions of its own."""
    from quire.demo.train import IGNORED, ROW_TOKENS, learned, load_tokenizer, tool_batches

    tokenizer = load_tokenizer(quire.demo.path("target"))
    first = next(tool_chats(all_entries, random.Random(0)))
    batch = next(tool_batches(tokenizer, all_entries, random.Random(0), 4))
    assert batch.positions is not None
    assert batch.token_ids.shape == batch.targets.shape == batch.positions.shape == (4, ROW_TOKENS)
    token_ids, targets = learned(tokenizer, first)
    assert batch.token_ids[0, : len(token_ids)].tolist() == token_ids
    assert batch.targets[0, : len(targets)].tolist() == targets
    assert batch.positions[0, : len(targets) + 1].tolist() == [*range(len(targets)), 0]
    said = [content for role, content in first if role == "assistant"]
    assert tokenizer.decode([token for token in targets if token != IGNORED]) == "".join(
        f"{content}<|im_end|>\n" for content in said
    )
