"""Turns, and parameters as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from quire.chat.conversation import PARAMETERS, Conversation
from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams


def test_turns_and_system_prompt() -> None:
    conversation = Conversation("Be brief.")
    conversation.add("1?", "one")
    assert conversation.asked("2?") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2?"},
    ]
    assert len(conversation.turns) == 2, "a question without an answer is not kept"
    conversation.set("system", "default")
    assert conversation.asked("2?")[0] == {"role": "user", "content": "1?"}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.5", 0.5),
        ("temperature", "0", 0),
        ("max_tokens", "7", 7),
        ("seed", "-3", -3),
        ("stop", "END", "END"),
        ("stop", "5", "5"),
        ("stop", '"a b"', "a b"),
        ("stop", '["a", "b"]', ["a", "b"]),
    ],
)
def test_values(name: str, text: str, value: Any) -> None:
    conversation = Conversation()
    conversation.set(name, text)
    assert conversation.parameters == {name: value}
    conversation.set(name, "default")
    assert conversation.parameters == {}


@pytest.mark.parametrize(
    ("name", "text", "param", "part"),
    [
        ("temprature", "1", "temprature", "Did you mean temperature?"),
        ("temperature", "hot", "temperature", "hot"),
        ("temperature", "3", "temperature", "[0, 2]"),
        ("temperature", "NaN", "temperature", "finite"),
        ("top_p", "1e999", "top_p", "finite"),
        ("max_tokens", "1.5", "max_tokens", "integer"),
        ("max_tokens", "true", "max_tokens", "integer"),
        ("max_tokens", "[" * 100_000, "max_tokens", "integer"),
        ("stop", "[1]", "stop", "string"),
        ("min_tokens", "9", "min_tokens", "greater than max_tokens"),
    ],
)
def test_an_illegal_value_changes_nothing(name: str, text: str, param: str, part: str) -> None:
    conversation = Conversation()
    conversation.set("max_tokens", "8")
    with pytest.raises(InvalidRequestError) as caught:
        conversation.set(name, text)
    assert caught.value.param == param
    assert part in caught.value.message
    assert conversation.parameters == {"max_tokens": 8}


def test_parameters_are_sampling_fields() -> None:
    assert set(PARAMETERS) <= set(SamplingParams.__struct_fields__)
