"""Scripts in benchmarks/ print their result. With --save they also write it, for programs and for people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.measure import report


@pytest.mark.parametrize("script", ["benchmarks/lanes.py", "benchmarks/kernels/gemm.py"])
def test_save_names_the_folder_of_the_machine(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = report.script_parser("What it does.").parse_args(["--save", "some-machine"])
    report.publish(str(tmp_path / script), given.save, "rates", {"rate": 2}, "# Rates\n")
    assert capsys.readouterr().out == "# Rates\n\n"
    data, text = sorted((tmp_path / "benchmarks" / "results" / "some-machine").iterdir())
    assert data.name.startswith("rates_2")
    assert (data.suffix, text.suffix) == (".json", ".md")
    assert json.loads(data.read_text()) == {"rate": 2}
    assert text.read_text() == "# Rates\n"


def test_without_save_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = report.script_parser("What it does.").parse_args([])
    report.publish(str(tmp_path / "benchmarks" / "lanes.py"), given.save, "rates", {"rate": 2}, "# Rates\n")
    assert capsys.readouterr().out == "# Rates\n\n"
    assert list(tmp_path.iterdir()) == []
