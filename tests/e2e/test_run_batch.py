"""`quire run-batch` on the demo model: a file of answers in the order of the requests, also after an interruption."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from quire.entry.run_batch import BatchFiles
from quire.errors import ConfigError
from quire.server.batch_lines import entry_id
from tests.e2e import reference
from tests.e2e.serving import SMALL
from tests.e2e.terminal import Terminal


def line(number: int, **body: Any) -> bytes:
    asked = {"prompt": reference.TEXTS[0], "temperature": 0, "max_tokens": 12, **body}
    text = json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": asked})
    return text.encode() + b"\n"


def test_a_run_goes_on_after_an_interruption(tmp_path: Path) -> None:
    lines = [line(0), b"\n", line(2), b"no JSON\n", line(4, max_tokens=3), line(5, temperature=9)]
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    files = BatchFiles(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    # The interrupted run had answered the third line and another one that is no longer there; a third was cut.
    seen = {"id": entry_id(2, lines[2]), "custom_id": "r2", "response": {"body": "of the first run"}, "error": None}
    gone = {**seen, "id": entry_id(7, b"gone")}
    files.partial.write_bytes(b"".join(json.dumps(entry).encode() + b"\n" for entry in (gone, seen)) + b'{"id": "batch')
    with Terminal("run-batch", "-i", str(files.input), "-o", str(files.output), *SMALL) as terminal:
        assert terminal.read_to_end() == 0, terminal.written
    assert "5 lines answered, 2 of them with an error" in terminal.written
    assert "| 0/5 [" in terminal.written
    assert "100%" in (bar := next(line for line in terminal.lines if "| 5/5 [" in line)), bar
    entries = [json.loads(entry) for entry in files.output.read_text().splitlines()]
    assert [entry["custom_id"] for entry in entries] == ["r0", "r2", None, "r4", "r5"]
    assert entries[1] == seen
    texts = [entries[number]["response"]["body"]["choices"][0]["text"] for number in (0, 3)]
    expected = [reference.greedy(reference.TEXTS[0], count) for count in (12, 3)]
    assert texts == [reference.tokenizer().decode(tokens) for tokens in expected]
    assert [entry["error"] and entry["error"]["code"] for entry in entries] == [
        *(None, None, "invalid_line"),
        *(None, "invalid_value"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.slow
def test_what_was_answered_before_a_kill_is_not_answered_again(tmp_path: Path) -> None:
    """Killed for real; the bar of the second run counts the lines of the first one."""
    (tmp_path / "in.jsonl").write_bytes(b"".join(line(number, max_tokens=60) for number in range(40)))
    files = BatchFiles(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    command = ("run-batch", "-i", str(files.input), "-o", str(files.output), *SMALL, "--max-num-seqs", "2")
    with Terminal(*command) as terminal:
        deadline = time.monotonic() + 60
        while not files.partial.exists() or files.partial.read_bytes().count(b"\n") < 5:
            assert time.monotonic() < deadline, terminal.written
            time.sleep(0.01)
        terminal.send(signal.SIGKILL)
        terminal.process.wait()
    *seen, _ = files.partial.read_bytes().split(b"\n")
    assert 5 <= len(seen) < 40
    with Terminal(*command) as terminal:
        assert terminal.read_to_end() == 0, terminal.written
    entries = files.output.read_bytes().splitlines()
    assert len(entries) == 40
    assert set(seen) <= set(entries), "an entry names its request, so one that was answered again is another one"
    assert "| 40/40 [" in terminal.written


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="input file does not exist"):
        BatchFiles(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    (tmp_path / "in.jsonl").touch()
    with pytest.raises(ConfigError, match="folder of the output file"):
        BatchFiles(tmp_path / "in.jsonl", tmp_path / "none" / "out.jsonl")
