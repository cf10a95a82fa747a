"""The arithmetic of benchmarks/useless_drafts.py."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest


def test_what_drafts_cost_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take 10 ms. While drafts are on, deciding takes 0.1 ms, and one step of eight has a draft, which takes 4 ms
    more. A step beyond the last whole turn belongs to no pair.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("useless_drafts")

    def step(number: int, is_on: bool) -> dict[str, object]:
        drafts = int(is_on and number == 3)
        seconds = 10e-3 + 0.1e-3 * is_on + 4e-3 * drafts
        return {"is_on": is_on, "seconds": seconds, "schedule_seconds": 0.05e-3 + 0.1e-3 * is_on, "drafts": drafts}

    on, off = ([step(number, is_on) for number in range(8)] for is_on in (True, False))
    for first, second in ((on, off), (off, on)):
        found = script.summary([[*first, *second, step(0, True)]], 8)
        assert found["pairs"] == [pytest.approx(1 + (8 * 0.1 + 4) / 80)]
        assert (found["steps"], found["drafts"]) == (9, 1)
        assert found["step_ms"] == pytest.approx(10)
        assert found["drafting"] == pytest.approx(4.1 / 90)
        assert found["deciding"] == pytest.approx(0.01)
        assert found["plain"] == pytest.approx(1.01)


def test_what_no_step_without_drafts_says_is_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has drafts while they are on, and takes 12 ms instead of 10."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("useless_drafts")
    steps = [
        {"is_on": is_on, "seconds": 12e-3 if is_on else 10e-3, "schedule_seconds": 0.05e-3, "drafts": int(is_on)}
        for is_on in (True, True, False, False)
    ]
    found = script.summary([steps], 2)
    assert math.isnan(found["plain"])
    assert math.isnan(found["deciding"])
    assert found["drafting"] == pytest.approx(0.2)
    assert found["pairs"] == [pytest.approx(1.2)]
