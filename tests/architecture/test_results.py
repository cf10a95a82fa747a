"""benchmarks/results: every file is named by a sentence, every named file exists, and the table says so."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from benchmarks import results_table

ROOT = Path(__file__).parents[2]


def test_the_table_is_current() -> None:
    rows = results_table.cited()
    assert not results_table.faults(rows)
    assert results_table.TABLE.read_text(encoding="utf-8") == results_table.render(rows), (
        "the documents have changed: run `python benchmarks/results_table.py`"
    )


def test_results_lie_in_folders_of_their_hardware() -> None:
    dated = [path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*_20[0-9][0-9]-*")]
    assert dated
    assert all(path.parent.parent.name == "results" for path in dated)


def test_a_file_that_is_missing_and_one_that_nobody_names_are_faults() -> None:
    rows = results_table.cited()
    (name, _, _), *_ = rows
    missing, unnamed = results_table.faults(
        [row for row in rows if row[0] != name] + [("z/none_2026-01-01", "a.md", "Fast.")]
    )
    assert missing == "a.md names z/none_2026-01-01, which does not exist"
    assert unnamed.startswith(f"no sentence names {name}: ")


def test_sentences_of_a_document() -> None:
    name = f"x/a_{date.today().isoformat()}"
    text = f"First one. It is 2 times as\nfast ([table](results/{name}.md)). Last.\n- `results/{name}.json`: 3\n"
    assert list(results_table.sentences(text)) == [
        (name, "It is 2 times as fast (table)."),
        (name, f"`results/{name}.json`: 3"),
    ]
