"""`quire chat` with a real engine, under a pseudo-terminal and through pipes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from quire import demo
from tests.e2e.serving import QUIRE, SMALL
from tests.e2e.terminal import Terminal
from tests.loader.local_hub import Hub

CHAT = ("chat", str(demo.path("target")), *SMALL, "--set", "temperature=0")
PROMPT = "\x1b[?2004h>>> "  # after readline has asked for pasted text to be marked
QUESTION = "What does len() do?"
ANSWER = "`len(obj, /)`: Return the number of items in a container."


def _environment(folder: Path) -> dict[str, str]:
    """The files of the chat lie in `folder`, and so do the files of torch in a nursery."""
    (folder / "tmp").mkdir()
    names = {"TMPDIR": "tmp", "XDG_STATE_HOME": "state", "TORCHINDUCTOR_CACHE_DIR": "torch"}
    return {variable: str(folder / name) for variable, name in names.items()}


def _exchange(terminal: Terminal, typed: str, until: str = PROMPT) -> str:
    """Type something -> the output of the chat when `until` is there."""
    terminal.written = ""
    terminal.type(typed)
    terminal.read_until(until)
    return terminal.written.replace("\r", "")


def _wait_for_keys(terminal: Terminal) -> None:
    """Until the chat waits for a key, as it does when a person presses one.

    readline looks for signals when one interrupts its wait. One that comes between the prompt and the wait is seen with
    the next key.
    """
    _exchange(terminal, "half a li", "half a li")
    time.sleep(0.5)


def test_a_chat_in_a_terminal(tmp_path: Path) -> None:
    """One process through everything that needs a terminal and an engine. A SIGTERM ends it without a trace."""
    with Terminal(*CHAT, environment=_environment(tmp_path)) as terminal:
        terminal.read_until(PROMPT)
        assert "/help lists the commands" in terminal.written
        assert ANSWER in _exchange(terminal, QUESTION + "\r")
        several = _exchange(terminal, "What does len() \\\r", "... ")
        assert "length" not in several
        assert "do?" in _exchange(terminal, "do?\r")

        # It would go on to the end of the context: only Ctrl-C ends it.
        assert "min_tokens          1500 (set)" in _exchange(terminal, "/set min_tokens 1500\r")
        assert "forgotten" in _exchange(terminal, "/clear\r")
        _exchange(terminal, QUESTION + "\r", ANSWER)
        terminal.press_ctrl_c()
        terminal.read_until(PROMPT)
        _wait_for_keys(terminal)
        assert "Ctrl-D leaves." in _exchange(terminal, "\x03")
        _exchange(terminal, "/set min_tokens default\r")
        _exchange(terminal, "/clear\r")
        assert ANSWER in _exchange(terminal, QUESTION + "\r"), "the engine answers after a stop"

        # An arrow key brings back what was typed.
        assert ANSWER in _exchange(terminal, "\x1b[A\r")
        _wait_for_keys(terminal)
        terminal.send(signal.SIGTERM)
        assert terminal.read_to_end() == 128 + signal.SIGTERM
    assert "Traceback" not in terminal.written
    history = (tmp_path / "state" / "quire" / "chat_history").read_text().splitlines()
    assert history[:3] == [QUESTION, "What does len() \\", "do?"]
    assert not list((tmp_path / "tmp").iterdir()), "sockets of the engine were left behind"


def test_a_question_through_pipes() -> None:
    """Nothing but the answer, in plain text."""
    result = QUIRE.run(*CHAT, text=QUESTION)
    assert (result.stdout, result.stderr, result.returncode) == (ANSWER + "\n", "", 0)


def test_ctrl_c_while_it_starts(tmp_path: Path) -> None:
    with Terminal(*CHAT, environment=_environment(tmp_path)) as terminal:
        terminal.read_until("start")
        terminal.press_ctrl_c()
        assert terminal.read_to_end() == 130, terminal.written
    assert terminal.lines[-2:] == ["quire: interrupted", ""]
    assert "Traceback" not in terminal.written
    assert not list((tmp_path / "tmp").iterdir())


def test_a_stop_does_not_wait_for_a_download(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in demo.path("target").iterdir()}
    with Hub(files, chunk_bytes=1 << 20, chunk_seconds=0.2) as hub:
        hub_variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        with Terminal("run", "small/model", environment=_environment(tmp_path) | hub_variables) as terminal:
            terminal.read_until("MB")
            hub.chunk_seconds = 1000.0  # a reader of the file would wait longer than this test
            terminal.send(signal.SIGTERM)
            assert terminal.read_to_end() == 128 + signal.SIGTERM
    assert terminal.lines[-2:] == ["quire: stopped", ""]
    assert "Traceback" not in terminal.written
