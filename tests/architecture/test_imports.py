"""The import rules of docs/architecture.md: layers point down, and nothing heavy loads where it must not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _loaded_after(code: str) -> set[str]:
    """Top-level modules a fresh interpreter has loaded after running `code`."""
    program = f"import sys\n{code}\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT / "src"
    )
    return set(output.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "quire",
        "quire.cli.main",
        "quire.server.app",
        "quire.frontend.async_engine",
        "quire.entry.launch",
        "quire.entry.async_llm",
        "quire.scheduler.scheduler",
    ],
)
def test_module_loads_neither_torch_nor_transformers(module: str) -> None:
    loaded = _loaded_after(f"import {module}")
    assert not loaded & {"torch", "transformers", "triton"}, (
        f"importing {module} loads {loaded & {'torch', 'transformers', 'triton'}}"
    )


def test_import_quire_loads_no_dependency() -> None:
    heavy = {
        "msgspec",
        "zmq",
        "starlette",
        "uvicorn",
        "tokenizers",
        "numpy",
        "jinja2",
        "rich",
        "huggingface_hub",
        "prometheus_client",
    }
    assert not _loaded_after("import quire") & heavy


def test_serving_a_native_model_does_not_load_transformers() -> None:
    code = (
        "from quire import LLM, SamplingParams\n"
        "llm = LLM(max_model_len=64, kv_cache_memory_bytes=1 << 22, num_threads=1)\n"
        "llm.generate('hello', SamplingParams(max_tokens=1), use_tqdm=False)"
    )
    loaded = _loaded_after(code)
    assert "torch" in loaded, "the engine did not run in this process: the check proves nothing"
    assert "transformers" not in loaded


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
    for path in (ROOT / "src" / "quire").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
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
