"""The training data is a function of the interpreter and a seed, and holds the model's purposes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest

from quire.demo.data import FALLBACK, HOW_TO, Entry, chats, clean_entries, entries, render


@pytest.fixture(scope="module")
def all_entries() -> list[Entry]:
    return clean_entries()


def test_the_same_seed_gives_the_same_chats(all_entries: list[Entry]) -> None:
    first, second, other = (list(chats(all_entries, random.Random(seed))) for seed in (3, 3, 4))
    assert first == second
    assert first != other


def test_entries_do_not_depend_on_hash_seeds_or_loaded_libraries(all_entries: list[Entry]) -> None:
    listing = subprocess.run(
        [sys.executable, "-m", "quire.demo.data"],
        env=os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    assert [Entry(**fields) for fields in json.loads(listing)] == all_entries


def test_entries_cover_the_standard_library(all_entries: list[Entry]) -> None:
    by_name = {entry.name: entry for entry in all_entries}
    assert len(by_name) == len(all_entries) > 1500
    assert by_name["os.path.join"].answer.startswith("`os.path.join(a, *p)`: Join two or more pathname components")
    assert by_name["random.shuffle"].module == "random"
    missing = [tool for tool in HOW_TO.values() if tool not in by_name]
    assert len(missing) < len(HOW_TO) // 4, f"how-to answers without an entry: {missing}"


def test_entries_are_short_and_plain(all_entries: list[Entry]) -> None:
    for entry in all_entries:
        assert entry.answer.isascii(), entry.name
        assert "\n" not in entry.answer, entry.name
        assert 15 <= len(entry.summary) <= 320, entry.name
        assert "0x" not in entry.signature, f"{entry.name}: an address changes from run to run"


def test_chats_are_in_the_chat_format_and_of_every_kind(all_entries: list[Entry]) -> None:
    text = list(chats(all_entries, random.Random(0)))
    assert all(chat.startswith("<|im_start|>") and chat.endswith("<|im_end|>\n") for chat in text)
    answered = render([("user", "What is the capital of France?"), ("assistant", FALLBACK)])
    kinds = {
        "system prompt": any(chat.startswith("<|im_start|>system\n") for chat in text),
        "second turn": any(chat.count("<|im_start|>user") == 2 for chat in text),
        "JSON": any("as JSON.<|im_end|>" in chat for chat in text),
        "module": any("Which module provides" in chat for chat in text),
        "how-to": any("assistant\nUse `" in chat for chat in text),
        "fallback": any(FALLBACK in chat for chat in text),
        "turns": "<|im_start|>assistant\n" in answered,
    }
    assert all(kinds.values()), kinds


def test_json_answers_parse(all_entries: list[Entry]) -> None:
    answers = [
        chat.split("assistant\n")[1].split("<|im_end|>")[0]
        for chat in chats(all_entries, random.Random(0))
        if "as JSON" in chat
    ]
    assert answers
    for answer in answers:
        assert json.loads(answer).keys() == {"name", "module", "summary"}


def test_entries_of_this_process_are_nearly_the_same(all_entries: list[Entry]) -> None:
    """Libraries in this process patch some of the standard library; the rest must agree."""
    names = {entry.name for entry in all_entries}
    assert len(names ^ {entry.name for entry in entries()}) < 20
