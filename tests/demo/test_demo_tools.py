"""The demo model with tools: what its training shows it, what its template writes, and what it answers."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any, get_args

import jinja2.sandbox
import pytest
import torch
from tokenizers import Tokenizer

import quire.demo
from quire.demo import data
from quire.demo.data import (
    FALLBACK,
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
from quire.model_config import load_model_config
from tests.loading import load_model
from tests.models.paged_run import greedy

END_OF_TURN = 2
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
SHUFFLE = "`random.shuffle(x)`: Shuffle list x in place, and return None."
BOTH = tools_turn([GET_WEATHER, LOOK_UP])
ASKED = ("user", "What's the weather in Paris?")
CALL = ("assistant", hermes_call("get_weather", {"city": "Paris"}))
# Questions that no training has seen in a chat with tools.
ANSWERS: dict[str, tuple[list[data.Turn], str]] = {
    "a call": ([*BOTH, ASKED], CALL[1]),
    "an answer to a result": (
        [*BOTH, ASKED, CALL, ("tool", '{"sky": "rainy", "degrees": 4}')],
        "It is rainy in Paris.",
    ),
    "a call of another tool": ([*BOTH, ("user", "Explain len.")], hermes_call("look_up", {"entry": "len"})),
    "no tool that fits": ([*tools_turn(["send_email(to)", LOOK_UP]), ASKED], FALLBACK),
    "no tool for this": ([*tools_turn([GET_WEATHER]), ("user", "Explain random.shuffle.")], SHUFFLE),
    "a question for none": ([*BOTH, ("user", "How are you?")], FALLBACK),
}


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
    """Without tools, a chat is its turns; see also test_demo_model.py."""
    source = (quire.demo.path("target") / "chat_template.jinja").read_text()
    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(source)
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


@pytest.fixture(scope="module")
def answer() -> Any:
    model = load_model(load_model_config(quire.demo.path("target")), torch.bfloat16)
    tokenizer = Tokenizer.from_file(str(quire.demo.path("target") / "tokenizer.json"))

    def answer(turns: list[data.Turn]) -> str:
        prompt = tokenizer.encode(render(turns) + "<|im_start|>assistant\n", add_special_tokens=False).ids
        output = greedy(model, torch.bfloat16, prompt, 120, stop=END_OF_TURN)
        assert output[-1] == END_OF_TURN
        text: str = tokenizer.decode(output)
        return text

    return answer


@pytest.mark.parametrize("name", ANSWERS)
def test_the_model_calls_tools_and_answers_to_results(name: str, answer: Any) -> None:
    turns, expected = ANSWERS[name]
    assert answer(turns) == expected
