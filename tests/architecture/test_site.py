"""The documentation as a site: every page is on it, links lead somewhere, code blocks are code."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def _prose(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings, and anchors that are written out."""
    text = path.read_text(encoding="utf-8")
    found = set(re.findall(r'<a id="([^"]+)"', text))
    for heading in re.findall(r"^#+ (.*)$", _prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(re.sub(r"`[^`]*`", "", _prose(page.read_text(encoding="utf-8")))):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = page if not path else (page.parent / path)
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda path: path.name)
def test_code_blocks_are_code(page: Path) -> None:
    for _, language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            ast.parse(code)
        elif language == "json":
            for line in [code] if code.lstrip().startswith("{\n") else code.splitlines():
                json.loads(line)
        elif language == "yaml":
            yaml.safe_load(code)


def _pages(entries: object) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    if isinstance(entries, dict):
        return [page for value in entries.values() for page in _pages(value)]
    assert isinstance(entries, list)
    return [page for entry in entries for page in _pages(entry)]


def test_every_page_is_on_the_site() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(_pages(settings["nav"])) == sorted(["index.md", *(page.name for page in PAGES)])


@pytest.mark.slow
def test_the_site_is_built_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is in the extra `docs`")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for page in PAGES:
        html = (tmp_path / page.name).with_suffix(".html").read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="(https?:[^"]+)', html)
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(https?:[^"]+)', html)
        assert not loaded, page.name
