"""The middleware that counts HTTP requests, without a server: labels from closed sets whatever a client sends."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import Response
from starlette.routing import Route

from quire.metrics.http import HttpMetrics
from quire.server.http_metrics import NOT_COUNTED, CountRequests
from tests.server.test_errors import MESSAGES


async def _endpoint(request: object) -> Response:
    return Response()


ROUTES = [Route(path, _endpoint) for path in ("/", "/v1/models", "/v1/models/{model:path}", *NOT_COUNTED)]


class App:
    """Answers with a status, or raises where that is None."""

    def __init__(self) -> None:
        self.status: int | None = 200
        self.registry = CollectorRegistry()
        self.counting = CountRequests(self._answer, HttpMetrics(self.registry), ROUTES)

    async def _answer(self, scope, receive, send) -> None:
        if self.status is None:
            raise RuntimeError("broken")
        await send({"type": "http.response.start", "status": self.status, "headers": []})

    async def request(self, method: str, path: str) -> None:
        async def receive():
            return {"type": "http.disconnect"}

        async def send(message) -> None:
            pass

        await self.counting({"type": "http", "method": method, "path": path}, receive, send)

    def series(self) -> list[str]:
        return [line for line in generate_latest(self.registry).decode().splitlines() if not line.startswith("#")]


async def test_ten_thousand_random_methods_and_paths_make_no_series():
    app = App()
    for status in (200, 404):
        app.status = status
        for path in ("/", "/v1/models", "/v1/models/x", "/other"):
            await app.request("BREW", path)
    before = len(app.series())
    rng = random.Random(0)
    for index in range(10_000):
        app.status = rng.choice([200, 201, 400, 404, 429, 499])
        path = rng.choice(
            ["/", "/v1/models", f"/v1/models/{index}", f"/v1/{index}", f"/{rng.random()}", f"/v1/models{index}"]
        )
        await app.request(f"M{index}", path)
    assert len(app.series()) == before


@pytest.mark.parametrize(
    ("path", "handler"),
    [
        ("/", "/"),
        ("/v1/models", "/v1/models"),
        ("/v1/models/org/name", "/v1/models/{model:path}"),
        ("/v1/models/", "/v1/models/{model:path}"),
        ("//v1/models", "other"),
        ("/v1/modelsx", "other"),
        ("/V1/models", "other"),
    ],
)
async def test_handler(path, handler):
    app = App()
    await app.request("GET", path)
    assert f'http_requests_total{{handler="{handler}",method="GET",status="2xx"}} 1.0' in app.series()
    assert f'http_request_duration_seconds_count{{handler="{handler}",method="GET"}} 1.0' in app.series()


async def test_a_failure_counts_as_500_and_goes_on():
    app = App()
    app.status = None
    with pytest.raises(RuntimeError, match="broken"):
        await app.request("POST", "/")
    assert 'http_requests_total{handler="/",method="POST",status="5xx"} 1.0' in app.series()


async def test_probes_are_not_counted():
    app = App()
    for path in NOT_COUNTED:
        await app.request("GET", path)
    assert app.series() == []


def test_unversioned_routes_are_the_same_routes(server):
    """Answers, errors and limits are alike; they are counted under their own names."""
    for path, body in (("/chat/completions", {"messages": MESSAGES}), ("/completions", {"prompt": "Hi"})):
        answers = [server.http.post(f"{prefix}{path}", json={**body, "seed": 1}).json() for prefix in ("", "/v1")]
        assert [answer["choices"] for answer in answers] == [answers[0]["choices"]] * 2
        for wrong in ({}, {**body, "n": 129}, {**body, "guided_json": {}}):
            refusals = [server.http.post(f"{prefix}{path}", json=wrong) for prefix in ("", "/v1")]
            assert refusals[0].status_code == 400
            assert refusals[0].json() == refusals[1].json()
        assert f'handler="{path}"' in server.http.get("/metrics").text
