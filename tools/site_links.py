"""A hook of mkdocs: the first page is README.md, and links to files outside docs/ become their names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def anchor(heading: str, separator: str) -> str:
    """The name of a heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    """Anchors have GitHub's names, which the links of the documents use."""
    config.mdx_configs["toc"]["slugify"] = anchor
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add README.md as the first page."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links as the site has them."""
    folder = ROOT if page.file.src_uri == "index.md" else ROOT / "docs"
    return _LINK.sub(lambda link: _of_site(link, folder), markdown)


def _of_site(link: re.Match[str], folder: Path) -> str:
    mark, text, target, anchor = link[1], link[2], link[3], link[4] or ""
    if "://" in target or target.startswith("mailto:"):
        return link[0]
    path = (folder / target).resolve()
    if path == ROOT / "README.md":
        return f"[{text}](index.md{anchor})"
    if path.is_relative_to(ROOT / "docs"):
        return f"{mark}[{text}]({path.relative_to(ROOT / 'docs')}{anchor})"
    name = f"`{path.relative_to(ROOT)}`"
    return name if text.strip("`") in (target, path.name) else f"{text} ({name})"
