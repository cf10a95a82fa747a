"""A line of a batch file gets the answer of its route, or an entry with its fault."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from quire.errors import QueueFullError
from quire.frontend.echo_client import EchoClient
from quire.server import batch_lines
from quire.server.batch_lines import answer_line, entry_id
from tests.server.serving import MAX_MODEL_LEN, MODEL, TEXT, RunningServer
from tests.server.test_errors import MESSAGES


def answered(server: RunningServer, line: dict[str, Any] | bytes) -> dict[str, Any]:
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    assert server.loop is not None
    work = asyncio.run_coroutine_threadsafe(answer_line(server.app, "id", data), server.loop)
    entry: dict[str, Any] = json.loads(msgspec.json.encode(work.result(20)))
    assert set(entry) == {"id", "custom_id", "response", "error"}
    return entry


def asking(url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (asking("/v1/chat/completions", model=MODEL, messages=MESSAGES), "chat.completion"),
        (asking("/v1/completions", prompt="Hi", max_tokens=100), "text_completion"),
        (asking("/v1/responses", input="Hi"), "response"),
        (asking("/v1/messages", messages=MESSAGES, max_tokens=100), "message"),
    ],
)
def test_answers(server: RunningServer, line: dict[str, Any], kind: str) -> None:
    entry = answered(server, line)
    assert (entry["id"], entry["custom_id"], entry["error"]) == ("id", "a", None)
    body = entry["response"]["body"]
    assert entry["response"]["status_code"] == 200
    assert kind in (body.get("object"), body.get("type"))
    assert TEXT in json.dumps(body, ensure_ascii=False).replace("\\n", "\n")
    assert entry["response"]["request_id"]


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [
        (asking("/v1/completions", prompt="Hi", temperature=9), 400, "invalid_value"),
        (asking("/v1/completions", prompt="Hi", model="gpt"), 404, "model_not_found"),
        (asking("/v1/messages", messages=MESSAGES), 400, "invalid_value"),
        (asking("/v1/completions", prompt="Hi", stream=True), None, "invalid_line"),
        (asking("/v1/responses", input="Hi", background=True), None, "invalid_line"),
        (asking("/v1/embeddings", input="Hi"), None, "invalid_line"),
        ({**asking("/v1/completions", prompt="Hi"), "method": "GET"}, None, "invalid_line"),
    ],
)
def test_errors(server: RunningServer, line: dict[str, Any], status: int | None, code: str) -> None:
    entry = answered(server, line)
    assert (entry["custom_id"], entry["error"]["code"]) == ("a", code)
    assert (None if status is None else entry["response"]["status_code"]) == status
    assert (entry["response"] is None) == (status is None)


DEEP = b'{"custom_id": "a", "body": {"a": ' + b"[" * 100_000


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b"{}", b'"\xff"', b"\xff", b'{"custom_id": 1}', b"[" * 100_000, DEEP]
)
def test_lines_that_are_none(server: RunningServer, line: bytes) -> None:
    entry = answered(server, line)
    assert (entry["custom_id"], entry["response"], entry["error"]["code"]) == (None, None, "invalid_line")


@pytest.mark.parametrize(
    "line",
    [
        {"custom_id": "é", "method": "POST", "url": "/v1/completions", "body": "x"},
        {"custom_id": "é", "method": "POST", "url": "/v1/completions"},
        {"custom_id": "é", "method": 5, "url": "/v1/completions", "body": {}},
    ],
)
def test_a_malformed_line_keeps_its_name(server: RunningServer, line: dict[str, Any]) -> None:
    entry = answered(server, json.dumps(line).encode())
    assert (entry["custom_id"], entry["error"]["code"]) == ("é", "invalid_line")


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "RETRY_SECONDS", 0.01)
    refusals = iter([QueueFullError("Full"), QueueFullError("Full")])
    engine = EchoClient([5], error_of=lambda request: next(refusals, None), max_model_len=MAX_MODEL_LEN)
    with RunningServer(engine) as server:
        assert answered(server, asking("/v1/completions", prompt="Hi"))["response"]["status_code"] == 200


def test_ids_name_lines_by_place_and_content() -> None:
    assert entry_id(1, b"a") == entry_id(1, b"a")
    assert len({entry_id(1, b"a"), entry_id(2, b"a"), entry_id(1, b"b"), entry_id(11, b"a"), entry_id(1, b"1:a")}) == 5
