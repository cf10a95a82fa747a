"""Schemathesis sends requests that our OpenAPI document allows and forbids: no 5xx, and answers do not change."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from jsonschema import Draft202012Validator

from tests.e2e.serving import SMALL, Serve
from tests.server.refusals import reasons_of

JSON = "application/json"
SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
# 413 is an answer to a body that is too large, whatever else is wrong with it.
SETTINGS = """
[checks]
negative_data_rejection.expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, "5xx"]
"""


def golden(http: httpx.Client) -> Any:
    body = {"prompt": "def f(", "temperature": 0, "max_tokens": 30, "logprobs": 2}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    return choice


def is_refusal(case: str) -> bool:
    """Whether a case of the report says only that a body of the right form was refused (ST202).

    `wrongly_refused` looks at each of them, with the rules between fields, which Schemathesis cannot combine, and the
    reasons that no schema can say, such as a prompt that is too long.
    """
    found = set(re.findall(r"^- (ST\d+) ", case, flags=re.MULTILINE))
    return found == {"ST202"} and "[400] Bad Request" in case and re.search("curl -X POST .*-d ", case) is not None


def wrongly_refused(document: Any, archive: Any) -> list[str]:
    """Bodies that the whole document allows, refused for a reason that a schema can express.

    Args:
        archive: all requests with their answers (HAR).
    """
    found = []
    for entry in archive["log"]["entries"]:
        path = urlsplit(entry["request"]["url"]).path
        schema = document["paths"].get(path, {}).get("post", {}).get("requestBody", {}).get("content", {})
        content, body = entry["response"]["content"], entry["request"].get("postData", {}).get("text", "")
        if entry["request"]["method"] != "POST" or entry["response"]["status"] != 400 or JSON not in schema:
            continue
        try:
            asked = json.loads(body)
        except ValueError:
            continue
        validator = Draft202012Validator({**schema[JSON]["schema"], "components": document["components"]})
        message = content["text"]
        if content.get("encoding") == "base64":
            message = base64.b64decode(message).decode()
        if validator.is_valid(asked) and not reasons_of(message):
            found.append(f"{path}: {message}\n{body[:2000]}")
    return found


CASE = "1. Test Case ID: a\n\n- {} Title\n\n[{}:\n\n    curl -X {} http://h/b"


@pytest.mark.parametrize(
    ("check", "status", "request_", "is_one"),
    [
        ("ST202", "400 Bad Request", "POST -d '{}'", False),
        ("ST202", "400] Bad Request", "POST -d '{}'", True),
        ("ST202", "400] Bad Request", "POST", False),
        ("ST202", "400] Bad Request", "GET", False),
        ("ST202", "404] Not Found", "POST -d '{}'", False),
        ("ST201", "400] Bad Request", "POST -d '{}'", False),
        ("ST202 Title\n- ST100", "400] Bad Request", "POST -d '{}'", False),
    ],
)
def test_only_a_refusal_is_one(check: str, status: str, request_: str, is_one: bool) -> None:
    assert is_refusal(CASE.format(check, status, request_)) is is_one


def test_a_wrong_refusal_is_found() -> None:
    """It is one only if the document allows the body, and a schema could express the reason."""
    body_of_a = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    document = {
        "paths": {"/b": {"post": {"requestBody": {"content": {JSON: {"schema": {"$ref": "#/components/schemas/B"}}}}}}},
        "components": {"schemas": {"B": body_of_a}},
    }

    def entry(body: str, message: str, status: int = 400, path: str = "/b") -> dict[str, Any]:
        request = {"method": "POST", "url": f"http://h{path}?q", "postData": {"text": body}}
        return {"request": request, "response": {"status": status, "content": {"text": message}}}

    entries = [
        entry('{"a": 1}', "a is odd"),
        entry('{"a": 1}', "the maximum context length is 5 tokens"),
        entry('{"a": 1}', "a is odd", status=404),
        entry('{"a": "1"}', "a is odd"),
        entry("{", "no JSON"),
        entry('{"a": 1}', "a is odd", path="/c"),
    ]
    assert wrongly_refused(document, {"log": {"entries": entries}}) == ['/b: a is odd\n{"a": 1}']


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_ends_in_an_error_of_the_server(mode: str, tmp_path: Path) -> None:
    """All checks and phases, null bytes, every route, tools and reasoning parsed."""
    if not shutil.which(SCHEMATHESIS):
        pytest.skip("no schemathesis: make test-full installs it")
    flags = (*SMALL, "--max-model-len", "64", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with Serve(*flags) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        before = golden(http)
        document = http.get("/openapi.json").json()
        without_rules = json.loads(json.dumps(document))
        for schema in without_rules["components"]["schemas"].values():
            schema.pop("allOf", None)
        path, archive = tmp_path / "openapi.json", tmp_path / "requests.har"
        path.write_text(json.dumps(without_rules))
        (tmp_path / "schemathesis.toml").write_text(SETTINGS)
        options = {
            "url": server.url,
            "checks": "all",
            "phases": "examples,coverage,fuzzing,stateful",
            "mode": mode,
            "generation-allow-x00": "true",
            "max-examples": "5",
            "seed": "1",
            "request-timeout": "120",
            "max-response-time": "120",
            "suppress-health-check": "all",
            "report": "har",
            "report-har-path": str(archive),
            "output-sanitize": "false",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        run = subprocess.run(
            [SCHEMATHESIS, "run", path, *arguments, "--no-color"],
            cwd=tmp_path, capture_output=True, text=True, timeout=1100, check=False,
        )  # fmt: skip
        report, _, summary = run.stdout.partition("= SUMMARY =")
        assert "Tested:" in summary, run.stdout + run.stderr
        assert "Errors:" not in summary, report[-20_000:]
        found = re.split(r"(?=^\d+\. Test Case ID)", report, flags=re.MULTILINE)
        defects = [case for case in found[1:] if not is_refusal(case)]
        assert not defects, "".join(defects)[:20_000]
        refused = wrongly_refused(document, json.loads(archive.read_text()))
        assert not refused, "\n\n".join(refused)[:20_000]
        assert golden(http) == before
