"""The parts of the first screen alone: phases over time, formats of log lines, colours, what fits, systemd."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import extension, logs
from quire.entry import systemd
from quire.resolve import GIB, DeviceFacts
from quire.screen import first_screen
from quire.screen.memory_lines import MemorySummary
from quire.screen.start_display import StartDisplay, shown_seconds
from quire.screen.terminal import has_colour, is_terminal
from tests.e2e.terminal import screen

DEVICE = DeviceFacts("cpu", "test", "avx2", 4, 8 * GIB, 6 * GIB)


class _Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "NOTIFY_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(
    ("variables", "on_terminal", "elsewhere"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
    ],
)
def test_colour(variables: dict[str, str], on_terminal: bool, elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (has_colour(_Tty()), has_colour(io.StringIO())) == (on_terminal, elsewhere)
    assert is_terminal(_Tty()) == (variables.get("TERM") != "dumb")
    assert not has_colour(None) or "FORCE_COLOR" in variables


def test_bar_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time to go comes from the speed since the total was last changed; a failed start leaves no bar."""
    monkeypatch.setenv("NO_COLOR", "1")
    tty, clock = _Tty(), _Clock()
    monkeypatch.setattr(sys, "stderr", tty)
    display = StartDisplay(clock=clock)
    shown = []
    for seconds, fraction in ((0.0, 0.5), (2.0, 0.75), (0.1, 0.1), (3.0, 0.4), (3.0, 1.0)):
        clock.now += seconds
        display.update("download", fraction, "detail")
        shown.append(screen(tty.getvalue())[-1])
    assert shown == [
        "  download  [########        ]  50%    0.0 s  detail",
        "  download  [############    ]  75%  ETA 2 s  detail",
        "  download  [#               ]  10%    2.1 s  detail",
        "  download  [######          ]  40%  ETA 6 s  detail",
        "  download  [################] 100%    8.1 s  detail",
    ]
    display.update("load", 0.0, "", 0.0)
    clock.now += 1
    display.update("load", 0.5, "half", 0.4)
    assert screen(tty.getvalue())[1] == "  load      [########        ]  50%  ETA 1 s  half"
    display.close()
    display.update("load", 1.0, "nobody is told")
    display.tick()
    assert screen(tty.getvalue()) == [shown[-1], ""]
    assert display.seconds == {"download": 8.1}


def test_a_log_line_takes_the_place_of_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    tty = _Tty()
    monkeypatch.setattr(sys, "stderr", tty)
    display = StartDisplay(clock=_Clock())
    display.update("load", 0.5, "a rather long detail of the bar")
    record = logging.LogRecord("quire.x", logging.WARNING, "x.py", 1, "short", None, None)
    print(logs.TextFormatter().format(record), file=sys.stderr)
    display.finish()
    line, bar, _ = screen(tty.getvalue())
    assert line.startswith("WARNING ")
    assert line.endswith("[quire.x] short")
    assert bar.startswith("  load      [################] 100%")


def test_lines_of_a_long_phase(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no bar moves, one line each, and every ten seconds how far it is."""
    clock, firsts = _Clock(), []
    display = StartDisplay(on_first=lambda: firsts.append(1), clock=clock)
    for number in range(25):
        clock.now += 1
        display.update("download", number / 25, "some")
        display.tick()
    display.update("load", 0.0, "")
    display.update("load", 1.0, "all")
    display.finish()
    display.finish()
    assert capsys.readouterr().err.splitlines() == [
        "  download   40% ETA 15 s  some",
        "  download   80%  ETA 5 s  some",
        "  download  100%   24.0 s  some",
        "  load      100%    0.0 s  all",
    ]
    assert firsts == [1]


def test_shown_seconds() -> None:
    assert [shown_seconds(value) for value in (0.04, 99.94, 100, 599.4, 3600)] == [
        "0.0 s", "99.9 s", "100 s", "599 s", "60 min",
    ]  # fmt: skip


@pytest.fixture
def json_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process writes its logs as JSON, and as before afterwards."""
    handler, formatter, hook, level = logs._handler, None, sys.excepthook, logging.getLogger("quire").level
    if handler is not None:
        formatter = handler.formatter
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "json")
    logs.configure()
    yield
    assert logs._handler is not None
    if handler is None:
        logging.getLogger().removeHandler(logs._handler)
        logging.captureWarnings(False)
    else:
        handler.setFormatter(formatter)
    logging.getLogger("quire").setLevel(level)
    sys.excepthook, logs._handler, logs._is_json = hook, handler, False


def test_json_lines(json_logs: None, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each record, whatever its content; also libraries' records and uncaught errors."""
    logger = logs.get_logger("quire.some.module")
    logger.info("two\nlines %s", "\u2028\x1b[31m", extra=logs.fields(count=3, where=GIB))
    logger.debug("not shown")
    try:
        raise ValueError("broken")
    except ValueError as error:
        logger.exception("failed")
        sys.excepthook(ValueError, error, error.__traceback__)
    library = logging.getLogger("some_library")
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    logs.adopt("some_library")
    library.warning("from a library")
    logs.say("told", count=1)
    written = capsys.readouterr().err
    assert "\x1b" not in written
    first, second, third, fourth, fifth = map(json.loads, written.splitlines())
    assert first == {
        "time": first["time"],
        "level": "INFO",
        "logger": "quire.some.module",
        "message": "two\nlines \u2028\x1b[31m",
        "count": 3,
        "where": GIB,
    }
    for record, message in ((second, "failed"), (third, "uncaught ValueError")):
        assert record["message"] == message
        assert record["exception"].endswith("ValueError: broken")
    assert (fourth["logger"], fourth["message"]) == ("some_library", "from a library")
    assert (fifth["message"], fifth["count"]) == ("told", 1)


INSTALLED = "`pip install --force-reinstall --no-deps --no-cache-dir --no-binary quire quire`"


@pytest.mark.parametrize("is_checkout", [True, False])
def test_missing_kernels(
    is_checkout: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Said first, with the remedy for this way of install: a pip user has no Makefile."""
    monkeypatch.setattr(extension, "C", None)
    monkeypatch.setattr(extension, "WHY_NOT", "installed without a C++ compiler")
    remedy = f"`make setup` in {Path(__file__).parents[2]}"
    if not is_checkout:
        monkeypatch.setattr(extension, "__file__", str(tmp_path / "site-packages/quire/extension.py"))
        remedy = INSTALLED
    first_screen.show_header("a/model", DEVICE, has_gpu=False)
    lines = capsys.readouterr().err.splitlines()
    assert (
        lines[0].split()
        == f"quire {first_screen.__version__} serves a/model 4 cores AVX2 · 8.00 GiB RAM · no GPU".split()
    )
    text = " ".join(" ".join(lines[1:]).split())
    assert text.startswith("kernels The compiled kernels are missing (installed without a C++ compiler): plain torch")
    assert text.endswith(f"Install a C++20 compiler (g++ 12 or clang 15), then run {remedy}.")
    assert is_checkout or max(map(len, lines)) <= 80  # a checkout's folder may be long


def test_missing_kernels_in_json(
    json_logs: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extension, "C", None)
    first_screen.show_header("a/model", DEVICE, has_gpu=True)
    start, missing = map(json.loads, capsys.readouterr().err.splitlines())
    assert start["machine"]["has_gpu"]
    assert missing["level"] == "WARNING"
    assert "compiler" in missing["fix"]


def test_long_model_name_takes_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(extension, "is_used", lambda: True)
    monkeypatch.setattr(extension, "C", object())
    first_screen.show_header("a" * 60, DEVICE, has_gpu=False)
    assert capsys.readouterr().err.splitlines()[1] == "            4 cores AVX2 · 8.00 GiB RAM · no GPU"


def test_what_fits() -> None:
    """Chats of 4k, or of what the model allows."""
    memory = MemorySummary(GIB // 2, 6 * GIB, GIB, 8 * GIB, 32768, 16, 32768, 524288, 128)
    assert memory.plan() == "weights 512.0 MiB | KV 6.00 GiB | work 1.00 GiB | free 8.00 GiB"
    assert memory.capacity() == (
        "KV cache size: 524,288 tokens = 128 chats of 4k",
        "Maximum concurrency for 32,768 tokens per request: 16.00x",
    )
    short = MemorySummary(GIB, GIB, GIB, -GIB, 20, 16, 160, 320, 2)
    assert short.plan().endswith("| free -1.00 GiB")
    assert short.capacity()[0] == "KV cache size: 320 tokens = 2 chats of 160"
    one = MemorySummary(GIB, GIB, GIB, GIB, 19, 16, 150, 304, 1)
    assert one.capacity()[0] == "KV cache size: 304 tokens = 1 chat of 150"
    assert short.as_dict()["num_chats"] == 2


def test_lines_of_the_journal_have_levels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
    records = [logging.LogRecord("quire", level, "", 0, "two\nlines", (), None) for level in levels]
    with (tmp_path / "journal").open("w+") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        place = os.fstat(file.fileno())
        for stream in (f"{place.st_dev}:{place.st_ino}", "1:2", ""):  # this one, another one, none
            patch.setenv("JOURNAL_STREAM", stream)
            handler = logs._StderrHandler()
            handler.setFormatter(logs.TextFormatter())
            for record in records:
                handler.emit(record)
            logs.say("said", logging.ERROR)
        lines = (tmp_path / "journal").read_text().splitlines()
    assert [line[:3] for line in lines[:11]] == [f"<{n}>" for n in (7, 7, 6, 6, 4, 4, 3, 3, 2, 2, 3)]
    assert [line[3:] for line in lines[:11]] == lines[11:22] == lines[22:]


def test_systemd(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    systemd.notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("")  # Linux gives it an abstract address
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + manager.getsockname()[1:].decode())
        systemd.notify("READY=1")
        assert manager.recv(100) == b"READY=1"
    with caplog.at_level(logging.WARNING):
        systemd.notify("STOPPING=1")
    assert "systemd could not be told STOPPING=1" in caplog.text
