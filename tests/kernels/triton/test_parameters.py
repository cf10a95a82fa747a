"""Every parameter of a Triton function is read: an unread constant would only make more variants to compile."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import quire.kernels

FOLDER = Path(quire.kernels.__file__).parent / "triton"


def unread(source: str) -> Iterator[str]:
    """`function.parameter` of each parameter that the body of a jitted function does not read."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and any(
            "jit" in ast.unparse(each) for each in function.decorator_list
        ):
            read = {
                node.id
                for statement in function.body
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
            }
            yield from (f"{function.name}.{each.arg}" for each in function.args.args if each.arg not in read)


def test_an_unread_parameter_is_found() -> None:
    assert list(unread("@triton.jit\ndef f(x, N):\n    N = 1\n    return x\n")) == ["f.N"]


def test_kernels_read_all_their_parameters() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert len(files) > 10
    assert [f"{file.name}: {name}" for file in files for name in unread(file.read_text())] == []
