"""What lines become, and where they are kept."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.chat import typed
from quire.chat.typed import MORE, PROMPT, Typed, line_reader, read_typed


def _typist(*lines: str) -> tuple[Callable[[str], str], list[str]]:
    """Types the lines, then Ctrl-D; and the prompts that were shown."""
    rest, prompts = iter(lines), []

    def read_line(prompt: str) -> str:
        prompts.append(prompt)
        line = next(rest, None)
        if line is None:
            raise EOFError
        return line

    return read_line, prompts


@pytest.mark.parametrize(
    ("lines", "text", "is_command"),
    [
        (["one line"], "one line", False),
        ([""], "", False),
        (["/set top_p 1"], "/set top_p 1", True),
        (['"""a', "b", '  c"""'], "a\nb\n  c", False),
        (['"""', "a", '"""'], "\na\n", False),
        (['"""one"""'], "one", False),
        (['  """one""" '], "one", False),
        (['"""/usr is a folder?"""'], "/usr is a folder?", False),
        (['/set system """Be', 'brief."""'], "/set system Be\nbrief.", True),
        (['what is """?'], 'what is """?', False),
        (["a\\", "b\\", "c"], "a\nb\nc", False),
        (["two pasted\nlines"], "two pasted\nlines", False),
    ],
)
def test_messages(lines: list[str], text: str, is_command: bool) -> None:
    read_line, prompts = _typist(*lines)
    assert read_typed(read_line) == Typed(text, is_command)
    assert prompts == [PROMPT] + [MORE] * (len(lines) - 1)


@pytest.mark.parametrize("lines", [[], ['"""a'], ["a\\"]])
def test_the_end_of_the_input_ends_a_message(lines: list[str]) -> None:
    with pytest.raises(EOFError):
        read_typed(_typist(*lines)[0])


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "quire" / "chat_history"


def _type(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    read_typist, _ = _typist(*lines)
    monkeypatch.setattr("builtins.input", read_typist)
    read_line = line_reader()
    for _ in lines:
        read_line(PROMPT)


def test_lines_are_kept_for_their_owner(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _type(monkeypatch, "one", "", "two", "two")
    _type(monkeypatch, "three")
    assert state.read_text().splitlines() == ["one", "two", "three"]
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    assert stat.S_IMODE(state.parent.stat().st_mode) == 0o700


def test_only_so_many_lines_are_kept(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed, "MAX_HISTORY_LINES", 3)
    _type(monkeypatch, *"abcde")
    assert state.read_text().splitlines() == ["c", "d", "e"]


def test_no_place_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    _type(monkeypatch, "one")
