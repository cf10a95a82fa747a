"""Where an answer's time went: `metrics` on demand, and the timeline of recent requests, without any text."""

from __future__ import annotations

import json
import threading
from functools import partial

import pytest

from quire.frontend.echo_client import EchoClient
from quire.frontend.timeline import MAX_CHUNKS, Timelines, TokenChunks
from quire.outputs import RequestMetrics, SpecDecodeMetrics
from quire.server.recent import RecentRequests
from quire.server.timeline import timings
from tests.server.serving import MAX_MODEL_LEN, RunningServer
from tests.server.test_errors import error_of

VLLM_METRICS = {
    "time_to_first_token_ms", "queue_time_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second",
}  # fmt: skip


def timeline(server: RunningServer, name: str) -> dict:
    response = server.http.get(f"/v1/requests/{name}/timeline")
    assert response.status_code == 200, response.text
    return response.json()


def test_timings_from_exact_times():
    first = RequestMetrics(10.0, 10.5, 11.0, 13.0, 13.0, num_preemptions=1)
    second = RequestMetrics(10.0, 10.75, 12.0, 14.0, 14.0, num_preemptions=2)
    result = timings([first, second], num_tokens=7, num_cached_tokens=3)
    assert result.time_to_first_token_ms == 1000
    assert result.queue_time_ms == 750
    assert result.prefill_time_ms == 500
    assert result.generation_time_ms == 3000
    assert result.mean_itl_ms == 500
    assert result.tokens_per_second == 2
    assert (result.cached_tokens, result.preemptions) == (3, 3)
    nothing = timings([RequestMetrics(10.0)], 0, 0)
    assert nothing.time_to_first_token_ms is nothing.tokens_per_second is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_metrics_on_demand(server, path):
    base = {"prompt": ["a", "b"]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    assert server.http.post(path, json=base).json()["metrics"] is None
    whole = server.http.post(path, json={**base, "return_metrics": True}).json()["metrics"]
    assert whole.keys() >= VLLM_METRICS
    assert whole.pop("speculative_decoding") is None, "nothing drafts"
    assert all(value is not None and value >= 0 for value in whole.values()), whole
    events = server.events(path, **base, return_metrics=True)
    assert all("metrics" not in event for event in events[:-1])
    assert events[-1]["choices"] == []
    assert "usage" not in events[-1]
    assert events[-1]["metrics"].keys() == {*whole, "speculative_decoding"}
    both = server.events(path, **base, return_metrics=True, stream_options={"include_usage": True})[-1]
    assert both["usage"]["completion_tokens"] > 0
    assert both["metrics"]["time_to_first_token_ms"] > 0
    beam = {**base, "use_beam_search": True, "n": 2, "return_metrics": True}
    assert error_of(server.http.post(path, json=beam), 400)["param"] == "return_metrics"


@pytest.mark.parametrize(
    ("path", "base"),
    [("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}), ("/v1/completions", {"prompt": "a"})],
)
def test_metrics_of_every_request(path, base):
    """With the operator's flag; a stream has them beside its usage only, as in vLLM."""
    with RunningServer(reports_metrics=True) as server:
        assert server.http.post(path, json=base).json()["metrics"].keys() >= VLLM_METRICS
        assert server.http.post(path, json={**base, "return_metrics": False}).json()["metrics"] is None
        assert server.http.post(path, json={**base, "use_beam_search": True}).json()["metrics"] is None
        assert all("metrics" not in event for event in server.events(path, **base))
        *others, last = server.events(path, **base, stream_options={"include_usage": True})
        assert last["metrics"].keys() >= VLLM_METRICS
        assert all("metrics" not in event for event in others)


class DraftingClient(EchoClient):
    """Every step after a request's first one verified two drafts, then three, ...; one of them held."""

    def _advance(self, row):
        delta = super()._advance(row)
        if row.num_output > 1:
            delta.drafts = min(row.num_output, 3), 1
        return delta


SUMMARY = {
    "mean_acceptance_length": 2.0,
    "draft_acceptance_rate": 3 / 8,
    "acceptance_histogram": [0, 3, 0, 0],
    "acceptance_histogram_by_draft_length": {"2": [0, 1, 0], "3": [0, 2, 0, 0]},
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 8,
    "num_spec_tokens": 3,
}
DETAILS = {"per_step_accepted": [1, 1, 1], "per_step_drafted": [2, 3, 3]}


@pytest.mark.parametrize(
    ("path", "base"),
    [("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}), ("/v1/completions", {"prompt": "a"})],
)
@pytest.mark.parametrize("is_detailed", [False, True], ids=["summary", "detailed"])
def test_what_became_of_drafts(path, base, is_detailed):
    """vLLM's `metrics.speculative_decoding`, of answers with one choice."""
    expected = SUMMARY | (DETAILS if is_detailed else {})
    client = DraftingClient(max_model_len=MAX_MODEL_LEN)
    new_metrics = partial(SpecDecodeMetrics, 3, is_detailed)
    with RunningServer(client, new_draft_metrics=new_metrics, reports_metrics=True) as server:
        base = {**base, "max_tokens": 4}
        assert server.http.post(path, json=base).json()["metrics"]["speculative_decoding"] == expected
        last = server.events(path, **base, stream_options={"include_usage": True})[-1]
        assert last["metrics"]["speculative_decoding"] == expected
        assert server.http.post(path, json={**base, "n": 2}).json()["metrics"]["speculative_decoding"] is None
        one = server.http.post(path, json={**base, "max_tokens": 1}).json()["metrics"]["speculative_decoding"]
        assert (one["num_spec_steps"], one["acceptance_histogram"]) == (0, [0, 0, 0, 0]), "it drafted nothing"
        if "prompt" in base:
            two = server.http.post(path, json={**base, "prompt": ["a", "b"]}).json()
            assert two["metrics"]["speculative_decoding"] is None


def test_timeline_of_a_finished_request(server):
    answer = server.complete(prompt=["secret words", "b"], n=2, max_tokens=5, request_id="mine").json()
    assert answer["id"] == "cmpl-mine"
    found = timeline(server, "cmpl-mine")
    assert (found["id"], found["status"], len(found["prompts"])) == ("cmpl-mine", "finished", 2)
    for prompt in found["prompts"]:
        times = [prompt[f"{name}_seconds"] for name in ("queued", "first_token", "last_token", "finished")]
        assert times == sorted(times)
        assert prompt["scheduled_seconds"] <= prompt["first_token_seconds"]
        assert [part["index"] for part in prompt["continuations"]] == [0, 1]
        for part in prompt["continuations"]:
            assert part["finish_reason"] == "length"
            assert sum(chunk["tokens"] for chunk in part["chunks"]) == part["tokens"] == 5
            seconds = [chunk["seconds"] for chunk in part["chunks"]]
            assert seconds == sorted(seconds)
    assert sum(prompt["prompt_tokens"] for prompt in found["prompts"]) == answer["usage"]["prompt_tokens"]
    text = json.dumps(found)
    assert "secret" not in text
    assert answer["choices"][0]["text"] not in text


def test_timeline_by_the_id_in_the_header(server):
    response = server.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hi"}]},
        headers={"x-request-id": "trace.7"},
    )
    assert timeline(server, "trace.7")["id"] == timeline(server, response.json()["id"])["id"] == "chatcmpl-trace.7"


def test_unknown_requests(server):
    for name in ("nothing", "%2e%2e", "x" * 300):
        assert error_of(server.http.get(f"/v1/requests/{name}/timeline"), 404)["code"] in (
            "request_not_found", "unknown_route",
        )  # fmt: skip
    assert error_of(server.http.get("/v1/requests/a/timeline"), 404)["code"] == "request_not_found"


def test_timeline_of_waiting_running_and_aborted_requests():
    client = EchoClient(None, step_seconds=0.002)
    with RunningServer(client) as server:
        server.run(lambda: setattr(client, "is_paused", True))
        body = {"prompt": "Hi", "stream": True, "max_tokens": 1000, "ignore_eos": True, "request_id": "r"}
        thread = threading.Thread(target=lambda: server.http.post("/v1/completions", json=body))
        thread.start()
        server.wait_for(lambda: client.num_requests == 1, "the request")
        assert timeline(server, "cmpl-r")["status"] == "waiting"
        assert server.http.get("/load").json() == {"server_load": 1}
        server.run(lambda: (setattr(client, "is_paused", False), client._wake.set()))
        server.wait_for(lambda: timeline(server, "cmpl-r")["status"] == "running", "the request to run")
        server.run(lambda: server.engine.abort(list(server.engine.replicas[0]._streams)))
        thread.join(10)
        found = timeline(server, "cmpl-r")
        assert found["status"] == "finished"
        assert found["prompts"][0]["continuations"][0]["finish_reason"] == "abort"


def test_chunks_are_bounded_and_keep_every_token():
    chunks = TokenChunks()
    for number in range(100_000):
        chunks.add(float(number), number % 3)
    assert len(chunks) <= MAX_CHUNKS
    assert sum(count for _, count in chunks.items()) == sum(number % 3 for number in range(100_000))
    seconds = [second for second, _ in chunks.items()]
    assert seconds == sorted(seconds)
    assert seconds[-1] == 99_999


def test_only_recent_requests_are_kept():
    timelines = Timelines(capacity=3)
    for name in "abcab":
        timelines.open(name, RequestMetrics(0.0), 1, 1, 0.0)
    timelines.open("d", RequestMetrics(0.0), 1, 1, 0.0)
    assert timelines.get("c") is None
    assert timelines.get("a") is not None
    assert len(timelines) == 3
    recent = RecentRequests(capacity=2)
    for name in "abc":
        recent.add("cmpl-" + name, name).append("part")
    assert recent.get("a") is recent.get("cmpl-a") is None
    assert recent.get("c") == recent.get("cmpl-c") == ("cmpl-c", ["part"])
