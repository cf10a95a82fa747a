"""The release script refuses what must not be released."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tools import release

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "CMakeLists.txt", "src/quire/__init__.py", "deploy/helm/quire/Chart.yaml")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository that may be released."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0\n")
    _git(tmp_path, "init", "-q")
    _commit(tmp_path)
    return tmp_path


def _git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True)


def _commit(folder: Path) -> None:
    _git(folder, "add", "-A")
    _git(folder, "commit", "-q", "-m", "x")


def test_the_versions_of_this_tree_agree() -> None:
    named = release.versions(ROOT)
    assert len(set(named.values())) == 1, named


def test_a_clean_tree_may_be_released(tree: Path) -> None:
    assert release.problems(tree) == []


def test_what_is_refused(tree: Path) -> None:
    (tree / "new").touch()
    assert "?? new" in release.problems(tree)[0]
    (tree / "new").unlink()
    chart = tree / "deploy" / "helm" / "quire" / "Chart.yaml"
    chart.write_text(chart.read_text().replace("version: 0.1.0", "version: 0.2.0"))
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    _commit(tree)
    _git(tree, "tag", "v0.1.0")
    disagree, heading, tagged = release.problems(tree)
    assert "Chart.yaml, version 0.2.0" in disagree
    assert "## 0.1.0" in heading
    assert "v0.1.0" in tagged


@pytest.fixture
def made(tree: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The release that the script made from this tree. `make wheel` fails if there is no folder `dist`."""
    done: list[str] = []

    def run(words: Sequence[str], **options: Any) -> Any:
        if words[0] != "make":
            return subprocess_run(words, **options)
        assert options["cwd"] == tree
        done.append(words[1])
        return subprocess.CompletedProcess(words, 1 if words[1] == "wheel" and not (tree / "dist").exists() else 0)

    subprocess_run = subprocess.run
    monkeypatch.setattr(release, "ROOT", tree)
    monkeypatch.setattr(release.subprocess, "run", run)
    return done


def test_it_runs_everything(tree: Path, made: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tree / ".git" / "info" / "exclude").write_text("dist\n")
    (tree / "dist").mkdir()
    assert release.main() == 0
    assert made == ["check", "test-full", "wheel", "docs"]
    assert "git tag -s v0.1.0" in capsys.readouterr().out
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(made) <= set(targets)


def test_it_ends_with_the_first_step_that_fails(
    tree: Path, made: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.main() == 1
    assert made == ["check", "test-full", "wheel"]
    assert "make wheel failed" in capsys.readouterr().err


def test_nothing_is_run_on_a_dirty_tree(tree: Path, made: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "new").touch()
    assert release.main() == 1
    assert made == []
    assert "?? new" in capsys.readouterr().err
