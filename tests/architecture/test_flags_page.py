"""docs/flags.md is what the definitions say."""

from __future__ import annotations

from pathlib import Path

from quire.cli.flags_page import render
from quire.compat.table import FOREIGN, as_flag
from quire.config import EngineConfig, ServerConfig
from quire.option import options

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "the definitions have changed: run `python -m quire.cli.flags_page > docs/flags.md`"
    )


def test_every_flag_is_on_the_page() -> None:
    page = render()
    names = [f.name for config in (EngineConfig, ServerConfig) for f in options(config)]
    missing = [name for name in [*names, *FOREIGN] if f"`{as_flag(name)}`" not in page]
    assert not missing
