"""Every op refuses arguments that it cannot compute, with an exception that names the fault, the value, and the
expected value.

The cases of guard_cases.py run in processes of their own: without a guard many of them end the interpreter.
"""

from __future__ import annotations

import ast
from itertools import product

import pytest

from quire.kernels import cpu
from tests.e2e.serving import Program
from tests.kernels.guard_cases import CASES

WITH_ASSERTS = Program(("-m", "tests.kernels.guard_cases"))
# As under `python -O`. The process has Quire's modules already, and reads them anew; the extension has no asserts.
WITHOUT_ASSERTS = Program(
    (
        "-c",
        "import sys\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'quire' and name != 'quire._C']:\n"
        "    del sys.modules[name]\n"
        "from tests import without_asserts\n"
        "from tests.kernels import guard_cases\n"
        "assert 'quire.kernels.ops' in without_asserts.loaded\n"
        "guard_cases.main(int(sys.argv[1]), sys.argv[2:])",
    )
)
# With the path: compiled kernels where there are some.
WAYS = (
    [(WITH_ASSERTS, ["kernels"]), (WITHOUT_ASSERTS, ["kernels", "reference"])]
    if cpu.available()
    else [(WITHOUT_ASSERTS, ["reference"])]
)


def verdicts(program: Program, paths: list[str]) -> list[str]:
    """Of each case on each path. A process that ends in a case is followed by another one, for the next case."""
    found: list[str] = []
    num_cases = len(paths) * len(CASES)
    while len(found) < num_cases:
        child = program.run(str(len(found)), *paths)
        words = [line.split(" ", 2) for line in child.stdout.splitlines()]
        found += [ast.literal_eval(rest[0]) for _, word, *rest in words if word == "ends"]
        if len(found) < num_cases:
            begun = words and words[-1][1] == "begins"
            assert begun, f"exit status {child.returncode} before a case: {child.stderr[-2000:]}"
            found.append(f"ended the interpreter with status {child.returncode}")
    return found


@pytest.mark.parametrize(("program", "paths"), WAYS, ids=["kernels", "without asserts"][-len(WAYS) :])
def test_wrong_arguments_are_refused(program: Program, paths: list[str]) -> None:
    """With asserts and without, on the compiled kernels and on plain torch."""
    found = [
        f"{path}, {case.name}: {verdict}; expected {case.error}, {case.says!r}"
        for (path, case), verdict in zip(product(paths, CASES), verdicts(program, paths), strict=True)
        if verdict
    ]
    assert not found, "\n".join(found)
