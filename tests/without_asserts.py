"""Import it, and Quire's modules have no asserts, as under `python -O`. It is a pytest plugin too.

`python -O` itself compiles every module of every library anew, which takes ten seconds the first time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType

import pytest

OPTIMIZE = 1  # as -O does
loaded: set[str] = set()


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        loaded.add(fullname)
        path = self.get_filename(fullname)
        code: CodeType = compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=OPTIMIZE)
        return code


class _Finder:
    """Finds what the others find."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != "quire":
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = _Loader(name, spec.origin)
        return spec


assert "quire" not in sys.modules, "its modules are loaded already"
sys.meta_path.insert(0, _Finder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"{len(loaded)} modules of quire without asserts")
