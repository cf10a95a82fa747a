"""The arithmetic of benchmarks/speculation.py on drafts and costs, and a run of it on small models."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

import quire.demo


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


def test_earlier_turns_make_a_chat_longer(script: ModuleType) -> None:
    short, long = (script.prompts_of("chat", 4096, num_tokens)(1, 2) for num_tokens in (0, 300))
    assert [len(prompt) for prompt in long] == [300, 300]
    for question, prompt in zip(short, long, strict=True):
        assert prompt[-len(question) :] == question


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
    words = "--small --methods eagle3 --rounds 1 --tokens 8 --draft-steps 0 --formats none --requests 1 2 --again"
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
        "chat | none | 2 | off, again | ",
        "copy-edit | none | 2 | off | 1.000 | 1.000",
        "chat | none | 2 | it | 16.0 | 16.0",
    ):
        assert row in shown


@pytest.mark.slow
def test_a_run_with_a_layer_for_multi_token_prediction(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drafts that never hold change no token, which the script itself checks."""
    words = "--methods mtp --rates 0 --fixed 2 --rounds 1 --tokens 8 --drafts 2 --formats none --requests 2"
    shape = str(quire.demo.path("target"))
    monkeypatch.setattr(sys, "argv", ["speculation.py", str(tmp_path), "--shape", shape, *words.split()])
    script.main()
    shown = capsys.readouterr().out
    assert "All engines of Quire gave the same tokens." in shown
    (row,) = [line for line in shown.splitlines() if "mtp, 0 hold, always 2 |" in line]
    k, a = (float(row.split("|")[at]) for at in (7, 8))
    assert k > 1
    assert a == 0
