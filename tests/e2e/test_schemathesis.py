"""Schemathesis sends what our OpenAPI document allows and what it forbids: no 5xx, and answers stay what they were."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import SMALL, Serve

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
# What is found and is no defect. ST202: a body of the right form is refused for what no schema can say, such as a
# prompt that is too long for the context (tests/server/test_request_schemas.py has the reasons).
NO_DEFECTS = {"ST202"}
# 413 is an answer to a body that is too large, whatever else is wrong with it.
SETTINGS = """
[checks]
negative_data_rejection.expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, "5xx"]
"""


def golden(http: httpx.Client) -> Any:
    body = {"prompt": "def f(", "temperature": 0, "max_tokens": 30, "logprobs": 2}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    return choice


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_ends_in_an_error_of_the_server(mode: str, tmp_path: Path) -> None:
    """All checks and phases, null bytes, every route. Rules between fields stay out: it cannot combine all of them."""
    if not shutil.which(SCHEMATHESIS):
        pytest.skip("no schemathesis: make test-full installs it")
    flags = (*SMALL, "--max-model-len", "64")
    with Serve(*flags) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        before = golden(http)
        document = http.get("/openapi.json").json()
        for schema in document["components"]["schemas"].values():
            schema.pop("allOf", None)
        path = tmp_path / "openapi.json"
        path.write_text(json.dumps(document))
        (tmp_path / "schemathesis.toml").write_text(SETTINGS)
        options = {
            "url": server.url,
            "checks": "all",
            "phases": "examples,coverage,fuzzing,stateful",
            "mode": mode,
            "generation-allow-x00": "true",
            "max-examples": "5",
            "seed": "1",
            "request-timeout": "30",
            "max-response-time": "30",
            "suppress-health-check": "all",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        run = subprocess.run(
            [SCHEMATHESIS, "run", path, *arguments, "--no-color"],
            cwd=tmp_path, capture_output=True, text=True, timeout=550, check=False,
        )  # fmt: skip
        report, _, summary = run.stdout.partition("= SUMMARY =")
        assert "Tested:" in summary, run.stdout + run.stderr
        assert "Errors:" not in summary, report[-20_000:]
        found = re.split(r"(?=^\d+\. Test Case ID)", report, flags=re.MULTILINE)
        defects = [case for case in found if not set(re.findall(r"\bST\d+\b", case)) <= NO_DEFECTS]
        assert not defects, "".join(defects)[:20_000]
        assert golden(http) == before
