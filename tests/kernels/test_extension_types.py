"""What mypy knows of the extension (`_C.pyi`): every function and every field of a struct, as the extension has it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import extension
from quire.kernels import cpu

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "quire"


def of_stub(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each function, by its name: its arguments with types and defaults, and its result."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, ", ".join(map(ast.unparse, node.bases))
            yield from of_stub(node.body, f"{node.name}.")
        elif isinstance(node, ast.AnnAssign):  # a constant of a class, which the extension has as a property
            yield prefix + ast.unparse(node.target), f"(arg: object, /) -> {ast.unparse(node.annotation)[6:-1]}"
        elif isinstance(node, ast.FunctionDef):
            if any(ast.unparse(each).endswith(".setter") for each in node.decorator_list):
                continue  # of a property whose getter stands before it
            assert node.returns is not None
            arguments = ast.unparse(node.args).replace("=", " = ")
            yield prefix + node.name, f"({arguments}) -> {ast.unparse(node.returns)}"


def of_extension(members: dict[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, member in members.items():
        if isinstance(member, type):
            bases = [base.__name__ for base in member.__bases__ if base is not object]
            yield prefix + name, ", ".join(bases)
            yield from of_extension(dict(vars(member)), f"{name}.")
            continue
        bound = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        for text, _, defaults in getattr(bound, "__nb_signature__", ()):
            text = re.sub(r"\bquire\._C\.|\bcollections\.abc\.", "", text)
            text = re.sub(r"\\(\d+)", lambda at: repr(defaults[int(at[1])]), text)  # noqa: B023 (it runs at once)
            yield prefix + name, text.removeprefix("def ").removeprefix(name).strip()


@pytest.mark.skipif(extension.C is None, reason="needs the extension")
def test_mypy_knows_the_extension_as_it_is() -> None:
    """After a change of the bindings, `make stub` writes the file again."""
    compiled = dict(of_extension({name: each for name, each in vars(extension.C).items() if not name.startswith("_")}))
    known = dict(of_stub(ast.parse((PACKAGE / "_C.pyi").read_text()).body))
    assert known == compiled


class _Misspelt(ast.NodeTransformer):
    """Gives each call of the extension by name one field that it does not have."""

    def __init__(self) -> None:
        self.structs: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = node.func
        if isinstance(called, ast.Attribute) and ast.unparse(called.value) == "_C" and node.keywords:
            node.keywords[0].arg = f"misspelt_{len(self.structs)}"
            self.structs.append(called.attr)
        return node


def test_a_wrong_field_is_an_error(tmp_path: Path) -> None:
    """In every call of cpu.py. mypy reads nothing else, so that this takes seconds."""
    pytest.importorskip("mypy")
    program = _Misspelt()
    changed = program.visit(ast.parse(Path(cpu.__file__).read_text()))
    (tmp_path / "cpu.py").write_text(ast.unparse(changed))
    (tmp_path / "quire").mkdir()
    (tmp_path / "quire" / "__init__.py").touch()
    (tmp_path / "quire" / "_C.pyi").write_text((PACKAGE / "_C.pyi").read_text())
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip", "--cache-dir", "cache"]
    command += ["cpu.py", "quire/__init__.py", "quire/_C.pyi"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = re.findall(r'Unexpected keyword argument "misspelt_(\d+)" for "(\w+)"', done.stdout)
    assert dict(found) == {str(number): name for number, name in enumerate(program.structs)}
    assert len(program.structs) > 30
