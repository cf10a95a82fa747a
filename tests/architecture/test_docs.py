"""docs/features.md names a test for every row, and each of them exists and runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.named_tests import check_test

ROOT = Path(__file__).parents[2]
FEATURES = ROOT / "docs" / "features.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROW_ID = re.compile(r"(S[0-4]-\d+|O\d+)")


def _rows() -> list[list[str]]:
    """The cells of every table row, headers left out."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in FEATURES.read_text().splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| row |", "| what works |"))
    ]


def test_the_tables_were_read() -> None:
    assert len(_rows()) > 30


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row[0][:40])
def test_row_names_tests_that_exist(row: list[str]) -> None:
    tests = TEST.findall(" ".join(row))
    assert tests, f"no test is named: {row[0]}"
    assert " ".join(row).count("::") == len(tests), f"a test is not spelled `path::name`: {row[0]}"
    for path, name in tests:
        check_test(path, name)


def test_every_claim_stands_once() -> None:
    ids = [name for row in _rows() for name in ROW_ID.findall(row[0])]
    assert len(ids) == len(set(ids)), sorted(name for name in set(ids) if ids.count(name) > 1)


def test_rows_with_a_number_have_four_cells() -> None:
    """What works, the tests, and what is missing, even if that is nothing."""
    for row in _rows():
        assert len(row) == (4 if ROW_ID.match(row[0]) else 2), row[0]
