"""Every op refuses what it cannot compute, with an exception that says what, the value, and what is expected.

The cases of guard_cases.py run in processes of their own: without a guard many of them end the interpreter.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire import envs
from quire.kernels import cpu
from tests.kernels.guard_cases import CASES

ROOT = Path(__file__).parents[2]


# Flags of the interpreter, and what computes: compiled kernels where there are some.
WAYS = [*([("", "kernels"), ("-O", "kernels")] if cpu.available() else []), ("-O", "reference")]


def verdicts(flag: str, path: str) -> list[str]:
    """Of each case. A process that ends in a case is followed by another one, for the next case."""
    found: list[str] = []
    forced = {envs.FORCE_REFERENCE.name: "1" if path == "reference" else ""}
    while len(found) < len(CASES):
        command = [sys.executable, *([flag] if flag else []), "-m", "tests.kernels.guard_cases", str(len(found))]
        child = subprocess.run(
            command, cwd=ROOT, env=os.environ | forced, check=False, capture_output=True, text=True, timeout=60
        )
        words = [line.split(" ", 2) for line in child.stdout.splitlines()]
        found += [ast.literal_eval(rest[0]) for _, word, *rest in words if word == "ends"]
        if len(found) < len(CASES):
            begun = words and words[-1][1] == "begins"
            assert begun, f"exit status {child.returncode} before a case: {child.stderr[-2000:]}"
            found.append(f"ended the interpreter with status {child.returncode}")
    return found


@pytest.mark.parametrize(("flag", "path"), WAYS)
def test_wrong_arguments_are_refused(flag: str, path: str) -> None:
    """With asserts and without, on the compiled kernels and on plain torch."""
    found = [
        f"{case.name}: {verdict}; expected {case.error}, {case.says!r}"
        for case, verdict in zip(CASES, verdicts(flag, path), strict=True)
        if verdict
    ]
    assert not found, "\n".join(found)
