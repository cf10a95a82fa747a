"""The first screen: real servers under a terminal, through a pipe, and with JSON logs."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire import demo
from quire.cli.main import main
from quire.resolve import shown_bytes
from quire.screen import first_screen
from quire.screen.memory_lines import MemorySummary
from tests.e2e.serving import INTERPRETER, LIGHT, QUIRE, SHORT, SMALL, Program, Serve, quire
from tests.e2e.terminal import Terminal
from tests.loader.local_hub import Hub
from tests.nursery import LightPopen

SERVE = ("serve", "--port", "0", *SMALL)
BAR = "[" + "#" * 16 + "]"
LAST_WORDS = "What does len() do?\"}]}'"  # of the screen
SGR = re.compile(r"\x1b\[[0-9;]*m")
# Granted by the system, and with a warning from the engine.
TOO_MUCH = ("--kv-cache-memory-bytes", str(2 * psutil.virtual_memory().total))
PHASES = ("start", "load", "warm up")


def _labels(lines: list[str]) -> list[str]:
    """The first words of the lines that have a label."""
    return [line[2:11].strip() for line in lines if re.match(r"  \w", line)]


def _url(lines: list[str]) -> str:
    (url,) = (found[1] for line in lines if (found := re.search(r"ready     (http://\S+)", line)))
    return url


def test_terminal() -> None:
    """Bars that move and end at 100 %, the labels in their order, nothing wider than the terminal, a clean end."""
    with Terminal(*SERVE, program=INTERPRETER) as terminal:
        terminal.read_until(LAST_WORDS)
        lines = terminal.lines
        config = httpx.get(_url(lines) + "/v1/config", timeout=10).json()
        terminal.press_ctrl_c()
        assert terminal.read_to_end() == 0, terminal.written
    assert "[" + " " * 16 + "]   0%" in SGR.sub("", terminal.written), "no bar began"
    machine = r"\d+ cores? \S.* · \d+\.\d+ GiB RAM · (no GPU|GPU not used)"
    assert re.fullmatch(rf"  quire \S+ serves quire-demo +{machine}", lines[0]), lines[0]
    assert _labels(lines[1:]) == [*PHASES, "memory", "fits", "chosen", "expect", "ready", "try"]
    for line, phase in zip(lines[1:4], PHASES, strict=True):
        assert re.match(rf"  {phase:<9} {re.escape(BAR)} 100% +\d+\.\d s  \S", line), line
    wide = Terminal("")
    wide.columns, wide.written = 1000, terminal.written
    assert wide.lines == terminal.lines, "a line is wider than the terminal"
    assert terminal.lines[-2:] == ["quire: stopped", ""]
    assert SGR.search(terminal.written), "no colours on a terminal"
    assert "Traceback" not in terminal.written

    shown = config["settings"]
    settings = {name: setting["value"] for name, setting in shown.items()}
    memory = next(line for line in lines if line.startswith("  memory"))
    assert memory[12:] == MemorySummary.of(settings).plan()
    place = next(index for index, line in enumerate(lines) if line.startswith("  expect"))
    one, total = (shown[f"expected_{name}"] for name in ("tokens_per_second", "total_tokens_per_second"))
    users = settings["max_num_seqs"]
    for line, words, rate in zip(lines[place:], ("1 user", f"{users} users together"), (one, total), strict=False):
        interval = f"({rate['low']:,.0f}-{rate['high']:,.0f}, bound by {rate['bound']})"
        assert line[12:] == f"{words} {rate['value']:,.0f} tok/s {interval}"


def test_screen_explain_and_config_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """One plan: screen and `quire explain` show the same numbers, but for the work, which a start measures."""
    flags = (*SMALL, "--max-num-seqs", "7")
    assert main(["explain", "--json", *flags]) == 0
    explained = json.loads(capsys.readouterr().out)["settings"]
    with Serve(*flags, program=LIGHT) as server:
        lines = server.log.splitlines()
        config = server.get("/v1/config").json()["settings"]
        assert server.stop() == 0
    (memory,) = (line for line in lines if line.startswith("  memory"))
    fits = [line for line in lines if "KV cache size" in line or "Maximum concurrency" in line]
    for name in ("kv_cache_bytes", "num_blocks", "block_size", "max_model_len", "max_num_seqs"):
        assert explained[name]["value"] == config[name]["value"], name
    kv, work, weights = (config[f"{name}_bytes"]["value"] for name in ("kv_cache", "work", "weight"))
    plan = f"weights {shown_bytes(weights)} | KV {shown_bytes(kv)} | work {shown_bytes(work)} | free "
    assert memory.startswith(f"  memory    {plan}"), memory
    tokens = explained["num_blocks"]["value"] * explained["block_size"]["value"]
    assert fits == [
        f"  fits      KV cache size: {tokens:,} tokens = {tokens // 2048} chats of 2k",
        f"            Maximum concurrency for 2,048 tokens per request: {tokens / 2048:.2f}x",
    ]
    assert main(["explain", *flags]) == 0
    explanation = capsys.readouterr().out
    for line in fits:
        assert line[12:] in explanation
    chosen = "\n".join(lines)
    assert "max_num_seqs 7 (flag)" in chosen
    assert "dtype float32 (flag)" in chosen
    assert "block_size 16 (default)" in chosen
    assert "max_model_len 2,048 (model)" in chosen


def test_pipe() -> None:
    """One line for each phase, no escape codes; and colours alone if they are asked for."""
    with Serve(*SMALL, environment={"FORCE_COLOR": "", "NO_COLOR": ""}, program=LIGHT) as server:
        lines = server.log.splitlines()
        assert server.stop() == 0
    assert "\x1b" not in server.log
    assert "\r" not in server.log
    assert _labels(lines)[1:4] == list(PHASES)
    for line in lines[1:4]:
        assert re.search(r" 100% +\d+\.\d s  \S", line), line
    with Serve(*SMALL, waits=False, environment={"FORCE_COLOR": "1", "NO_COLOR": ""}, program=LIGHT) as server:
        server.wait_for(lambda: LAST_WORDS in server.log, "the screen")
        assert server.stop() == 0
    assert SGR.search(server.log)
    assert "\x1b" not in SGR.sub("", server.log)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, {"TERM": "dumb"}])
def test_terminal_without_colour(environment: dict[str, str]) -> None:
    with Terminal(*SERVE, environment=environment, program=LIGHT) as terminal:
        terminal.read_until(LAST_WORDS)
        terminal.send(signal.SIGTERM)
        assert terminal.read_to_end() == 0, terminal.written
    assert not SGR.search(terminal.written)
    if "TERM" in environment:
        assert "\x1b" not in terminal.written
        assert BAR not in terminal.written
    else:
        assert BAR in terminal.written


def test_log_lines_and_bars_do_not_mix(tmp_path: Path) -> None:
    """Lines of both processes, before and while bars move. The engine comes as late as one that is not a fork."""
    late = tmp_path / "late.py"
    late.write_text("import time; from quire.engine import process; time.sleep(1); raise SystemExit(process.main())")
    program = Program((*LIGHT.arguments[:2], str(late)))
    flags = ("serve", "--port", "0", "--num-threads", "1", *TOO_MUCH, "--swap-space", "4")
    with Terminal(*flags, columns=200, program=program) as terminal:
        terminal.read_until(LAST_WORDS)
        terminal.send(signal.SIGTERM)
        assert terminal.read_to_end() == 0, terminal.written
    lines = terminal.lines
    assert re.match(r"WARNING \S+ \S+ \[quire\.compat\.table\] --swap-space has no effect: .*to set$", lines[0])
    place = next(index for index, line in enumerate(lines) if "the KV cache may grow to" in line)
    assert re.match(r"WARNING .*the system may end this process$", lines[place]), lines[place]
    # The two processes do not agree on who writes first, but each bar has a line of its own.
    bars = [line for line in lines if BAR in line]
    assert [bar[2:11].rstrip() for bar in bars] == list(PHASES)
    assert all(bar[12:].startswith(f"{BAR} 100%") for bar in bars)


def _records(log: str) -> list[dict[str, Any]]:
    """Every line as JSON, with what each must have."""
    records = [json.loads(line) for line in log.splitlines()]
    for record in records:
        assert list(record)[:4] == ["time", "level", "logger", "message"], record
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", record["time"])
    return records


def _wait_ready(server: Serve) -> dict[str, Any]:
    server.wait_for(lambda: '"ready: ' in server.log, "the record of readiness", 60)
    return next(record for record in _records(server.log) if record["message"].startswith("ready: "))


def test_json() -> None:
    """Nothing but records: notices, the screen, the engine's lines, the HTTP server's, the drain; no access log."""
    flags = ("--log-format", "json", "--uvicorn-log-level", "info", "--swap-space", "4")
    environment = {"FORCE_COLOR": "1", "VLLM_LOG_STATS_INTERVAL": "0.1"}
    with Serve(*flags, "--num-threads", "1", *TOO_MUCH, waits=False, environment=environment, program=LIGHT) as server:
        ready = _wait_ready(server)
        url = ready["url"]
        config = httpx.get(f"{url}/v1/config", timeout=10).json()["settings"]
        for path in ("/metrics", "/health", "/livez", "/readyz", "/ping"):
            assert httpx.get(url + path, timeout=10).status_code == 200
        endless = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=endless, timeout=30) as response:
            for number, _ in enumerate(response.iter_lines()):
                if number == 0:
                    server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
    records = _records(server.log)
    by_logger = {record["logger"] for record in records}
    assert {"quire.compat.table", "quire.engine.bring_up", "uvicorn.error", "quire.metrics.log_line"} <= by_logger
    assert "uvicorn.access" not in by_logger
    assert not [record for record in records if "/metrics" in record["message"] or "/health" in record["message"]]
    phases = [record for record in records if "phase" in record]
    assert [record["phase"] for record in phases] == list(PHASES)
    assert all(record["fraction"] == 1 and record["seconds"] >= 0 for record in phases)
    assert ready["seconds_by_phase"] == {record["phase"]: record["seconds"] for record in phases}
    (start,) = (record for record in records if "machine" in record)
    assert (start["model"], start["machine"]["num_cores"] > 0) == ("quire-demo", True)
    for name in ("weight_bytes", "kv_cache_bytes", "work_bytes", "unplanned_bytes", "num_blocks"):
        assert ready["memory"][name] == config[name]["value"], name
    one, together, waited_share = (ready["expected"][name] for name in first_screen.EXPECTED)
    for rate, name in zip((one, together), first_screen.EXPECTED, strict=False):
        assert 0 < rate["low"] < rate["value"] < rate["high"]
        assert rate.items() <= config[name].items()
    assert 0 <= waited_share <= 1, "it is 0 on an idle machine"
    assert ready["chosen"]["num_threads"] == {"value": 1, "source": "flag"}
    (drain,) = (record for record in records if record["message"].startswith("finishing "))
    assert (drain["num_requests"], drain["seconds"]) == (1, 30.0)
    assert records[-1]["message"] == "stopped"


def test_json_by_variable_and_by_file(tmp_path: Path) -> None:
    """Errors are records too, and so are notices of a file that asks for JSON itself."""
    config = tmp_path / "config.yaml"
    config.write_text("log-format: json\nswap-space: 4\nmax-model-len: 4096\n")
    result = quire("serve", "--port", "0", "--config", str(config), program=LIGHT)
    assert result.returncode == 2
    notice, *_, error = _records(result.stderr)
    assert (notice["level"], notice["logger"]) == ("WARNING", "quire.compat.table")
    assert (error["level"], error["code"]) == ("ERROR", "bad_config"), error
    assert "max_model_len" in error["message"]
    with Serve(*SMALL, "--log-format", "text", environment={"QUIRE_LOG_FORMAT": "json"}, program=LIGHT) as server:
        assert server.log.startswith("  quire "), "the flag wins over the variable"
        assert server.stop() == 0
    asleep = tmp_path / "light_engine.py"
    asleep.write_text("import time; time.sleep(60)")
    program = LIGHT._replace(arguments=(*LIGHT.arguments[:2], str(asleep)))
    with Serve(*SMALL, waits=False, environment={"QUIRE_LOG_FORMAT": "json"}, program=program) as server:
        server.wait_for(lambda: "machine" in server.log, "the first record")
        server.wait_for(server.has_engine, "the engine's process")
        server.engine.kill()  # before it has ever been ready: it is not started again
        assert server.wait_exit() == 1
    assert _records(server.log)[-1]["level"] == "ERROR"
    assert "SIGKILL" in _records(server.log)[-1]["message"]
    result = quire("serve", "--log-format", "xml", program=LIGHT)
    assert result.returncode == 2
    assert "log_format" in result.stderr
    assert "text, json" in result.stderr


@pytest.mark.parametrize("words", ["quire ", "importing", "load "])
def test_ctrl_c_while_it_starts(words: str) -> None:
    """In every phase, both processes end at once, without a traceback."""
    with Terminal(*SERVE, program=INTERPRETER if words == "importing" else LIGHT) as terminal:
        if words == "importing":
            terminal.read_until("the engine's process")
            _wait_importing(terminal)
        else:
            terminal.read_until(words)
        children = psutil.Process(terminal.process.pid).children(recursive=True)
        terminal.press_ctrl_c()
        assert terminal.read_to_end() in (0, 130), terminal.written
    assert "Traceback" not in terminal.written
    assert "Error" not in terminal.written, terminal.written
    assert any(line in ("quire: stopped", "quire: interrupted") for line in terminal.lines), terminal.lines
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, "the engine process stayed"


# `quire`, interrupted in the middle of writing its first line, as a signal comes that a system call notices.
INTERRUPTED_WRITE = """
import io, signal, sys
class Raw(io.FileIO):
    def write(self, data):
        if b"serves" in bytes(data):
            signal.raise_signal(signal.SIGINT)
        return super().write(data)
sys.stderr = io.TextIOWrapper(io.BufferedWriter(Raw(2, "w", closefd=False)))
from quire.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_while_it_writes() -> None:
    with Terminal(*SERVE, program=Program(("-c", INTERRUPTED_WRITE), LightPopen)) as terminal:
        assert terminal.read_to_end() == 130, terminal.written
    assert "quire: interrupted" in terminal.lines
    assert "Traceback" not in terminal.written


def _wait_importing(terminal: Terminal) -> None:
    """Until the engine's process is larger than an interpreter: Python would answer a SIGINT with a traceback."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for child in psutil.Process(terminal.process.pid).children():
            if child.memory_info().rss > 30_000_000:
                return
        time.sleep(0.01)
    raise AssertionError("the engine's process does not start")


def test_download(tmp_path: Path) -> None:
    """Bytes, speed and time to go; Ctrl-C does not wait for the file; afterwards the model is cached."""
    files = {path.name: path.read_bytes() for path in demo.path().iterdir()} | {"merges.txt": b" " * 60_000_000}
    flags = ("small/model", *SMALL, "--log-level", "error")
    with Hub(files, chunk_bytes=4 << 20, chunk_seconds=0.2) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        with Terminal("serve", "--port", "0", *flags, environment=environment, program=LIGHT) as terminal:
            terminal.read_until("ETA")
            hub.chunk_seconds = 1000.0  # a reader of the file would wait longer than this test
            terminal.press_ctrl_c()
            assert terminal.read_to_end() == 130
        assert "Traceback" not in terminal.written
        running = re.compile(r"  download  \[#+ +\]  \d\d%  ETA \d s  \d+\.\d of 7\d\.\d MB, \d+\.\d MB/s")
        assert running.search(SGR.sub("", terminal.written)), terminal.written
        hub.chunk_seconds = 0.0
        with Serve(*flags, environment=environment, program=LIGHT) as server:
            assert re.search(r"\n  download  100% +\d+\.\d s  7\d\.\d MB, [\d,.]+ MB/s\n", server.log), server.log
            assert server.stop() == 0
        with Serve(*flags, environment=environment, program=LIGHT) as server:
            assert "\n\n" not in server.log.partition("\n\n  memory")[0], "something else was written"
            cached = r"\n  download  100% +\d\.\d s  cached: \S+/home/hub, 7\d\.\d MB\n"
            assert re.search(cached, server.log), server.log
            assert server.stop() == 0


def test_plain_torch_is_said() -> None:
    with Serve(*SMALL, environment={"QUIRE_FORCE_REFERENCE": "1"}, program=LIGHT) as server:
        screen = " ".join(server.log.split())
        assert "kernels The compiled kernels are not used: plain torch computes, several times slower." in screen
        assert "Unset QUIRE_FORCE_REFERENCE." in screen
        assert server.stop() == 0


def test_what_it_says_to_try_works() -> None:
    for flags, key, program in (((), "", QUIRE), (("--api-key", "sesame", *SHORT), "sesame", LIGHT)):
        with Serve(*SMALL, *flags, program=program) as server:
            command = server.log.split("  try       ")[1].replace("YOUR_KEY", key)
            assert ("Authorization" in command) == bool(key)
            curl, url, *options = shlex.split(command.replace("\\\n", " "))  # not every machine has curl
            given = list(zip(options[::2], options[1::2], strict=True))
            assert (curl, {option for option, _ in given}) == ("curl", {"-H", "-d"})
            headers = dict(value.split(": ") for option, value in given if option == "-H")
            answer = httpx.post(url, headers=headers, content=given[-1][1], timeout=30).json()
            assert program is LIGHT or "len(obj, /)" in answer["choices"][0]["message"]["content"]
            assert answer["choices"][0]["message"]["content"]
            assert server.stop() == 0


def test_systemd_is_notified(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with Serve(*SMALL, waits=False, environment=environment, program=LIGHT) as server:
            assert manager.recv(100) == b"READY=1"
            server.wait_ready()
            assert server.get("/readyz").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            assert server.wait_exit() == 0


LLM_SCRIPT = """
from quire import LLM
held = []
for options in ({}, {"disable_log_stats": True}):
    held.append(LLM(kv_cache_memory_bytes=1 << 25, num_threads=1, **options))
    print("loaded")
"""


def test_llm_shows_bars_on_a_terminal_only() -> None:
    script = Program(("-c", LLM_SCRIPT))
    with Terminal(program=script) as terminal:
        assert terminal.read_to_end() == 0, terminal.written
    assert [line.split("[")[0].strip() for line in terminal.lines if BAR in line] == ["load", "warm up"]
    assert terminal.lines[2:4] == ["loaded", "loaded"]
    # An interpreter that unloads its modules, and the engines with them, prints nothing either.
    result = script._replace(popen=subprocess.Popen).run()
    assert (result.stdout, result.stderr, result.returncode) == ("loaded\nloaded\n", "", 0)
