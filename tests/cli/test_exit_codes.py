"""How the `quire` command ends: exit codes, and one clean line whatever happened."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from quire.cli import complete
from quire.cli.main import main
from quire.errors import ConfigError, EngineDeadError
from quire.kernels import extension

# What `quire --help` must not wait for.
HEAVY = {
    *("torch", "transformers", "numpy", "tokenizers", "msgspec", "zmq", "starlette", "uvicorn", "uvloop", "jinja2"),
    *("huggingface_hub", "prometheus_client", "rich", "tqdm"),
}


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("A flag is wrong", fix="Leave it out"), 2, "quire: A flag is wrong. Leave it out."),
        (EngineDeadError("The engine is gone"), 1, "quire: The engine is gone."),
        (KeyboardInterrupt(), 130, "quire: interrupted"),
    ],
)
def test_errors(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: Any) -> int:
        raise error

    monkeypatch.setattr(complete, "run", fail)
    assert main(["complete"]) == code
    assert capsys.readouterr().err.strip() == text


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


@pytest.mark.parametrize(
    "command",
    [
        ("-m", "quire", "serve", "--port", "0"),
        ("-m", "quire", "explain"),
        (
            "-c",
            "import sys, quire\ntry: quire.LLM()\nexcept quire.errors.ConfigError as e: sys.exit(f'quire: {e}')",
        ),
        (
            "-c",
            "import sys, quire\ntry: quire.AsyncLLM()\nexcept quire.errors.ConfigError as e: sys.exit(f'quire: {e}')",
        ),
    ],
)
def test_an_illegal_instruction_set(command: tuple[str, ...]) -> None:
    """One line with the variable, its value and the legal ones; from LLM(...) and AsyncLLM(...) a ConfigError."""
    result = subprocess.run(
        [sys.executable, *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"QUIRE_ISA": "sse9"},
    )
    assert result.returncode == (1 if command[0] == "-c" else 2), result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("quire: Environment variable QUIRE_ISA")
    assert "sse9" in line
    if extension.is_used():
        assert "scalar" in line
