"""Commands, answers and their ends, with a scripted model."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import pytest

from quire.chat.conversation import PARAMETERS, Conversation
from quire.chat.model import Piece
from quire.chat.session import Session
from quire.errors import ContextLengthError, EngineDeadError, EngineRestartedError, QuireError

Script = Sequence[str | BaseException]


class ScriptedModel:
    """Answers with the texts of one script after the other, and raises the errors in it."""

    name = "scripted"

    def __init__(self, *scripts: Script, finish_reason: str = "stop") -> None:
        self._scripts, self._finish_reason = iter(scripts), finish_reason
        self.defaults: dict[str, Any] = {"temperature": 0.7, "max_tokens": None}
        self.asked: list[tuple[list[str], dict[str, Any]]] = []
        self.num_open = 0

    def answer(
        self, messages: Sequence[Mapping[str, str]], parameters: Mapping[str, Any]
    ) -> Generator[Piece, None, None]:
        self.asked.append(([message["content"] for message in messages], dict(parameters)))
        self.num_open += 1
        try:
            for part in next(self._scripts):
                if isinstance(part, BaseException):
                    raise part
                yield Piece(part)
            yield Piece("", self._finish_reason)
        finally:
            self.num_open -= 1


def _talk(model: ScriptedModel, *typed: str | BaseException, system: str | None = None) -> Conversation:
    """A whole chat, which ends with Ctrl-D."""
    lines: Iterator[str | BaseException] = iter([*typed, EOFError()])

    def read_line(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    conversation = Conversation(system)
    Session(model, conversation).talk(read_line)
    assert next(lines, None) is None, "the chat ended before what was typed"
    assert model.num_open == 0, "an answer was left running"
    return conversation


def test_the_model_hears_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = ScriptedModel(["o", "ne"], ["two\n"])
    _talk(model, "1?", "  ", "/set temperature 0", "2?", system="Be brief.")
    assert model.asked == [(["Be brief.", "1?"], {}), (["Be brief.", "1?", "one", "2?"], {"temperature": 0})]
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "scripted: /help lists the commands. Ctrl-D leaves."
    assert [out[1], out[3]] == ["one", "two"]


def test_clear_forgets_turns_only() -> None:
    model = ScriptedModel(["one"], ["two"])
    _talk(model, "/set seed 5", "/set system Be brief.", "1?", "/clear", "2?")
    assert model.asked[1] == (["Be brief.", "2?"], {"seed": 5})


def test_set_shows(capsys: pytest.CaptureFixture[str]) -> None:
    _talk(ScriptedModel(), "/set", "/set top_k 3", "/set top_k", "/set system", '/set system """Be', 'brief."""')
    lines = capsys.readouterr().out.splitlines()[1:]
    shown = [line.split()[:2] for line in lines]
    count = len(PARAMETERS)
    assert [name for name, _ in shown[: count + 1]] == [*PARAMETERS, "system"]
    assert dict(shown[:count]) == dict.fromkeys(PARAMETERS, "default") | {"temperature": "0.7", "max_tokens": "none"}
    assert lines[count + 1].split()[:3] == ["top_k", "3", "(set)"]
    assert lines[count + 1] == lines[count + 2]
    assert lines[count + 3].split() == ["system", "none"]
    assert [line.strip() for line in lines[count + 4 :][:2]] == ["system              Be", "brief."]


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("/sett x", "There is no command /sett. Did you mean /set?"),
        ("/usr/bin/env is what?", "/help lists the commands. A message that begins with a slash goes between"),
        ("/set temprature", "Did you mean temperature?"),
        ("/set temperature 9", "temperature is out of range"),
    ],
)
def test_a_wrong_command_is_told(command: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = ScriptedModel(["still here"])
    _talk(model, command, "Hello?")
    captured = capsys.readouterr()
    assert part in captured.err
    assert "still here" in captured.out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["/help", "/bye"])
    Session(ScriptedModel(), Conversation()).talk(lambda prompt: next(lines))
    assert next(lines, None) is None
    out = capsys.readouterr().out
    for command in ("/set", "/clear", "/bye", "Ctrl-C", "Ctrl-D", '"""', "backslash"):
        assert command in out


def test_ctrl_c_stops_the_answer_alone() -> None:
    """The part of the answer stays in the conversation; without any part the question goes too."""
    model = ScriptedModel(["par", KeyboardInterrupt()], [KeyboardInterrupt()], ["three"])
    _talk(model, "1?", "2?", "3?")
    assert model.asked[2][0] == ["1?", "par", "3?"]


def test_ctrl_c_while_typing_asks_again(capsys: pytest.CaptureFixture[str]) -> None:
    model = ScriptedModel(["one"])
    _talk(model, KeyboardInterrupt(), '"""half a', KeyboardInterrupt(), "1?")
    assert [messages for messages, _ in model.asked] == [["1?"]]
    assert capsys.readouterr().out.count("Ctrl-D leaves.") == 3


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (ContextLengthError("The prompt has 9 tokens"), "The prompt has 9 tokens. /clear forgets the conversation."),
        (EngineRestartedError("The engine failed"), "The engine failed."),
        (QuireError("Broken \x1b[31m"), r"Broken \x1b[31m."),
    ],
)
def test_an_error_ends_one_answer(error: QuireError, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = ScriptedModel([error], ["two"])
    _talk(model, "1?", "2?")
    assert model.asked[1][0] == ["2?"]
    assert f"quire: {part}\n" in capsys.readouterr().err


def test_an_engine_that_is_gone_ends_the_chat() -> None:
    with pytest.raises(EngineDeadError):
        _talk(ScriptedModel([EngineDeadError("gone")]), "1?", "2?")


def test_an_answer_that_is_cut_off_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Session(ScriptedModel(["half"], finish_reason="length"), Conversation()).ask("?")
    captured = capsys.readouterr()
    assert captured.out == "half\n"
    assert "cut off" in captured.err


HOSTILE = "\x1b]0;title\x07\x1b[2Jtext\r\x9b1m\u202eabc\ud800\n\ttab 👩\u200d💻 नमस्ते"


def test_a_terminal_gets_no_escape_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spelled out, also when a sequence comes in pieces; joiners of scripts and emoji stay."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Session(ScriptedModel(list(HOSTILE)), Conversation()).ask("?")
    shown = "\\x1b]0;title\\x07\\x1b[2Jtext\\r\\x9b1m\\u202eabc\\ud800\n\ttab 👩\u200d💻 नमस्ते\n"
    assert capsys.readouterr().out == shown


def test_a_pipe_gets_the_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = HOSTILE.replace("\ud800", "")
    Session(ScriptedModel(list(text)), Conversation()).ask("?")
    assert capsys.readouterr().out == text + "\n"
