"""The arithmetic of benchmarks/speculation.py on drafts and costs, and a run of it on small models."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("speculation")


def test_acceptance_counts_the_drafts_that_could_hold(script: ModuleType) -> None:
    assert script.acceptance([[(4, 2)], [(4, 4), (3, 0)], [(0, 0)]]) == 6 / 8
    assert script.acceptance([[(0, 0)]]) != script.acceptance([[(0, 0)]]), "nothing was drafted"


def test_possible_gain_of_a_fixed_depth_is_the_formula(script: ModuleType) -> None:
    costs, a, d = [1.0, 1.01, 1.02, 1.03, 1.06], 0.7, 0.1
    formula = (1 - a**5) / (1 - a) / (1.06 + 4 * d)
    assert script.possible_gain([[(4, 1)], [(4, 4)]], a, costs, d) == pytest.approx(formula)
    assert script.possible_gain([[(0, 0)], [(0, 0)]], a, costs, d) == 1
    mixed = script.possible_gain([[(4, 1), (0, 0)]], a, costs, d)
    assert mixed == pytest.approx((formula * (1.06 + 4 * d) + 1) / 2 / (1.02 + 2 * d))


PEER = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"seconds": asked["num_tokens"] / 8}), flush=True)
"""


@pytest.mark.slow
def test_a_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--small --methods eagle3 --rounds 1 --tokens 8 --draft-steps 0 --formats none --requests 1 2"
    peer = tmp_path / "peer.py"
    peer.write_text(PEER)
    command = f"{sys.executable} {peer}"
    monkeypatch.setattr(
        sys, "argv", ["speculation.py", str(tmp_path), *words.split(), "--peer", "it", command, command]
    )
    script.main()
    shown = capsys.readouterr().out
    for row in (
        "chat | none | 1 | off | 1.000 | 1.000",
        "chat | none | 2 | eagle3 | ",
        "copy-edit | none | 2 | off | 1.000 | 1.000",
        "chat | none | 2 | it | 16.0 | 16.0",
    ):
        assert row in shown
