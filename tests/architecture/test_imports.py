"""The import rules of docs/architecture.md: layers point down, and nothing heavy loads where it must not."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import Program

ROOT = Path(__file__).parents[2]


# Imported one after the other by one interpreter, with the modules that must not be loaded by then.
TORCH = {"torch", "transformers", "triton"}
STEPS = {
    "quire": TORCH
    | {
        *("msgspec", "zmq", "starlette", "uvicorn", "tokenizers", "numpy", "jinja2", "rich", "huggingface_hub"),
        "prometheus_client",
    },
    **dict.fromkeys(
        (
            "quire.cli.main",
            "quire.scheduler.scheduler",
            "quire.frontend.async_engine",
            "quire.server.app",
            "quire.entry.launch",
            "quire.entry.async_llm",
            "quire.entry.llm",
        ),
        TORCH,
    ),
}
PROGRAM = """
import importlib, json, sys
loaded = {}
for module in sys.argv[1:]:
    importlib.import_module(module)
    loaded[module] = sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Top-level modules that are loaded after each step."""
    command = [sys.executable, "-c", PROGRAM, *STEPS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT / "src")
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("module", STEPS)
def test_module_loads_neither_torch_nor_transformers(module: str, loaded: dict[str, list[str]]) -> None:
    """`import quire` loads no dependency at all."""
    assert "quire" in loaded[module]
    assert not STEPS[module] & set(loaded[module])


def test_serving_a_native_model_does_not_load_transformers() -> None:
    code = (
        "import sys\n"
        "from quire import LLM, SamplingParams\n"
        "llm = LLM(max_model_len=64, kv_cache_memory_bytes=1 << 22, num_threads=1)\n"
        "llm.generate('hello', SamplingParams(max_tokens=1), use_tqdm=False)\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = Program(("-c", code)).run()
    assert "torch" in done.stdout.split(), "the engine did not run in this process: the check proves nothing"
    assert "transformers" not in done.stdout.split()


def test_layers() -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_forbidden_calls() -> None:
    """No pickle, eval, exec, torch.load, yaml.load or shelve anywhere in the package, read from the syntax tree."""
    forbidden_modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    forbidden_calls = {"eval", "exec", "compile", "__import__"}
    forbidden_attributes = {("torch", "load"), ("yaml", "load"), ("np", "load"), ("numpy", "load")}
    found = []
    words = "|".join(forbidden_modules | forbidden_calls)
    suspects = re.compile(rf"\b({words})\b|\.\s*load\b")  # files without these words have no such calls
    for path in (ROOT / "src" / "quire").rglob("*.py"):
        if not suspects.search(text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
                continue
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            if isinstance(node, ast.Import):
                found += [f"{where} imports {a.name}" for a in node.names if a.name.split(".")[0] in forbidden_modules]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in forbidden_modules:
                found.append(f"{where} imports {node.module}")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in forbidden_calls:
                found.append(f"{where} calls {node.func.id}")
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and (node.func.value.id, node.func.attr) in forbidden_attributes
            ):
                found.append(f"{where} calls {node.func.value.id}.{node.func.attr}")
    assert not found, found
