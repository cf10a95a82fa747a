"""GET and POST /v1/config: the record of settings, and the limits that move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire import __version__, demo
from quire.config import EngineConfig, ServerConfig
from quire.frontend.echo_client import EchoClient
from quire.messages import EngineReady, Pace, SetLimits
from quire.model_config import load_model_config
from quire.option import options
from quire.planning.memory_plan import MemoryFacts, plan_kv_cache
from quire.resolve import DeviceFacts, resolve, resolve_server
from quire.settings import as_dict
from tests.server.serving import MAX_MODEL_LEN, MODEL, RunningServer
from tests.server.test_errors import error_of

GIB = 1 << 30
DEVICE = DeviceFacts(
    kind="cpu", name="test", isa="avx2", num_cores=4, total_memory_bytes=8 * GIB, free_memory_bytes=6 * GIB
)
PACE = Pace(0.01, 0.012, 1e-4, 1e-9)
MEMORY = MemoryFacts(total_bytes=8 * GIB, free_bytes=6 * GIB, weight_bytes=GIB, work_bytes=GIB)


def demo_ready(**arguments: Any) -> EngineReady:
    """The report of an engine with the demo model."""
    config = EngineConfig.from_kwargs(**arguments)
    model = load_model_config(demo.path())
    resolved = plan_kv_cache(config, model, resolve(config, model, DEVICE, is_server=True), MEMORY)
    numbers = (
        resolved.memory.num_blocks,
        resolved.model.block_size,
        resolved.scheduler.max_num_seqs,
        resolved.scheduler.max_num_batched_tokens,
    )
    return EngineReady(MAX_MODEL_LEN, *numbers, resolved=as_dict(resolved.settings), pace=PACE)


def _server(ready: EngineReady, **settings: Any) -> RunningServer:
    client = EchoClient(is_ready=False, max_model_len=MAX_MODEL_LEN)
    client.push(ready)
    return RunningServer(client, **settings)


def _configured() -> RunningServer:
    server = resolve_server(ServerConfig(port=0, api_key=("do-not-show",), chat_template="/a/b/c.jinja"))
    drafts = {"spec_method": "ngram", "spec_tokens": 5}
    ready = demo_ready(download_dir="/home/somebody/models", hf_token="do-not-show", **drafts)
    return _server(ready, server=server)


@pytest.fixture
def running() -> Iterator[RunningServer]:
    with _configured() as server:
        yield server


@pytest.fixture(scope="module")
def unmoved() -> Iterator[RunningServer]:
    """For refusals: every test sees that nothing has moved."""
    with _configured() as server:
        yield server
        assert not _moves(server)


def _moves(server: RunningServer) -> list[SetLimits]:
    return [message for message in server.client.sent if isinstance(message, SetLimits)]


def test_get(running: RunningServer) -> None:
    response = running.http.get("/v1/config")
    assert response.status_code == 200
    body = response.json()
    assert (body["version"], body["model"]) == (__version__, MODEL)
    for config in (EngineConfig, ServerConfig):
        for f in options(config):
            assert {"value", "source", "detail", "limits", "live"} <= body["settings"][f.name].keys(), f.name
    assert body["settings"]["num_blocks"]["source"] == "formula"
    assert body["settings"]["port"] == {"value": 0, "source": "argument", "detail": "", "limits": "", "live": False}
    assert body["live"] == {
        "max_num_seqs": {"value": 128, "min": 1, "max": 128},
        "max_num_batched_tokens": {"value": 256, "min": 1, "max": 256},
        "long_prefill_token_threshold": {"value": 0, "min": 0, "max": 2**31 - 1},
        "max_num_queued_reqs": {"value": 1024, "min": 1, "max": 2**31 - 1},
        "max_shared_prefill_tokens": {"value": 64, "min": 0, "max": 2**31 - 1},
        "spec_tokens": {"value": 5, "min": 0, "max": 5},
        "slo_ttft": {"value": None, "min": PACE.fastest_step, "max": None},
        "slo_itl": {"value": None, "min": PACE.fastest_step, "max": None},
        "slo_attainment": {"value": 0.99, "min": 0.5, "max": 0.9999},
    }


def test_no_secret_and_no_path(running: RunningServer) -> None:
    settings = running.http.get("/v1/config").json()["settings"]
    assert settings["api_key"]["value"] == settings["hf_token"]["value"] == "set"
    assert settings["download_dir"]["value"] == ".../models"
    assert settings["chat_template"]["value"] == ".../c.jinja"


def test_live_limits_are_the_live_fields(running: RunningServer) -> None:
    """Engine, API and config agree on what may move."""
    live = {f.name for f in options(EngineConfig) if f.metadata["live"]}
    assert live == set(SetLimits.__struct_fields__)
    body = running.http.get("/v1/config").json()
    assert live == body["live"].keys() == {name for name, setting in body["settings"].items() if setting["live"]}


def test_move(running: RunningServer) -> None:
    response = running.http.post("/v1/config", json={"max_num_seqs": 8, "long_prefill_token_threshold": 64})
    assert response.status_code == 200
    assert _moves(running) == [SetLimits(max_num_seqs=8, long_prefill_token_threshold=64)]
    body = response.json()
    assert body == running.http.get("/v1/config").json(), "the answer is the new record"
    assert body["live"]["max_num_seqs"] == {"value": 8, "min": 1, "max": 128}
    moved = body["settings"]["max_num_seqs"]
    assert (moved["value"], moved["source"]) == (8, "live")
    assert moved["detail"] == "moved while serving; started as 128 (default)"
    assert body["settings"]["max_num_batched_tokens"]["source"] == "formula"


def test_move_back_and_forth(running: RunningServer) -> None:
    for value in (8, 128, 1):
        assert running.http.post("/v1/config", json={"max_num_seqs": value}).status_code == 200
    moved = running.http.get("/v1/config").json()["settings"]["max_num_seqs"]
    assert moved["value"] == 1
    assert moved["start"]["value"] == 128
    assert moved["max"] == 128


def test_a_number_of_shared_tokens_that_is_given_holds(running: RunningServer) -> None:
    settings = running.http.get("/v1/config").json()["settings"]
    assert (settings["most_answer_times"]["value"], settings["most_answer_times"]["live"]) == (8, False)
    settings = running.http.post("/v1/config", json={"max_shared_prefill_tokens": 32}).json()["settings"]
    assert settings["max_shared_prefill_tokens"]["value"] == 32
    assert (settings["most_answer_times"]["value"], settings["most_answer_times"]["source"]) == (0, "live")


def test_depth_of_drafts_moves(running: RunningServer) -> None:
    body = running.http.post("/v1/config", json={"spec_tokens": 0}).json()
    assert _moves(running) == [SetLimits(spec_tokens=0)]
    assert body["settings"]["speculative_config"]["value"]["num_speculative_tokens"] == 5, "as the start had it"
    assert body["settings"]["spec_tokens"]["detail"] == "moved while serving; started as 5 (argument)"


def test_where_nothing_drafts_there_is_no_depth() -> None:
    with _server(demo_ready()) as server:
        assert "spec_tokens" not in server.http.get("/v1/config").json()["live"]
        error = error_of(server.http.post("/v1/config", json={"spec_tokens": 2}), 400)
        assert "spec_tokens cannot be moved while serving" in error["message"]
        assert not _moves(server)


def test_targets_move(running: RunningServer) -> None:
    moves = {"slo_ttft": "500ms", "slo_itl": 0.05, "slo_attainment": 0.9}
    assert running.http.post("/v1/config", json=moves).status_code == 200
    assert _moves(running) == [SetLimits(slo_ttft=0.5, slo_itl=0.05, slo_attainment=0.9)]
    body = running.http.post("/v1/config", json={"slo_itl": None}).json()
    assert _moves(running)[-1] == SetLimits(slo_itl=0.0)
    assert (body["live"]["slo_ttft"]["value"], body["live"]["slo_itl"]["value"]) == (0.5, None)
    assert body["settings"]["slo_itl"]["source"] == "live"


def test_the_engine_obeys(running: RunningServer) -> None:
    running.http.post("/v1/config", json={"max_num_seqs": 1})
    assert running.client._max_num_seqs == 1


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({"max_num_seqs": 129}, "max_num_seqs", "Memory was planned for 128 at the start: restart with --max-num-seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs", "Expected 1 to 128"),
        ({"max_num_seqs": -(2**63)}, "max_num_seqs", "Expected 1 to 128"),
        ({"max_num_seqs": True}, "max_num_seqs", "not a whole number"),
        ({"max_num_seqs": "8"}, "max_num_seqs", "not a whole number"),
        ({"max_num_seqs": 8.5}, "max_num_seqs", "not a whole number"),
        ({"max_num_seqs": None}, "max_num_seqs", "not a whole number"),
        ({"max_num_seqs": [8]}, "max_num_seqs", "not a whole number"),
        ({"max_num_batched_tokens": 4096}, "max_num_batched_tokens", "Expected 1 to 256"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold", "Expected 0 or more"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs", "Expected 1 or more"),
        ({"max_num_queued_reqs": 2**64}, "max_num_queued_reqs", "Expected 1 or more"),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens", "smaller than the number of running requests"),
        ({"max_model_len": 64}, "max_model_len", "Restart with --max-model-len"),
        ({"port": 64}, "port", "Unknown setting"),
        ({"max_num_seq": 8}, "max_num_seq", "Did you mean max_num_seqs?"),
        ({"x" * 1000: 8}, "x" * 64, "Unknown setting"),
        ({"max_num_seqs": 8, "block_size": 32}, "block_size", "cannot be moved while serving"),
        ({"slo_itl": "5 parsecs"}, "slo_itl", "500ms, 1.5s, or a number of seconds"),
        ({"slo_itl": 0}, "slo_itl", "500ms, 1.5s, or a number of seconds"),
        ({"slo_itl": -1.5}, "slo_itl", "500ms, 1.5s, or a number of seconds"),
        ({"slo_itl": [1]}, "slo_itl", "500ms, 1.5s, or a number of seconds"),
        ({"slo_ttft": True}, "slo_ttft", "500ms, 1.5s, or a number of seconds"),
        ({"slo_ttft": "9ms"}, "slo_ttft", "Expected at least 10ms; 12ms is reached"),
        ({"slo_attainment": 1.0}, "slo_attainment", "is out of its bounds"),
        ({"slo_attainment": "0.9"}, "slo_attainment", "is not a share"),
        ({"slo": "itl=50ms"}, "slo", "cannot be moved while serving"),
        ({}, None, "The body names no limit to change"),
        ([], None, "not a JSON object"),
        (7, None, "not a JSON object"),
    ],
)
def test_refused(unmoved: RunningServer, body: Any, param: str | None, part: str) -> None:
    before = unmoved.http.get("/v1/config").json()
    response = unmoved.http.post("/v1/config", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert part in error["message"]
    assert not _moves(unmoved)
    assert unmoved.http.get("/v1/config").json() == before, "nothing moves if one limit is refused"


@pytest.mark.parametrize("text", [b"", b"{", b'{"max_num_seqs": 1e999}', b"\xff\xfe", b"[" * 100])
def test_malformed(unmoved: RunningServer, text: bytes) -> None:
    response = unmoved.http.post("/v1/config", content=text, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert not _moves(unmoved)


def test_without_chunks_a_step_holds_the_longest_prompt() -> None:
    with _server(demo_ready(enable_chunked_prefill=False, max_num_batched_tokens=4096)) as server:
        assert server.http.post("/v1/config", json={"max_num_batched_tokens": 2048}).status_code == 200
        response = server.http.post("/v1/config", json={"max_num_batched_tokens": 2047})
        assert response.status_code == 400
        assert "at least max_model_len = 2048" in response.json()["error"]["message"]


def test_both_limits_move_together() -> None:
    with _server(demo_ready(max_num_seqs=512)) as server:
        moves = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
        assert server.http.post("/v1/config", json=moves).status_code == 200
        assert server.engine.ready is not None
        assert (server.engine.ready.max_num_seqs, server.engine.ready.max_num_batched_tokens) == (16, 64)


def test_the_description_has_the_bounds_of_the_present_engine() -> None:
    def most() -> int:
        path = server.http.get("/openapi.json").json()["paths"]["/v1/config"]["post"]
        properties = path["requestBody"]["content"]["application/json"]["schema"]["properties"]
        return int(properties["max_num_seqs"]["maximum"])

    first, second = demo_ready(max_num_seqs=512), demo_ready(max_num_seqs=64)
    with _server(first) as server:
        assert most() == 512
        server.run(lambda: server.client.push(second))
        server.wait_for(lambda: server.engine.ready is second, "the next engine")
        assert most() == 64


def test_before_the_engine_is_ready() -> None:
    with RunningServer(EchoClient(is_ready=False), waits_for_engine=False) as server:
        assert server.http.get("/v1/config").status_code == 503
        response = server.http.post("/v1/config", json={"max_num_seqs": 1})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")


def test_the_key_guards_both() -> None:
    with _server(demo_ready(), api_keys=("secret",)) as server:
        assert server.http.get("/v1/config").status_code == 200
        for method in ("GET", "POST"):
            response = server.http.request(method, "/v1/config", headers={"authorization": "Bearer wrong"})
            assert response.status_code == 401
