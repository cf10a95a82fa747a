"""Names in documents exist: tests for every feature of docs/features.md, which run, and paths in all documents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.named_tests import check_test

ROOT = Path(__file__).parents[2]
FEATURES = ROOT / "docs" / "features.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
DOCUMENTS = [ROOT / "README.md", ROOT / "benchmarks" / "NOTES.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = re.compile(r"(?<![\w/.-])(?:src|tests|benchmarks|csrc|deploy|docs|tools)/[\w./*-]*[\w*]")
ROW_ID = re.compile(r"(S[0-4]-\d+|O\d+)")


def _features() -> list[str]:
    """The list items: what works, `*Not yet*`, `Tests:`."""
    items = re.split(r"^(?:- |#+ )", FEATURES.read_text(), flags=re.MULTILINE)
    return [item for item in (" ".join(item.split()) for item in items) if "Tests: " in item]


def test_the_lists_were_read() -> None:
    assert len(_features()) > 60


@pytest.mark.parametrize("feature", _features(), ids=lambda feature: feature[:40])
def test_a_feature_names_tests_that_exist(feature: str) -> None:
    words = feature.partition("Tests: ")[2]
    tests = TEST.findall(words)
    assert tests, f"no test is named: {feature}"
    assert words == ", ".join(f"`{path}::{name}`" for path, name in tests) + ".", f"more than tests: {feature}"
    for path, name in tests:
        check_test(path, name)


def test_every_item_is_a_feature() -> None:
    assert len(re.findall(r"^- ", FEATURES.read_text(), flags=re.MULTILINE)) == len(_features())


def test_every_claim_stands_once() -> None:
    ids = [name for feature in _features() for name in ROW_ID.findall(feature.partition(":")[0])]
    assert len(ids) > 30
    assert len(ids) == len(set(ids)), sorted(name for name in set(ids) if ids.count(name) > 1)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_paths_exist(document: Path) -> None:
    """Result files have a test of their own; HARDWARE and DATE stand for what a reader puts there."""
    named = PATH.findall(document.read_text())
    patterns = [name for name in named if "results/" not in name]
    assert not [pattern for pattern in patterns if next(ROOT.glob(pattern), None) is None]
