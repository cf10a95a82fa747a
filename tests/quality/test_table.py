"""The table of quality in docs/quantization.md: its script's rows, the numbers `quire plan` goes by, found again."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import quire.plan
from benchmarks import quality
from quire.kernels import cpu

DOCS = Path(__file__).parents[2] / "docs" / "quantization.md"
NUM_QUESTIONS = 40


def rows_of(text: str) -> dict[str, list[str]]:
    """Name -> cells, of the one table whose last column is the exact answers."""
    table = text.partition("| exact answers |\n")[2].partition("\n\n")[0].splitlines()[1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name: cells for name, *cells in rows}


DOCUMENTED = rows_of(DOCS.read_text())


def number(cell: str) -> float:
    """The first one: `0.00127 [0.00115, 0.00140]` is 0.00127."""
    return float(re.split(r"[ \[]", cell)[0])


def interval(cell: str) -> tuple[float, float]:
    """Of 95 % confidence: that of `0.00127 [0.00115, 0.00140]` ends at 0.00115 and 0.00140."""
    low, high = re.findall(r"[\d.]+", cell)[1:]
    return float(low), float(high)


def test_every_format_has_a_row() -> None:
    assert list(DOCUMENTED) == [*quality.ON_LOAD, *quality.WRITTEN]
    assert all(cells[-1].endswith(" of 200") for cells in DOCUMENTED.values())


def test_the_plan_goes_by_it() -> None:
    kl = {name.strip("`"): number(cells[2]) for name, cells in DOCUMENTED.items()}
    weights, kv = quire.plan._WEIGHTS_KL, quire.plan._KV_KL
    assert {f"--quantization {name}": loss for name, loss in weights.items() if name is not None}.items() <= kl.items()
    assert {f"--kv-cache-dtype {name}": loss for name, loss in kv.items() if name != "auto"}.items() <= kl.items()
    assert kl["bfloat16"] == quire.plan._REDUCED_DTYPE_KL


@pytest.mark.skipif(not cpu.available(), reason="the twin holds 4-bit codes in bytes")
def test_a_shorter_run_finds_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A quarter of the text and a fifth of the questions, on any instruction set: close, and the same bytes.

    The text is made of this interpreter's docstrings, another one's differ: 1 % in a ratio where the table says 1.0109.
    """
    words = ["--questions", str(NUM_QUESTIONS), "--max-tokens", "4096", "--rows", "0", str(len(quality.ON_LOAD))]
    monkeypatch.setattr(sys, "argv", ["quality.py", *words])
    quality.main()
    found = rows_of(capsys.readouterr().out)
    assert list(found) == list(quality.ON_LOAD)
    for name, (num_bytes, ratio, kl, kl_p99, same, answers) in found.items():
        documented = DOCUMENTED[name]
        assert num_bytes == documented[0], name
        (low, high), (documented_low, documented_high) = interval(ratio), interval(documented[1])
        assert low <= documented_high, name
        assert high >= documented_low, name
        assert number(kl) == pytest.approx(number(documented[2]), rel=0.4), name
        assert number(kl_p99) == pytest.approx(number(documented[3]), rel=0.4), name
        assert number(same) == pytest.approx(number(documented[4]), abs=0.6), name
        assert number(answers) >= NUM_QUESTIONS - 1, name
