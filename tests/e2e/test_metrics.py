"""/metrics of `quire serve` on the demo model, in a KV cache that makes it preempt: counts equal the answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e import reference
from tests.e2e.serving import LIGHT, Serve

MAX_MODEL_LEN = 256
NUM_BLOCKS = 20  # of 16 tokens: one request of 256 fits, two do not
FLAGS = (
    "--num-threads", "1", "--dtype", "float32", "--block-size", "16", "--max-model-len", str(MAX_MODEL_LEN),
    "--num-gpu-blocks-override", str(NUM_BLOCKS),
)  # fmt: skip
PER_CONTINUATION = (
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_prefill_kv_computed_tokens",
    "request_num_preemptions",
    "time_to_first_token_seconds",
)
PER_REQUEST = ("request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens")
LOG_LINE = re.compile(
    r"Engine 000: Avg prompt throughput: \d+\.\d tokens/s, Avg generation throughput: [1-9]\d*\.\d tokens/s, "
    r"Running: \d+ reqs, Waiting: \d+ reqs(, Deferred: \d+ reqs)?(, Preemptions: \d+)?, CPU KV cache usage: \d+\.\d%, "
    r"Prefix cache hit rate: \d+\.\d%"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOG_STATS_INTERVAL", "0.2")
        with Serve(*FLAGS, "--legacy-metric-names", "--kv-cache-metrics", "--kv-cache-metrics-sample", "1") as server:
            yield server


@dataclass
class Counted:
    """The changes of /metrics during an action.

    Names without vllm:, then the values of other labels in the order of the labels' names: `name/value/value`.
    """

    difference: dict[str, float]
    after: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.difference[name]

    def check_histograms(self, names: tuple[str, ...], count: int) -> None:
        for name in names:
            assert self[f"{name}_count"] == count, name


def _scrape(server: Serve) -> dict[str, float]:
    result = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            own = [value for label, value in sample.labels.items() if label not in ("model_name", "engine")]
            result["/".join([sample.name.removeprefix("vllm:"), *own])] = sample.value
    return result


def _counting(server: Serve, action: Callable[[], object]) -> Counted:
    """Do it, and wait until nothing runs any more."""
    before = _scrape(server)
    action()
    idle = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
    server.wait_for(lambda: idle.items() <= _scrape(server).items(), "all requests to be gone")
    after = _scrape(server)
    assert after["num_requests_waiting_by_reason/capacity"] == after["num_requests_waiting_by_reason/deferred"] == 0
    return Counted({name: value - before.get(name, 0.0) for name, value in after.items()}, after)


def _complete(server: Serve, **fields: Any) -> httpx.Response:
    body = {"temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def _usage(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    return usage


def _check_tokens(counted: Counted, usages: list[dict[str, Any]]) -> tuple[int, int, int]:
    """The token counters against the answers. Returns the sums: (prompt, cached, generated)."""
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    generated = sum(usage["completion_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert counted["prompt_tokens_total"] == counted["prefix_cache_queries_total"] == prompt
    assert counted["generation_tokens_total"] == generated
    assert counted["prompt_tokens_cached_total"] == counted["prefix_cache_hits_total"] == cached
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    assert [counted[f"prompt_tokens_by_source_total/{source}"] for source in sources] == [prompt - cached, cached, 0]
    assert counted["prompt_tokens_cached_by_source_total/device"] == cached
    assert sum(value for name, value in counted.difference.items() if name.startswith("prompt_tokens_cached_by_")) == (
        cached
    )
    return prompt, cached, generated


def test_every_token_and_request_is_counted_once(server: Serve) -> None:
    usages: list[dict[str, Any]] = []
    system = "A prompt that is long enough to fill several blocks of the cache. " * 3

    def act() -> None:
        usages.append(_usage(_complete(server, prompt=reference.TEXTS[0], max_tokens=20)))
        usages.append(_usage(_complete(server, prompt=system + "One", max_tokens=5)))
        usages.append(_usage(_complete(server, prompt=system + "Two", max_tokens=1)))
        usages.append(_usage(_complete(server, prompt=["Hello", "you"], max_tokens=6)))
        usages.append(_usage(_complete(server, prompt=reference.chat_prompts()[1], max_tokens=100, ignore_eos=False)))

    counted = _counting(server, act)
    prompt, cached, generated = _check_tokens(counted, usages)
    assert cached >= 32, "the prefix was not found in the cache"
    requests = 6
    counted.check_histograms(PER_CONTINUATION, requests)
    counted.check_histograms(PER_REQUEST, requests)
    counted.check_histograms(("request_time_per_output_token_seconds",), requests - 1)  # one has a single token
    counted.check_histograms(("inter_token_latency_seconds",), generated - requests)
    ends = {reason: counted[f"request_success_total/{reason}"] for reason in ("stop", "length", "abort", "error")}
    assert ends == {"stop": 1, "length": requests - 1, "abort": 0, "error": 0}
    assert counted["request_prompt_tokens_sum"] == prompt
    assert counted["request_generation_tokens_sum"] == counted["request_max_num_generation_tokens_sum"] == generated
    assert counted["request_prefill_kv_computed_tokens_sum"] == prompt - cached
    assert counted["request_params_n_sum"] == requests
    assert counted["request_params_max_tokens_sum"] == 20 + 5 + 1 + 6 + 6 + 100
    assert counted["request_num_preemptions_sum"] == counted["num_preemptions_total"] == 0
    assert counted["iteration_tokens_total_sum"] == prompt - cached + generated
    inference = counted["request_prefill_time_seconds_sum"] + counted["request_decode_time_seconds_sum"]
    assert counted["request_inference_time_seconds_sum"] == pytest.approx(inference)
    assert counted["e2e_request_latency_seconds_sum"] == pytest.approx(
        counted["request_queue_time_seconds_sum"] + inference
    )
    assert counted["http_requests_total//v1/completions/POST/2xx"] == len(usages)


def test_continuations_share_the_prompt(server: Serve) -> None:
    usages: list[dict[str, Any]] = []
    prompt = "Shared by both continuations, and more than a block long: def fibonacci(n):"
    counted = _counting(
        server, lambda: usages.append(_usage(_complete(server, prompt=prompt, n=2, temperature=1, max_tokens=9)))
    )
    num_prompt, cached, generated = _check_tokens(counted, usages)
    assert (num_prompt > 16, cached, generated) == (True, 0, 18)
    counted.check_histograms(PER_CONTINUATION, 2)
    counted.check_histograms(PER_REQUEST, 1)
    assert counted["request_prompt_tokens_sum"] == 2 * num_prompt
    assert counted["request_params_n_sum"] == 2
    assert counted["request_max_num_generation_tokens_sum"] == 9
    computed = counted["request_prefill_kv_computed_tokens_sum"]
    assert num_prompt < computed < num_prompt + 16, "the second continuation computes its last prompt tokens only"


def test_preempted_requests_are_counted_once(server: Serve) -> None:
    usages: list[dict[str, Any]] = []

    def act() -> None:
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(_complete, server, prompt=f"Story {i}:", max_tokens=200) for i in range(4)]
            usages.extend(_usage(answer.result()) for answer in answers)

    counted = _counting(server, act)
    _, _, generated = _check_tokens(counted, usages)
    assert generated == 800
    assert counted["num_preemptions_total"] > 0, "nothing was preempted"
    assert counted["request_num_preemptions_sum"] == counted["num_preemptions_total"]
    counted.check_histograms(PER_CONTINUATION, 4)
    counted.check_histograms(("request_time_per_output_token_seconds", *PER_REQUEST), 4)
    counted.check_histograms(("inter_token_latency_seconds",), generated - 4)


def test_an_abort_is_counted_and_leaves_nothing(server: Serve) -> None:
    chunks: list[str] = []

    def act() -> None:
        body = {"prompt": "Hello", "max_tokens": 240, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=20) as response:
            for line in response.iter_lines():
                chunks.append(line)
                if len(chunks) > 5:
                    assert _scrape(server)["num_requests_running"] == 1
                    break

    counted = _counting(server, act)
    assert counted["request_success_total/abort"] == 1
    assert counted["prompt_tokens_total"] == len(reference.tokenizer().encode("Hello"))
    assert 2 <= counted["generation_tokens_total"] < 240
    counted.check_histograms(("time_to_first_token_seconds",), 1)
    counted.check_histograms(tuple(name for name in PER_CONTINUATION if name != "time_to_first_token_seconds"), 0)
    counted.check_histograms(PER_REQUEST, 0)


def test_steps_are_predicted_and_utilization_is_live(server: Serve) -> None:
    body = {"prompt": "Hello", "max_tokens": 240, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=20) as response:
        lines = response.iter_lines()
        for _ in range(20):
            next(lines)
        shares = _scrape(server)
        steps = [json.loads(line) for line in server.get("/v1/steps?limit=5").text.splitlines()]
    assert 0 < shares["quire_model_flops_utilization"] < 1
    assert shares["quire_model_bandwidth_utilization"] > 0
    assert len(steps) == 5
    for step in steps:
        assert (step["engine"], step["rows"], step["logits"], step["decode_tokens"]) == (0, 1, 1, 1)
        assert step["kv_tokens"] == step["pairs"]
        assert 0 < step["predicted"]["low_seconds"] < step["predicted"]["seconds"] < step["predicted"]["high_seconds"]
        assert 0 < step["forward_seconds"] < step["seconds"]
    lengths = [step["kv_tokens"][0] for step in steps]
    assert lengths == list(range(lengths[0], lengths[0] + 5))
    idle = {"quire_model_flops_utilization": 0, "quire_model_bandwidth_utilization": 0}
    server.wait_for(lambda: idle.items() <= _scrape(server).items(), "no utilization when idle")


def test_refused_requests_touch_the_http_counters_alone(server: Serve) -> None:
    def act() -> None:
        assert _complete(server, prompt="x", temperature=-1).status_code == 400
        assert _complete(server, prompt="long " * 2 * MAX_MODEL_LEN).status_code == 400
        assert _complete(server, prompt="x", model="other").status_code == 404
        assert httpx.get(f"{server.url}/nowhere").status_code == 404

    counted = _counting(server, act)
    http = {
        name: value for name, value in counted.difference.items() if name.startswith("http_requests_total") and value
    }
    assert http == {"http_requests_total//v1/completions/POST/4xx": 3, "http_requests_total/other/GET/4xx": 1}
    unmoved = ("prompt_tokens_total", "generation_tokens_total", "request_success_total/error")
    assert [counted[name] for name in unmoved] == [0, 0, 0]
    counted.check_histograms(PER_CONTINUATION, 0)


def test_cache_config(server: Serve) -> None:
    families = {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}
    (sample,) = families["vllm:cache_config_info"].samples
    expected = {
        "block_size": "16",
        "num_gpu_blocks": str(NUM_BLOCKS),
        "num_gpu_blocks_override": str(NUM_BLOCKS),
        "kv_cache_size_tokens": str(NUM_BLOCKS * 16),
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "user_specified_block_size": "True",
    }
    assert expected.items() <= sample.labels.items()
    assert int(sample.labels["kv_cache_memory_bytes"]) > 0


def test_every_block_that_is_handed_out_again_is_observed(server: Serve) -> None:
    """With all blocks followed, and more prompts than the cache holds."""

    def act() -> None:
        for i in range(3):
            _usage(_complete(server, prompt=f"{i}" + " another word" * 80, max_tokens=1))

    act()  # now every block has been handed out before
    counted = _counting(server, act)
    assert counted["kv_block_lifetime_seconds_count"] >= NUM_BLOCKS
    assert counted["kv_block_idle_before_evict_seconds_count"] == counted["kv_block_lifetime_seconds_count"]
    assert counted["kv_block_lifetime_seconds_sum"] >= counted["kv_block_idle_before_evict_seconds_sum"] > 0


def test_legacy_names(server: Serve) -> None:
    _usage(_complete(server, prompt="Hello", max_tokens=5))
    values = _scrape(server)
    assert values["time_per_output_token_seconds_count"] == values["inter_token_latency_seconds_count"] > 0
    assert values["avg_generation_throughput_toks_per_s"] > 0
    assert values["num_requests_swapped"] == 0


def test_the_line_in_the_log(server: Serve) -> None:
    _usage(_complete(server, prompt="Hello", max_tokens=5))
    server.wait_for(lambda: LOG_LINE.search(server.log) is not None, "a line of statistics")


def test_no_line_in_the_log_with_disable_log_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.02")
    with Serve(*FLAGS, "--disable-log-stats", program=LIGHT) as server:
        _usage(_complete(server, prompt="Hello", max_tokens=20))
        time.sleep(0.1)
        assert "Avg prompt throughput" not in server.log
        assert "gpu_cache_usage_perc" not in server.get("/metrics").text
        assert "vllm:kv_block_" not in server.get("/metrics").text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)")
def test_promtool_finds_nothing_but_names_of_vllms(server: Serve) -> None:
    _usage(_complete(server, prompt="Hello", max_tokens=5))
    scrape = server.get("/metrics").text
    result = subprocess.run(
        ["promtool", "check", "metrics"], input=scrape, capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    complaints = (result.stdout + result.stderr).splitlines()
    of_names = {
        'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix',
        "vllm:avg_prompt_throughput_toks_per_s metric names should not contain abbreviated units",
        "vllm:avg_generation_throughput_toks_per_s metric names should not contain abbreviated units",
    }
    colon = re.compile(r"vllm:\w+ metric names should not contain ':'")
    assert any(map(colon.fullmatch, complaints)), f"promtool did not read the metrics: {complaints}"
    assert [line for line in complaints if line not in of_names and not colon.fullmatch(line)] == []
