"""How the `quire` command ends: exit codes, and one clean line whatever happened."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from quire import extension
from quire.cli import complete
from quire.cli.main import build_parser, main
from quire.errors import ConfigError, EngineDeadError
from tests.e2e.serving import Program
from tests.nursery import LightPopen

# What `quire --help` must not wait for.
HEAVY = {
    *("torch", "transformers", "numpy", "tokenizers", "msgspec", "zmq", "starlette", "uvicorn", "uvloop", "jinja2"),
    *("huggingface_hub", "prometheus_client", "rich", "tqdm"),
}


def interrupted_import() -> ImportError:
    """The error of a library when Ctrl-C interrupts its import."""
    error = ImportError("numpy could not be imported")
    error.__context__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("A flag is wrong", fix="Leave it out"), 2, "quire: A flag is wrong. Leave it out."),
        (EngineDeadError("The engine is gone"), 1, "quire: The engine is gone."),
        (KeyboardInterrupt(), 130, "quire: interrupted"),
        (interrupted_import(), 130, "quire: interrupted"),
        (MemoryError(), 1, "quire: The system refuses more memory. Raise `ulimit -v`, or end other programs."),
        (OSError(errno.EMFILE, "Too many"), 1, "quire: The system refuses to open more files. Raise `ulimit -n`."),
        (
            OSError(errno.EAGAIN, "Again"),
            1,
            "quire: The system refuses more processes or threads. Raise `ulimit -u`, or end other programs.",
        ),
    ],
)
def test_errors(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: Any) -> int:
        raise error

    monkeypatch.setattr(complete, "run", fail)
    monkeypatch.setattr("quire.cli.main.build_parser", build_parser.__wrapped__)  # type: ignore[attr-defined]
    assert main(["complete"]) == code
    assert capsys.readouterr().err.strip() == text


# Presses Ctrl-C when a module is first looked for, then runs the command.
INTERRUPTED = """import signal, sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Press())
from quire.cli.main import main
sys.exit(main(sys.argv[2:]))"""


# What is being imported, and the command.
EARLY = ("quire.cli.flags", "explain")
MIDDLE = ("quire.server.app", "serve", "--port", "0")
LATE = ("torch", "bench", "throughput")


@pytest.mark.parametrize(
    ("disposition", "command"),
    [
        (signal.SIG_IGN, EARLY),
        (signal.SIG_DFL, MIDDLE),
        (signal.SIG_IGN, LATE),
        *(pytest.param(signal.SIG_DFL, command, marks=pytest.mark.slow) for command in (EARLY, LATE)),
        pytest.param(signal.SIG_IGN, MIDDLE, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_while_a_command_starts(disposition: signal.Handlers, command: tuple[str, ...]) -> None:
    """One line, also if the parent ignores SIGINT, as scripts do for their background processes."""
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, disposition),
    )
    assert (process.returncode, process.stderr) == (130, "quire: interrupted\n")


@pytest.mark.parametrize("num_lines", [1, 100_000])
def test_a_reader_that_leaves_early(num_lines: int) -> None:
    """`quire ... | head -1` ends without a traceback, whether the output fits the buffer or not."""
    code = (
        "import sys\n"
        "from quire.cli import complete\n"
        "from quire.cli.main import main\n"
        f"complete.run = lambda args: print('line\\n' * {num_lines}) or 0\n"
        "sys.exit(main(['complete']))"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors == ""


def test_a_full_pipe_that_does_not_block() -> None:
    """It is no lack of processes, which has the same number."""
    code = (
        "import os, sys\n"
        "from quire.cli import complete\n"
        "from quire.cli.main import main\n"
        "os.set_blocking(1, False)\n"
        "complete.run = lambda args: print('line\\n' * 100_000) or 0\n"
        "sys.exit(main(['complete']))"
    )
    reader, writer = os.pipe()
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=buffered, check=False, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(reader)
    os.close(writer)
    assert result.returncode == 1
    assert (
        result.stderr
        == "quire: Standard output is full and does not wait. Write to a file, or to a pipe that blocks.\n"
    )


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from quire.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not HEAVY & set(result.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", ["quire", "quire.cli.main"])
def test_module_is_the_command(module: str) -> None:
    result = subprocess.run([sys.executable, "-m", module, "--version"], check=True, capture_output=True, text=True)
    assert result.stdout.startswith("quire ")


BOTH = """
import sys, quire
errors = []
for name in ("LLM", "AsyncLLM"):
    try:
        getattr(quire, name)()
    except quire.errors.ConfigError as error:
        errors.append(f"quire: {error}")
sys.exit("\\n".join(errors))
"""


@pytest.mark.parametrize(
    "command",
    [
        ("-m", "quire", "serve", "--port", "0"),
        ("-m", "quire", "explain"),
        ("-c", BOTH),
    ],
)
def test_an_illegal_instruction_set(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the variable, its value and the legal ones; from LLM(...) and AsyncLLM(...) a ConfigError."""
    monkeypatch.setenv("QUIRE_ISA", "sse9")
    result = Program(command, LightPopen).run()
    assert result.returncode == (1 if command[0] == "-c" else 2), result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == (2 if command[0] == "-c" else 1), result.stderr
    for line in lines:
        assert line.startswith("quire: Environment variable QUIRE_ISA")
        assert "sse9" in line
        if extension.is_used():
            assert "scalar" in line
