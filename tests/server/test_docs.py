"""docs/serving.md names every route, request field and metric there is, and no other route or metric."""

from __future__ import annotations

import re
from pathlib import Path

from starlette.routing import Route

from quire.metrics.registry import METRICS
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
CODE = set(re.findall(r"`([^`\n]+)`", TEXT))


def test_routes(server):
    documented = set(re.findall(r"`(?:GET|POST) (/[^`]*)`", TEXT))
    assert documented == {route.path.replace(":path", "") for route in server.app.routes if isinstance(route, Route)}


def test_fields():
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert not fields - CODE, "fields that are not documented"


def test_metrics():
    names = {metric.name + ("_total" if metric.kind == "counter" else "") for metric in METRICS}
    assert {name for name in CODE if name.startswith("vllm:")} == names
