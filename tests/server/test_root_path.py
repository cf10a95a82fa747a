"""--root-path: behind a proxy that shows the server under a prefix, and strips it or does not."""

from __future__ import annotations

import httpx
import pytest

from quire.config import ServerConfig
from quire.server.auth import PUBLIC_PATHS
from tests.server.serving import RunningServer
from tests.server.test_auth import raw_status


@pytest.fixture(scope="module")
def prefixed():
    root_path = ServerConfig(root_path="/team/llm/").root_path
    with RunningServer(root_path=root_path, api_keys=("key",)) as server:
        yield server


@pytest.mark.parametrize("prefix", ["", "/team/llm"])
def test_paths_come_with_it_or_without(prefixed, prefix):
    assert prefixed.http.get(f"{prefix}/v1/models").status_code == 200
    answer = prefixed.http.post(f"{prefix}/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
    assert answer.status_code == 200
    assert prefixed.http.get(f"{prefix}/v1/models/none").status_code == 404
    document = prefixed.http.get(f"{prefix}/openapi.json").json()
    assert document["servers"] == [{"url": "/team/llm"}]
    assert prefixed.http.get(f"{prefix}/").text.startswith("<!")


def test_the_prefix_alone_is_the_page(prefixed):
    assert prefixed.http.get("/team/llm").text.startswith("<!")


def test_requests_count_under_their_route(prefixed):
    prefixed.http.get("/team/llm/version/x")
    prefixed.http.get("/team/llm/v1/config")
    text = prefixed.http.get("/metrics").text
    assert 'handler="/v1/config"' in text
    assert "/team/llm" not in text


TARGETS = """
    /v1/models /team/llm/v1/models /team/llmx/health /team/llm//health /team/health //team/llm/health
    /team/llm/team/llm/health /team/llm/health/../v1/models /team/llm/%68ealth/x /team/llm%2fv1/models
"""


@pytest.mark.parametrize("target", TARGETS.split())
def test_the_key_guards_every_spelling(prefixed, target):
    status = raw_status(prefixed.port, f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\n")
    assert status.split()[1] == b"401", status


def test_the_probes_stay_public(prefixed):
    for path in PUBLIC_PATHS:
        assert httpx.get(f"{prefixed.url}/team/llm{path}").status_code == 200, path
