"""The release script refuses what must not be released."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

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
