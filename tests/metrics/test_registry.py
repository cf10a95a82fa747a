"""The declared metrics against vLLM 0.32's names, types and buckets."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config import EngineConfig
from quire.messages import EngineReady
from quire.metrics.prometheus import PrometheusMetrics
from quire.metrics.registry import CACHE_CONFIG_LABELS, METRICS, steps_up_to
from quire.schedule import EvictedBlock, StepRecord

# Names and types that dashboards use; a released name works for a year.
EXPECTED = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:engine_sleep_state": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_by_source": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:prompt_tokens_cached_by_source": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:admission_rejections": "counter",
    "quire_engine_restarts": "counter",
    "quire_requests_retried": "counter",
    "quire_requests_lost": "counter",
    "vllm:estimated_flops_per_gpu": "counter",
    "vllm:estimated_read_bytes_per_gpu": "counter",
    "vllm:estimated_write_bytes_per_gpu": "counter",
    "quire_model_flops_utilization": "gauge",
    "quire_model_bandwidth_utilization": "gauge",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_num_preemptions": "histogram",
    "quire_event_loop_lag_seconds": "histogram",
    "quire_slo_requests": "counter",
    "quire_slo_target_seconds": "gauge",
    "quire_step_predicted_seconds": "histogram",
    "quire_prediction_ratio": "histogram",
    "quire_predicted_steps": "counter",
}
# vLLM's own upper bounds, which must stay among ours.
VLLM_BUCKETS = {
    "vllm:inter_token_latency_seconds": [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 80.0],
    "vllm:e2e_request_latency_seconds": [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 60.0, 120.0, 7680.0],
    "vllm:time_to_first_token_seconds": [0.001, 2560.0],
    "vllm:iteration_tokens_total": [1.0, 8.0, 16.0, 32.0, 16384.0],
    "vllm:request_params_n": [1.0, 2.0, 5.0, 10.0, 20.0],
    "vllm:request_prompt_tokens": [1.0, 2.0, 5.0, 1000.0, 2000.0],
}


def record(**fields: object) -> StepRecord:
    zeros = {field.name: 0 for field in msgspec.structs.fields(StepRecord) if field.required}
    return StepRecord(**{**zeros, **fields})


@pytest.fixture
def metrics() -> PrometheusMetrics:
    metrics = PrometheusMetrics('na"me\nwith\\all', 4000)
    values = {"kv_cache_dtype": "int8", "enable_prefix_caching": True, "kv_cache_tokens": 8192}
    resolved = {name: {"value": value} for name, value in values.items()}
    metrics.engines[0].on_ready(EngineReady(4000, 512, 16, 8, 2048, resolved))
    return metrics


def families(metrics):
    return {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}


def test_names_and_types(metrics):
    types = {name: family.type for name, family in families(metrics).items()}
    assert {name: kind for name, kind in types.items() if name.startswith(("vllm:", "quire_"))} == EXPECTED
    others = {name.partition("_")[0] for name in types if not name.startswith(("vllm:", "quire_"))}
    assert others == {"http", "process", "python"}
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_labels(metrics):
    for name, family in families(metrics).items():
        for sample in family.samples:
            if name.startswith(("vllm:", "quire_")):
                assert sample.labels["model_name"] == 'na"me\nwith\\all'
                shared = ("vllm:admission_rejections", "quire_event_loop_lag_seconds")
                assert sample.labels.get("engine") == (None if name in shared else "0"), name


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("vllm:num_requests_waiting_by_reason", "reason", ["capacity", "deferred"]),
        ("vllm:engine_sleep_state", "sleep_state", ["awake", "weights_offloaded", "discard_all"]),
        ("vllm:prompt_tokens_by_source", "source", ["local_compute", "local_cache_hit", "external_kv_transfer"]),
        (
            "vllm:prompt_tokens_cached_by_source",
            "source",
            ["device", "host", "disk", "p2p", "external_unspecified"],
        ),
        ("vllm:request_success", "finished_reason", ["stop", "length", "abort", "error"]),
        ("vllm:admission_rejections", "reason", ["queue_full", "ttft_target"]),
        ("quire_slo_requests", "met", ["true", "false"]),
        ("quire_slo_target_seconds", "target", ["ttft", "itl"]),
        ("quire_predicted_steps", "inside", ["true", "false"]),
        ("quire_engine_restarts", "reason", ["crash", "silent", "stuck", "start"]),
        ("quire_requests_lost", "reason", ["retried", "gave_up"]),
    ],
)
def test_every_label_value_is_there_from_the_start(metrics, name, label, values):
    expected = dict.fromkeys(values, 0.0) | ({"awake": 1.0} if label == "sleep_state" else {})
    assert {s.labels[label]: s.value for s in families(metrics)[name].samples} == expected


def test_buckets(metrics):
    found = families(metrics)
    for name, bounds in VLLM_BUCKETS.items():
        ours = [float(s.labels["le"]) for s in found[name].samples if s.name.endswith("_bucket")]
        assert set(bounds) <= set(ours), name
        assert ours == sorted(ours)
    times = [metric for metric in METRICS if metric.kind == "histogram" and metric.name.endswith("_seconds")]
    below = [metric.name for metric in times if min(metric.buckets) >= 0.01]
    assert not below, f"these cannot resolve times below 10 ms: {below}"


def test_cache_config_is_published_once(metrics):
    metrics.engines[0].on_ready(EngineReady(1, 1, 1, 1, 1))
    (sample,) = families(metrics)["vllm:cache_config_info"].samples
    assert set(sample.labels) == {"model_name", "engine", *CACHE_CONFIG_LABELS}
    shown = {label: value for label, value in sample.labels.items() if value not in ("None", "False")}
    assert shown == {
        "model_name": 'na"me\nwith\\all',
        "engine": "0",
        "block_size": "16",
        "cache_dtype": "int8",
        "effective_attention_block_size": "16",
        "enable_prefix_caching": "True",
        "kv_cache_max_concurrency": "2.05",
        "kv_cache_size_tokens": "8192",
        "num_gpu_blocks": "512",
        "prefix_caching_hash_algo": "sha256",
    }
    assert {"gpu_memory_utilization", "num_gpu_blocks_override", "user_specified_block_size"} <= set(sample.labels)


def test_a_step_that_comes_after_the_last_abort_leaves_nothing_running(metrics):
    metrics.engines[0].on_step(record(num_running=1, num_blocks_in_use=3, num_blocks_total=12))
    found = families(metrics)
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        assert found[name].samples[0].value == 0


def test_steps(metrics):
    scheduled = {"num_prefill_tokens": 30, "num_sampled_tokens": 4, "num_running": 5, "num_waiting": 3}
    cache = {"num_blocks_in_use": 3, "num_blocks_total": 12, "prefix_cache_queries": 30, "prefix_cache_hits": 16}
    metrics.engines[0].on_request_arrived(SimpleNamespace(requests=[1]))
    metrics.engines[0].on_step(record(**scheduled, **cache, num_preemptions=2, num_deferred=1))
    found = families(metrics)

    def value(name: str, suffix: str = "") -> float:
        return next(s.value for s in found[name].samples if s.name == name + suffix)

    assert value("vllm:num_requests_running") == 5
    assert value("vllm:num_requests_waiting") == 3
    by_reason = found["vllm:num_requests_waiting_by_reason"].samples
    assert {s.labels["reason"]: s.value for s in by_reason} == {"capacity": 2, "deferred": 1}
    assert value("vllm:kv_cache_usage_perc") == 0.25
    assert value("vllm:num_preemptions", "_total") == 2
    assert value("vllm:prefix_cache_queries", "_total") == 30
    assert value("vllm:prefix_cache_hits", "_total") == 16
    assert value("vllm:iteration_tokens_total", "_sum") == 34


# All of vLLM's, and no others.
KV_BLOCK_BUCKETS = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
    float("inf"),
]  # fmt: skip


def test_predictions(metrics):
    metrics.engines[0].on_step(record(predicted_seconds=0.01, timed_seconds=0.011, step_seconds=0.5))
    metrics.engines[0].on_step(record(step_seconds=0.5))
    found = families(metrics)
    for name, value in (("quire_step_predicted_seconds", 0.01), ("quire_prediction_ratio", 1.1)):
        sums = {s.name.removeprefix(name): s.value for s in found[name].samples if not s.name.endswith("_bucket")}
        assert (sums["_count"], sums["_sum"]) == (1, pytest.approx(value)), "a step without a prediction does not count"


def test_steps_in_the_interval_of_their_prediction(metrics):
    interval = {"predicted_low_seconds": 0.008, "predicted_seconds": 0.01, "predicted_high_seconds": 0.0125}
    for seconds in (0.0079, 0.0081, 0.0124, 0.0126, 0.05):
        metrics.engines[0].on_step(record(**interval, timed_seconds=seconds, step_seconds=0.01))
    metrics.engines[0].on_step(record(**interval, step_seconds=0.01))  # it was captured
    samples = families(metrics)["quire_predicted_steps"].samples
    assert {each.labels["inside"]: each.value for each in samples if each.name.endswith("_total")} == {
        "true": 2,
        "false": 3,
    }


def test_kv_blocks():
    metrics = PrometheusMetrics("m", 2048, kv_blocks=True)
    metrics.engines[0].on_step(
        record(evicted_blocks=[EvictedBlock(7.0, 4.0, [0.5, 2.5]), EvictedBlock(1900.0, 0.015, [])])
    )
    metrics.engines[0].on_step(record(evicted_blocks=[]))
    found = families(metrics)
    expected = {"lifetime": (2, 1907.0), "idle_before_evict": (2, 4.015), "reuse_gap": (2, 3.0)}
    for name, (count, total) in expected.items():
        family = found[f"vllm:kv_block_{name}_seconds"]
        assert family.type == "histogram"
        values = {sample.name.removeprefix(family.name): sample.value for sample in family.samples}
        assert (values["_count"], values["_sum"]) == (count, total), name
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        assert [float(sample.labels["le"]) for sample in buckets] == KV_BLOCK_BUCKETS
        assert buckets[0].labels.keys() == {"model_name", "engine", "le"}
    lifetimes = [s.value for s in found["vllm:kv_block_lifetime_seconds"].samples if s.labels.get("le") == "1800.0"]
    assert lifetimes == [1], "1900 s are above the last bound"


def test_kv_blocks_are_shown_on_request_only(metrics):
    assert not [name for name in families(metrics) if name.startswith("vllm:kv_block_")]


def test_drafts():
    metrics = PrometheusMetrics("m", 2048, max_draft=3)
    metrics.engines[0].on_step(record(num_rows=2))
    step = {"num_drafts": 2, "num_draft_tokens": 5, "num_accepted_tokens": 3, "accepted_per_position": (2, 1)}
    metrics.engines[0].on_step(record(**step))
    metrics.engines[0].on_step(record(**step, num_draft_failures=1))
    found = families(metrics)
    totals = {"num_drafts": 4, "num_draft_tokens": 10, "num_accepted_tokens": 6}
    for name, total in totals.items():
        assert [s.value for s in found[f"vllm:spec_decode_{name}"].samples] == [total]
    per_position = found["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert {s.labels["position"]: s.value for s in per_position} == {"0": 4, "1": 2, "2": 0}
    assert found["quire_spec_decode_draft_failures"].samples[0].value == 1


def test_drafts_are_shown_where_there_are_some(metrics):
    assert not [name for name in families(metrics) if "spec_decode" in name]


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"kv_cache_metrics": True}, "vllm:kv_block_"),
        ({"expert_metrics": True}, "expert"),
        ({"spec_method": "ngram", "spec_tokens": 3}, "spec_decode"),
        ({"enable_lora": True}, "lora"),
        ({"tensor_parallel_size": 2}, "quire_rank_"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "lane"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_settings_of_an_engine_choose_its_metrics(settings, shown):
    def names(config: EngineConfig) -> set[str]:
        return {name for name in families(PrometheusMetrics.of_config(config, "m", 2048)) if shown in name}

    assert names(EngineConfig(**settings)) > names(EngineConfig())


def test_ranks(metrics):
    assert not [name for name in families(metrics) if "rank" in name]
    metrics = PrometheusMetrics("m", 2048, num_ranks=2)
    for _ in range(2):
        metrics.engines[0].on_step(record(ranks=((2.0, 0.5), (1.5, 0.0))))
    found = families(metrics)
    for name, totals in {"step": {"0": 4.0, "1": 3.0}, "waiting": {"0": 1.0, "1": 0.0}}.items():
        assert {s.labels["rank"]: s.value for s in found[f"quire_rank_{name}_seconds"].samples} == totals


@pytest.mark.parametrize(
    ("maximum", "expected"),
    [(1, [1]), (2, [1, 2]), (4, [1, 2]), (5, [1, 2, 5]), (2048, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000])],
)
def test_steps_up_to(maximum, expected):
    assert list(steps_up_to(maximum)) == expected
