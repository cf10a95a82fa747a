"""The table of quality in docs/quantization.md: its script's rows, the numbers `quire plan` goes by, found again."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest

import quire.demo
import quire.formats.weight_format
import quire.planning.fits
from benchmarks import quality
from quire.config import EngineConfig
from quire.kernels import cpu
from quire.messages import Progress
from quire.quality import measure
from tests.gguf.writing import write_gguf
from tests.quality.remembering import remembering

DOCS = Path(__file__).parents[2] / "docs" / "quantization.md"
GGUF_32 = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]  # groups of 32
GGUF_K = ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K"]


def rows_of(text: str) -> dict[str, list[str]]:
    """Name -> cells, of the one table whose last column is the exact answers."""
    table = text.partition("| exact answers |\n")[2].partition("\n\n")[0].splitlines()[1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name: cells for name, *cells in rows}


DOCUMENTED = rows_of(DOCS.read_text())

# Text and questions come from the interpreter's docstrings.
learned = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the demo model has learned Python 3.11's docs")


def number(cell: str) -> float:
    """The first one: `0.00127 [0.00115, 0.00140]` is 0.00127."""
    return float(re.split(r"[ \[]", cell)[0])


def test_every_format_has_a_row() -> None:
    of_files = [f"GGUF {name}" for name in ("F16", *GGUF_32, *GGUF_K)]
    assert list(DOCUMENTED) == [*quality.ON_LOAD, *quality.WRITTEN, *of_files]
    assert all(cells[-1].endswith(" of 200") for cells in DOCUMENTED.values())
    # llama.cpp writes MXFP4 for gpt-oss alone, and no converter makes it from the demo model.
    for tensor_type in quire.formats.weight_format.GGUF.keys() - {"MXFP4"}:
        assert any(name.startswith(f"GGUF {tensor_type}") for name in of_files), tensor_type


@pytest.mark.parametrize(("kind", "row"), [("ALL_F32", "GGUF F32"), ("MOSTLY_Q4_K_M", "GGUF Q4_K_M")])
def test_a_gguf_file_is_named_by_its_header(tmp_path: Path, kind: str, row: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "demo-BF16.gguf", "llama")
    writer.add_file_type(gguf.LlamaFileType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert quality.gguf_row(str(tmp_path / "demo-BF16.gguf")) == row


@pytest.mark.parametrize("family", [GGUF_32, GGUF_K], ids=["32", "K"])
def test_more_bits_lose_less(family: list[str]) -> None:
    """Bytes and losses come from files that are not here: the test sees at least that no rows have changed places."""
    rows = [DOCUMENTED[f"GGUF {name}"] for name in family]
    assert sorted(rows, key=lambda cells: number(cells[0])) == rows
    assert sorted(rows, key=lambda cells: number(cells[2]), reverse=True) == rows


def test_the_plan_goes_by_it() -> None:
    kl = {name.strip("`"): number(cells[2]) for name, cells in DOCUMENTED.items()}
    weights, kv = quire.planning.fits.WEIGHTS_KL, quire.planning.fits.KV_KL
    assert {f"--quantization {name}": loss for name, loss in weights.items() if name is not None}.items() <= kl.items()
    assert {f"--kv-cache-dtype {name}": loss for name, loss in kv.items() if name != "auto"}.items() <= kl.items()
    assert kl["bfloat16"] == quire.planning.fits.REDUCED_DTYPE_KL


@dataclass(frozen=True)
class Run:
    """A shorter run than the table's, and the tolerance of its ratio of perplexities.

    Releases of Python 3.11 differ in their docstrings: over a quarter of the text the ratio of fp8_e5m2 is 0.01 larger
    or smaller for that reason alone.
    """

    num_tokens: int
    num_questions: int
    tolerance: float


RUNS = (Run(3072, 2, 0.025), pytest.param(Run(16_384, 40, 0.01), marks=pytest.mark.slow))


@learned
@pytest.mark.skipif(not cpu.available(), reason="the twin holds 4-bit codes in bytes")
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_shorter_run_finds_it(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = shorter_run(run, monkeypatch, capsys, ["--rows", "0", str(len(quality.ON_LOAD))])
    assert list(rows) == list(quality.ON_LOAD)
    check_close(run, rows)


@learned
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_shorter_run_finds_that_of_a_gguf_file(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of Q8_0: llama.cpp gives it to every matrix, and the `gguf` package can write it."""
    file = tmp_path / "demo"
    write_gguf(file, quire.demo.path(), "Q8_0")
    of_quire = quality.ON_LOAD | quality.WRITTEN
    rows = shorter_run(run, monkeypatch, capsys, ["--gguf", str(file), "--rows", str(len(of_quire)), "99"])
    assert list(rows) == ["GGUF Q8_0"]
    check_close(run, rows)


def shorter_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> dict[str, list[str]]:
    load = measure.load

    def load_remembering(config: EngineConfig, progress: Progress) -> measure.Loaded:
        loaded = load(config, progress)
        if config.dtype == "float32":  # the base
            remembering(loaded.runner)
        return loaded

    monkeypatch.setattr(measure, "load", load_remembering)
    counts = ["--questions", str(run.num_questions), "--max-tokens", str(run.num_tokens), "--num-threads", "1"]
    monkeypatch.setattr(sys, "argv", ["quality.py", *counts, *words])
    quality.main()
    return rows_of(capsys.readouterr().out)


def check_close(run: Run, rows: dict[str, list[str]]) -> None:
    """On any instruction set: close, and the same bytes."""
    for name, (num_bytes, ratio, kl, kl_p99, same, answers) in rows.items():
        documented = DOCUMENTED[name]
        assert num_bytes == documented[0], name
        assert number(ratio) == pytest.approx(number(documented[1]), abs=run.tolerance), name
        assert number(kl) == pytest.approx(number(documented[2]), rel=0.4), name
        assert number(kl_p99) == pytest.approx(number(documented[3]), rel=0.4), name
        assert number(same) == pytest.approx(number(documented[4]), abs=60 * run.tolerance), name
        assert number(answers) >= run.num_questions - 1, name
