"""Every op refuses arguments that it cannot compute, with an exception that names the fault, the value, and the
expected value.

The cases of guard_cases.py run in processes of their own: without a guard many of them end the interpreter.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from quire.kernels import cpu
from tests.kernels.guard_cases import CASES

ROOT = Path(__file__).parents[2]


# Flags of the interpreter, and the path: compiled kernels where there are some.
WAYS = [([], ["kernels"]), (["-O"], ["kernels", "reference"])] if cpu.available() else [(["-O"], ["reference"])]


def verdicts(flags: list[str], paths: list[str]) -> list[str]:
    """Of each case on each path. A process that ends in a case is followed by another one, for the next case."""
    found: list[str] = []
    num_cases = len(paths) * len(CASES)
    while len(found) < num_cases:
        command = [sys.executable, *flags, "-m", "tests.kernels.guard_cases", str(len(found)), *paths]
        child = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
        words = [line.split(" ", 2) for line in child.stdout.splitlines()]
        found += [ast.literal_eval(rest[0]) for _, word, *rest in words if word == "ends"]
        if len(found) < num_cases:
            begun = words and words[-1][1] == "begins"
            assert begun, f"exit status {child.returncode} before a case: {child.stderr[-2000:]}"
            found.append(f"ended the interpreter with status {child.returncode}")
    return found


@pytest.mark.parametrize(("flags", "paths"), WAYS)
def test_wrong_arguments_are_refused(flags: list[str], paths: list[str]) -> None:
    """With asserts and without, on the compiled kernels and on plain torch."""
    found = [
        f"{path}, {case.name}: {verdict}; expected {case.error}, {case.says!r}"
        for (path, case), verdict in zip(product(paths, CASES), verdicts(flags, paths), strict=True)
        if verdict
    ]
    assert not found, "\n".join(found)
