"""docs/vllm.md: its missing features are missing, and README.md lists the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.compat.table import FOREIGN
from quire.config import EngineConfig
from quire.errors import ConfigError
from tests.server.serving import RunningServer

ROOT = Path(__file__).parents[2]
ROUTE = re.compile(r"`(GET|POST) (/\S+)`")
WORD = re.compile(r"`([\w-]+)`")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
# A body that uses a field, by the field's name.
ASKS: dict[str, dict[str, Any]] = {
    "tools": {"tools": [TOOL]},
    "functions": {"functions": [TOOL["function"]]},
    "image_url": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    "audio": {"audio": {"voice": "alloy", "format": "wav"}},
    "mm_processor_kwargs": {"mm_processor_kwargs": {"num_crops": 4}},
    "kv_transfer_params": {"kv_transfer_params": {"do_remote_decode": True}},
    **{name: {name: "a"} for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")},
}


def _rows() -> list[list[str]]:
    section = (ROOT / "docs" / "vllm.md").read_text().partition("## What is missing")[2]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def _items(column: int, pattern: re.Pattern[str]) -> list[Any]:
    return [found for row in _rows() for found in pattern.findall(row[column])]


@pytest.mark.parametrize(("method", "path"), _items(1, ROUTE))
def test_routes(method: str, path: str, server: RunningServer) -> None:
    assert httpx.request(method, server.url + path, json={}, timeout=10).status_code == 404


@pytest.mark.parametrize("field", _items(2, WORD))
def test_fields(field: str, server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]} | ASKS[field]
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=10)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_field"


@pytest.mark.parametrize("flag", _items(3, re.compile(r"`--([\w-]+)`")))
def test_flags(flag: str) -> None:
    name = flag.replace("-", "_")
    if name in FOREIGN:
        assert FOREIGN[name].kind == "refused"
    else:
        with pytest.raises(ConfigError, match="not supported"):
            EngineConfig.from_kwargs(**{name: 2})


def test_the_front_page_says_the_same() -> None:
    """Every row by its name, and no promise of everything."""
    page = " ".join((ROOT / "README.md").read_text().split())
    missing = [row[0] for row in _rows() if row[0] not in page]
    assert not missing
    assert len(_rows()) >= 5, "the table was not read"
    assert "unchanged" not in page
