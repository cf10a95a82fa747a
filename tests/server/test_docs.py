"""docs/serving.md names every route and request field there is, and no other route, and only metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

from starlette.routing import Route

from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "serving.md").read_text()
CODE = set(re.findall(r"`([^`\n]+)`", TEXT))


def test_routes(server):
    documented = set(re.findall(r"`(?:GET|POST) (/[^`]*)`", TEXT))
    routes = [route for route in server.app.routes if isinstance(route, Route) and route.include_in_schema]
    optional = {"/tokenizer_info"}  # served with --enable-tokenizer-info-endpoint alone
    assert documented == {route.path.replace(":path", "") for route in routes} | optional


def test_fields():
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert not fields - CODE, "fields that are not documented"


def test_metrics():
    """All metrics are in docs/metrics.md; this page names some of them."""
    all_names = (DOCS / "metrics.md").read_text()
    assert [name for name in CODE if name.startswith("vllm:") and f"`{name}`" not in all_names] == []
