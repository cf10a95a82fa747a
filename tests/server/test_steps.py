"""GET /v1/steps: JSON lines of the last steps of every engine, and never more than the ring holds."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from quire.frontend.echo_client import EchoClient
from quire.frontend.replica import MAX_RECORDS
from quire.messages import EngineOutputs
from quire.server.app import create_app
from quire.server.protocol.steps import StepLine
from quire.server.state import AppSettings
from quire.server.steps import DEFAULT_LIMIT
from tests.frontend.test_replicas import Two
from tests.metrics.test_registry import record
from tests.server.serving import RunningServer
from tests.server.test_errors import error_of


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.fixture(scope="module")
def stepped():
    """A server that has done more steps than are kept; the last one was predicted."""
    with RunningServer() as server:
        assert lines(server.http.get("/v1/steps")) == [], "there was no step"
        for step_id in range(MAX_RECORDS + 50):
            predicted: dict[str, Any] = {}
            if step_id == MAX_RECORDS + 49:
                predicted = {"predicted_seconds": 0.5, "predicted_low_seconds": 0.4, "predicted_high_seconds": 0.625}
                predicted |= {"bound": "memory", "num_logits": 2, "kv_tokens": (7, 3), "pairs": (9, 5)}
                predicted |= {"num_drafts": 2, "num_draft_tokens": 6, "num_accepted_tokens": 4, "has_captured": True}
            step = record(step_id=step_id, num_rows=2, num_decode_tokens=2, **predicted)
            step.step_seconds = 0.55
            server.run(lambda step=step: server.client.push(EngineOutputs([], step)))
        server.wait_for(lambda: server.engine.replicas[0].records[-1].step_id == step_id, "the last step")
        yield server


def test_the_ring_does_not_grow(stepped):
    assert len(stepped.engine.replicas[0].records) == MAX_RECORDS
    found = lines(stepped.http.get("/v1/steps", params={"limit": MAX_RECORDS}))
    assert [line["step_id"] for line in found] == list(range(50, MAX_RECORDS + 50))


def test_predicted_beside_measured(stepped):
    before, last = lines(stepped.http.get("/v1/steps?limit=2"))
    assert before["predicted"] is None
    assert last["predicted"] == {"seconds": 0.5, "low_seconds": 0.4, "high_seconds": 0.625, "bound": "memory"}
    assert (last["engine"], last["seconds"], last["decode_tokens"], last["rows"]) == (0, 0.55, 2, 2)
    assert (last["logits"], last["kv_tokens"], last["pairs"]) == (2, [7, 3], [9, 5])
    assert (last["drafts"], last["draft_tokens"], last["accepted_tokens"]) == (2, 6, 4)
    assert (before["captured"], last["captured"]) == (False, True)
    assert set(last) == set(StepLine.__struct_fields__)
    msgspec.convert(last, StepLine)


def test_how_many(stepped):
    assert len(lines(stepped.http.get("/v1/steps"))) == DEFAULT_LIMIT
    assert [line["step_id"] for line in lines(stepped.http.get("/v1/steps?limit=1"))] == [MAX_RECORDS + 49]


@pytest.mark.parametrize(
    "limit", ["0", "-1", "", "1.5", "x", "1e2", " 1", "+1", "٣", str(MAX_RECORDS + 1), "9" * 5000, "null", "\x00"]
)
def test_a_bad_limit_is_refused(stepped, limit):
    error = error_of(stepped.http.get("/v1/steps", params={"limit": limit}), 400)
    assert (error["code"], error["param"]) == ("invalid_value", "limit")
    assert f"a whole number from 1 to {MAX_RECORDS}" in error["message"]


def test_the_key_guards_it():
    with RunningServer(api_keys=("secret",)) as server:
        assert lines(server.http.get("/v1/steps")) == []
        assert server.http.get("/v1/steps", headers={"authorization": "Bearer wrong"}).status_code == 401


def test_a_client_sees_the_steps_of_its_request(echo):
    answer = echo.openai().completions.create(model="alias", prompt="one two three", max_tokens=5)
    found = lines(echo.http.get("/v1/steps?limit=5"))
    assert [line["prefill_tokens"] for line in found] == [answer.usage.prompt_tokens, 0, 0, 0, 0]
    assert [line["decode_tokens"] for line in found] == [0, 1, 1, 1, 1]
    ids = [line["step_id"] for line in found]
    assert ids == list(range(ids[0], ids[0] + 5))


async def test_every_line_says_its_engine():
    async with Two() as two:
        for index, count in ((0, 3), (1, 2)):
            for step_id in range(count):
                two.replicas[index].on_message(EngineOutputs([], record(step_id=step_id), engine_index=index))
        app = create_app(two.engine, None, AppSettings(("m",), owns_engine=False))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            found = lines(await client.get("/v1/steps?limit=2"))
    assert [(line["engine"], line["step_id"]) for line in found] == [(0, 1), (0, 2), (1, 0), (1, 1)]


def test_an_engine_that_ended_leaves_its_steps():
    client = EchoClient([5, 6], max_model_len=2048)
    with RunningServer(client) as server:
        server.complete(max_tokens=2)
        server.run(client.die)
        server.wait_for(lambda: server.engine.error is not None, "the end")
        assert lines(server.http.get("/v1/steps"))
