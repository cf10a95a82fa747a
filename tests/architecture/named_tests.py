"""Tests that a table names: each exists and runs."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def _tests_of(path: str) -> dict[str, ast.AST]:
    """Functions, classes and assigned names of a test file, by name."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def check_test(path: str, name: str) -> None:
    """Fail unless `path::name`, relative to the repository, is a test that is never skipped."""
    assert (ROOT / path).is_file(), f"{path} does not exist"
    assert name.lower().startswith("test"), f"{path}::{name} is no test"
    assert name in _tests_of(path), f"{path} has no {name}"
    marks = [ast.unparse(mark) for mark in getattr(_tests_of(path)[name], "decorator_list", [])]
    assert not [mark for mark in marks if ".skip" in mark or ".xfail" in mark], f"{path}::{name} may not run"
