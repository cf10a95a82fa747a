"""/metrics: exact differences around known requests, and no client can make it grow."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.frontend.echo_client import EchoClient
from tests.server.serving import MODEL, RunningServer


def samples(server: RunningServer) -> dict[str, float]:
    """Sample name with its own labels -> value."""
    result = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            result[sample.name + (str(labels) if labels else "")] = sample.value
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == MODEL
                assert sample.labels.get("engine", "0") == "0"
    return result


@pytest.fixture
def fresh():
    with RunningServer(answer=None) as server:
        yield server


def test_exact_differences(fresh):
    before = samples(fresh)
    answers = [
        fresh.complete(prompt="one two three", max_tokens=5).json(),
        fresh.complete(prompt=["a", "b"], n=3, max_tokens=7).json(),
        fresh.chat(max_tokens=4, ignore_eos=True).json(),
    ]
    streamed = fresh.events("/v1/completions", prompt="stream me", max_tokens=9, stream_options={"include_usage": True})
    usages = [answer["usage"] for answer in answers] + [streamed[-1]["usage"]]
    fresh.wait_for_idle()
    after = samples(fresh)
    difference = {name: value - before.get(name, 0.0) for name, value in after.items()}
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert generated == 5 + 6 * 7 + 4 + 9
    assert difference["vllm:prompt_tokens_total"] == prompts
    assert difference["vllm:generation_tokens_total"] == generated
    continuations = 1 + 6 + 1 + 1
    assert difference["vllm:request_success_total{'finished_reason': 'length'}"] == continuations
    for name in ("stop", "abort", "error"):
        assert difference[f"vllm:request_success_total{{'finished_reason': '{name}'}}"] == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prefill_time_seconds"):
        assert difference[f"vllm:{name}_count"] == continuations, name
    assert difference["vllm:inter_token_latency_seconds_count"] == generated - continuations
    assert difference["vllm:request_time_per_output_token_seconds_count"] == continuations
    assert difference["vllm:request_generation_tokens_sum"] == generated
    assert difference["vllm:request_params_n_count"] == 5
    assert difference["vllm:request_params_n_sum"] == 1 + 3 + 3 + 1 + 1
    assert difference["vllm:request_params_max_tokens_sum"] == 5 + 7 + 7 + 4 + 9
    assert difference["vllm:request_max_num_generation_tokens_sum"] == 5 + 7 + 7 + 4 + 9
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:num_requests_waiting"] == 0


def test_every_end_is_counted_by_its_reason():
    with RunningServer() as server:
        server.chat()
        server.chat(stop="42")
        server.chat(max_tokens=1)
        assert server.metric("vllm:request_success_total", finished_reason="stop") == 2
        assert server.metric("vllm:request_success_total", finished_reason="length") == 1
        usage = server.chat(stop="42").json()["usage"]
        before = server.metric("vllm:generation_tokens_total")
        server.chat(stop="42")
        assert server.metric("vllm:generation_tokens_total") - before == usage["completion_tokens"], (
            "tokens after a stop string count in neither"
        )


def test_cache_config(fresh):
    families = {family.name: family for family in text_string_to_metric_families(fresh.http.get("/metrics").text)}
    (sample,) = families["vllm:cache_config_info"].samples
    assert sample.value == 1
    assert sample.labels["block_size"] == "16"
    assert sample.labels["num_gpu_blocks"] == "1024"


def test_kv_usage_is_a_share():
    body = {"prompt": "x", "stream": True, "max_tokens": 500, "ignore_eos": True}
    with RunningServer(EchoClient(None, step_seconds=0.001, max_model_len=2048)) as server:
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.wait_for(lambda: server.engine.replicas[0].records[-1].num_blocks_in_use > 1, "a second block")
            assert 0 < server.metric("vllm:kv_cache_usage_perc") < 1
            assert server.metric("vllm:num_requests_running") == 1
        server.wait_for_idle()  # the client has left: no step follows
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        assert server.metric("vllm:num_requests_running") == 0


HOSTILE_METHODS = ("PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "PROPFIND", "TRACE")
ROUTES = ("/v1/models", "/v1/chat/completions", "/")


def _hostile_round(server: RunningServer, start: int) -> None:
    """Random paths, methods, models and fields, on keys no other round has."""
    for index in range(start, start + 24):
        server.http.get(f"/random/{index}")
        server.http.get(f"/v1/models/{index}")
        server.http.get(f"/v1/models%00{index}")
        httpx.request(f"M{index}", f"{server.url}/{index}")  # which the HTTP parser refuses by itself
        for route in ROUTES:
            server.http.request(HOSTILE_METHODS[index % len(HOSTILE_METHODS)], route)
        server.chat(model=f"model-{index}")
    for index in range(start, start + 8):
        server.chat(max_tokens=1, user=f"u{index}", request_id=f"r{index}", cache_salt=f"s{index}")


def test_the_number_of_series_is_constant(fresh):
    _hostile_round(fresh, 0)
    before = set(samples(fresh))
    _hostile_round(fresh, 1000)
    assert set(samples(fresh)) == before


def _http_counts(server: RunningServer) -> dict[tuple[str, str, str], float]:
    families = {family.name: family for family in text_string_to_metric_families(server.http.get("/metrics").text)}
    return {
        (sample.labels["method"], sample.labels["status"], sample.labels["handler"]): sample.value
        for sample in families["http_requests"].samples
    }


def test_http_requests_are_counted_by_route():
    with RunningServer(api_keys=("secret",)) as server:
        assert server.chat(max_tokens=1).status_code == 200
        server.events("/v1/completions", prompt="x", max_tokens=2)
        server.complete(prompt="x", temperature=-1)
        server.http.get("/v1/models/alias")
        server.http.get("/v1/models/none", headers={"authorization": "Bearer wrong"})
        server.http.delete("/v1/models")
        server.http.request("PROPFIND", "/coffee")
        for path in ("/health", "/livez", "/readyz", "/version"):
            server.http.get(path)
        expected = {
            ("POST", "2xx", "/v1/chat/completions"): 1,
            ("POST", "2xx", "/v1/completions"): 1,
            ("POST", "4xx", "/v1/completions"): 1,
            ("GET", "2xx", "/v1/models/{model:path}"): 1,
            ("GET", "4xx", "/v1/models/{model:path}"): 1,
            ("DELETE", "4xx", "/v1/models"): 1,
            ("other", "4xx", "other"): 1,
        }
        server.wait_for(lambda: _http_counts(server) == expected, f"{expected}, at last {_http_counts(server)}")
        durations = {
            name: value for name, value in samples(server).items() if name.startswith("http_request_duration_seconds_c")
        }
        assert durations["http_request_duration_seconds_count{'handler': '/v1/completions', 'method': 'POST'}"] == 2
        assert sum(durations.values()) == sum(expected.values())
