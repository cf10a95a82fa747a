"""Documents and comments are read in terminals and in diffs: no line of them is longer than 120 columns.

ruff and clang-format see to Python and C++.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS = 120
UNBREAKABLE = re.compile(r"\s*(?:[-*] )?(?:!?\[[^\]]*\]\(\S*\)[.,;:]?|\S+)")  # a link, a word
OTHERS = {"build", "node_modules", "vendor"}  # folders that hold no documents of ours
COMMENTED = (".js", ".mjs", ".html", ".yaml", ".yml", ".tpl", ".toml", ".ini", ".sbatch", ".service", ".socket")
COMMENTED += (".cmake", "CMakeLists.txt", "Makefile", "Containerfile")
COMMENT = re.compile(r"\s*(?:#|//|/\*|\*|<!--|\{\{-? ?/\*)")


def _files(*ends: str) -> list[Path]:
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in OTHERS and not name.startswith(".")]
        found += [Path(folder, name).relative_to(ROOT) for name in files if name.endswith(ends)]
    return sorted(found)


def long_lines(text: str) -> list[int]:
    """Numbers of lines that are too long. Tables, code, and lines of one link or one word may be of any length."""
    found, in_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        is_text = not in_code and not line.startswith("|") and not UNBREAKABLE.fullmatch(line)
        if is_text and len(line) > COLUMNS:
            found.append(number)
    return found


@pytest.mark.parametrize("path", _files(".md"), ids=str)
def test_lines_of_text_are_short(path: Path) -> None:
    assert not long_lines((ROOT / path).read_text(encoding="utf-8")), f"{path}: wrap these lines at {COLUMNS} columns"


def test_comments_are_short() -> None:
    lines = [
        (f"{path}:{number}", line)
        for path in _files(*COMMENTED)
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
        if COMMENT.match(line)
    ]
    assert len(lines) > 200
    assert not [place for place, line in lines if len(line) > COLUMNS], f"wrap these lines at {COLUMNS} columns"


def test_what_counts() -> None:
    long = "x " * 61
    text = f"{long}\n| {long} |\n```\n{long}\n```\n- {long}\n![{long}](image.png)\n# {long}\n{long[:120]}"
    assert long_lines(text) == [1, 6, 8]
