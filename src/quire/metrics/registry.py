"""Declares every metric once: name, kind, unit, meaning, labels, buckets.

Names, types and labels are vLLM 0.32's, so its dashboards work. Counters get `_total` in the text format.
docs/metrics.md is generated from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

# The first labels of a family, unless it declares others.
COMMON_LABELS = ("model_name", "engine")

# vLLM's buckets start at 10 ms between tokens and at 0.3 s per request. A small model on a CPU is faster than both, so
# each family has more buckets below. All boundaries of vLLM stay, so its queries give the same answers.
_BELOW_10_MS = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008)
_INTER_TOKEN = (
    *_BELOW_10_MS, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_FIRST_TOKEN = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_REQUEST = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
# Few, because each method and route has its own series: prometheus-fastapi-instrumentator's 0.1, 0.5, 1 and neighbours.
_HTTP = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
_STEP_TOKENS = tuple(float(n) for n in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))
_STEP_EXPERTS = tuple(float(1 << n) for n in range(13))
_LAG = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_RESIDENCY = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0, 1800.0,
)  # fmt: skip
_RATIO = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 4.0, 10.0)
_N = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

# Stands for 1-2-5 steps up to max_model_len, which the model decides.
UP_TO_MODEL_LEN = (-1.0,)


@dataclass(frozen=True)
class Metric:
    """One family.

    Args:
        unit: the unit of its values; "" for an information with the constant value 1.
        label: the family's own label; "": it has none. Series for all its `values` exist from the start, so a rate
            exists before the first event, and the number of series never grows.
        common: the labels before `label`.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    common: tuple[str, ...] = COMMON_LABELS
    buckets: tuple[float, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric("vllm:num_requests_running", "gauge", "requests", "Requests in the running batch."),
    Metric("vllm:num_requests_waiting", "gauge", "requests", "Requests that wait, for any reason."),
    Metric(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "requests",
        "Requests that wait, by reason: capacity, for room in the batch or blocks in the KV cache; "
        "deferred, for a shared prompt that another request computes.",
        label="reason",
        values=("capacity", "deferred"),
    ),
    Metric(
        "vllm:engine_sleep_state",
        "gauge",
        "0 or 1",
        "1 for the present state of the engine. It is always awake: there is no sleep mode in this version.",
        label="sleep_state",
        values=("awake", "weights_offloaded", "discard_all"),
    ),
    Metric("vllm:kv_cache_usage_perc", "gauge", "share, 0 to 1", "Share of KV cache blocks that requests hold."),
    Metric("vllm:prefix_cache_queries", "counter", "tokens", "Prompt tokens looked up in the prefix cache."),
    Metric("vllm:prefix_cache_hits", "counter", "tokens", "Prompt tokens found in the prefix cache."),
    Metric(
        "vllm:num_preemptions",
        "counter",
        "preemptions",
        "Preemptions: a running request lost its KV blocks and is computed again.",
    ),
    Metric(
        "vllm:prompt_tokens",
        "counter",
        "tokens",
        "Prompt tokens of requests that reached their first token. As in usage, they count once for n continuations.",
    ),
    Metric(
        "vllm:prompt_tokens_by_source",
        "counter",
        "tokens",
        "Prompt tokens, by the source of their keys and values.",
        label="source",
        values=("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    Metric(
        "vllm:prompt_tokens_cached",
        "counter",
        "tokens",
        "Prompt tokens that were cached: cached_tokens in usage.",
    ),
    Metric(
        "vllm:prompt_tokens_cached_by_source",
        "counter",
        "tokens",
        "Cached prompt tokens, by the place of the cache; device is the model's own memory.",
        label="source",
        values=("device", "host", "disk", "p2p", "external_unspecified"),
    ),
    Metric("vllm:generation_tokens", "counter", "tokens", "Tokens generated, of all continuations."),
    Metric(
        "vllm:request_success",
        "counter",
        "continuations",
        "Continuations that ended, by reason. Aborts and errors count too.",
        label="finished_reason",
        values=("stop", "length", "abort", "error"),
    ),
    Metric(
        "vllm:admission_rejections",
        "counter",
        "requests",
        "Refused requests, by reason: queue_full, too many waited; ttft_target, the first token would have been late.",
        label="reason",
        values=("queue_full", "ttft_target"),
        common=("model_name",),
    ),
    Metric(
        "quire_slo_requests",
        "counter",
        "continuations",
        "Continuations that ended by themselves under a target (--slo-ttft, --slo-itl). They met it if the first token "
        "was in time, and of the other tokens at most one and 1 - --slo-attainment of them were late.",
        label="met",
        values=("true", "false"),
    ),
    Metric(
        "quire_slo_target_seconds",
        "gauge",
        "seconds",
        "The targets (--slo-ttft, --slo-itl), which may move while serving. 0: there is no such target.",
        label="target",
        values=("ttft", "itl"),
    ),
    Metric(
        "quire_step_predicted_seconds",
        "histogram",
        "seconds",
        "Predicted time of a step, before it ran.",
        buckets=_INTER_TOKEN,
    ),
    Metric(
        "quire_prediction_ratio",
        "histogram",
        "ratio",
        "Measured time of a step, without its drafter, over its predicted time. Captured steps do not count.",
        buckets=_RATIO,
    ),
    Metric(
        "quire_predicted_steps",
        "counter",
        "steps",
        "Steps with a prediction that were not captured, by whether they took a time in its interval. Nine of ten "
        "should.",
        label="inside",
        values=("true", "false"),
    ),
    Metric(
        "quire_engine_restarts",
        "counter",
        "restarts",
        "New engine processes after a failure, by its kind: crash, the process ended; silent, it gave no sign of life; "
        "stuck, it did not end a step in time; start, it did not get ready after a failure.",
        label="reason",
        values=("crash", "silent", "stuck", "start"),
    ),
    Metric(
        "quire_requests_retried",
        "counter",
        "requests",
        "Requests sent to another engine after a failure. They go on after the tokens that they had.",
    ),
    Metric(
        "quire_requests_lost",
        "counter",
        "requests",
        "Requests that ended with an error because their engine failed. The reason against a further retry: retried, "
        "they may be the cause of several failures; gave_up, no engine was started again.",
        label="reason",
        values=("retried", "gave_up"),
    ),
    Metric(
        "vllm:estimated_flops_per_gpu",
        "counter",
        "operations",
        "Operations of all steps, estimated from the model's sizes. It counts per engine; the name is vLLM's.",
    ),
    Metric(
        "vllm:estimated_read_bytes_per_gpu",
        "counter",
        "bytes",
        "Weights, keys and values that all steps read, estimated from the model's sizes.",
    ),
    Metric(
        "vllm:estimated_write_bytes_per_gpu",
        "counter",
        "bytes",
        "Keys and values that all steps wrote, estimated from the model's sizes.",
    ),
    Metric(
        "quire_model_flops_utilization",
        "gauge",
        "ratio",
        "MFU: estimated operations of the steps of about the last 10 seconds, over their time and peak_flops of "
        "GET /v1/config. Time between steps does not count. 0: idle, or the peak is not known.",
    ),
    Metric(
        "quire_model_bandwidth_utilization",
        "gauge",
        "ratio",
        "MBU: the same for read bytes and peak_read_bandwidth. A start on a CPU measures both peaks; those of a GPU "
        "are from its data sheet. Caches may read faster.",
    ),
    Metric(
        "vllm:iteration_tokens_total",
        "histogram",
        "tokens",
        "Computed prompt tokens and generated tokens of one step.",
        buckets=_STEP_TOKENS,
    ),
    Metric(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "seconds",
        "Arrival to first token, per continuation.",
        buckets=_FIRST_TOKEN,
    ),
    Metric(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "seconds",
        "Time between two tokens of a continuation.",
        buckets=_INTER_TOKEN,
    ),
    Metric(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "seconds",
        "Mean time per token after the first, per continuation of two tokens or more.",
        buckets=_INTER_TOKEN,
    ),
    Metric(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "seconds",
        "Arrival to last token, per continuation.",
        buckets=_REQUEST,
    ),
    Metric(
        "vllm:request_queue_time_seconds",
        "histogram",
        "seconds",
        "Arrival to first scheduling, per continuation.",
        buckets=_REQUEST,
    ),
    Metric(
        "vllm:request_inference_time_seconds",
        "histogram",
        "seconds",
        "First scheduling to last token, per continuation.",
        buckets=_REQUEST,
    ),
    Metric(
        "vllm:request_prefill_time_seconds",
        "histogram",
        "seconds",
        "First scheduling to first token, per continuation.",
        buckets=_REQUEST,
    ),
    Metric(
        "vllm:request_decode_time_seconds",
        "histogram",
        "seconds",
        "First token to last token, per continuation.",
        buckets=_REQUEST,
    ),
    Metric(
        "vllm:request_prompt_tokens",
        "histogram",
        "tokens",
        "Prompt tokens, per continuation.",
        buckets=UP_TO_MODEL_LEN,
    ),
    Metric(
        "vllm:request_generation_tokens",
        "histogram",
        "tokens",
        "Generated tokens, per continuation.",
        buckets=UP_TO_MODEL_LEN,
    ),
    Metric(
        "vllm:request_prefill_kv_computed_tokens",
        "histogram",
        "tokens",
        "Prompt tokens whose keys and values were computed, not cached or shared, per continuation.",
        buckets=UP_TO_MODEL_LEN,
    ),
    Metric(
        "vllm:request_num_preemptions",
        "histogram",
        "preemptions",
        "Preemptions, per continuation; a continuation without preemptions counts as 0.",
        buckets=_PREEMPTIONS,
    ),
    Metric(
        "vllm:request_max_num_generation_tokens",
        "histogram",
        "tokens",
        "Longest of the n continuations, per request.",
        buckets=UP_TO_MODEL_LEN,
    ),
    Metric(
        "quire_event_loop_lag_seconds",
        "histogram",
        "seconds",
        "Delay of the API process' event loop. It delays every stream. It is measured 20 times a second.",
        common=("model_name",),
        buckets=_LAG,
    ),
    Metric("vllm:request_params_n", "histogram", "continuations", "n, per request.", buckets=_N),
    Metric(
        "vllm:request_params_max_tokens",
        "histogram",
        "tokens",
        "max_tokens, per request with one.",
        buckets=UP_TO_MODEL_LEN,
    ),
)

# Only with --kv-cache-metrics, as in vLLM.
KV_BLOCK_METRICS = (
    Metric(
        "vllm:kv_block_lifetime_seconds",
        "histogram",
        "seconds",
        "Time from the allocation of a sampled KV block to its next allocation.",
        buckets=_RESIDENCY,
    ),
    Metric(
        "vllm:kv_block_idle_before_evict_seconds",
        "histogram",
        "seconds",
        "Time from the last reuse of a sampled KV block by the prefix cache (without reuse: from its allocation) to "
        "its next allocation.",
        buckets=_RESIDENCY,
    ),
    Metric(
        "vllm:kv_block_reuse_gap_seconds",
        "histogram",
        "seconds",
        "Time between reuses of a sampled KV block by the prefix cache. The last four count at its next allocation.",
        buckets=_RESIDENCY,
    ),
)

# Only with --expert-metrics.
EXPERT_METRICS = (
    Metric(
        "quire_expert_tokens",
        "histogram",
        "tokens",
        "Tokens of a step that go to one expert, of the experts that it hits in one layer. The layers take turns.",
        buckets=_STEP_EXPERTS,
    ),
    Metric(
        "quire_distinct_experts",
        "histogram",
        "experts",
        "Experts of a layer that a step hits: the mean over layers. A step reads the weights of these experts.",
        buckets=_STEP_EXPERTS,
    ),
    Metric(
        "quire_expert_balancedness",
        "gauge",
        "share, 0 to 1",
        "Tokens of an expert by the tokens of the busiest expert of its layer, in the last step: the mean over all.",
    ),
    Metric(
        "quire_expert_rank_balancedness",
        "gauge",
        "share, 0 to 1",
        "Tokens that go to the experts of a rank by the tokens of the busiest rank, in the last step: the mean over "
        "ranks and layers. 1 without --enable-expert-parallel.",
    ),
    Metric(
        "quire_moved_experts",
        "counter",
        "experts",
        "Experts that --enable-eplb has moved to another place, on the rank that counts.",
    ),
)

# Only where several ranks share a model. Values of the label are their numbers.
RANK = "rank"
RANK_METRICS = (
    Metric(
        "quire_rank_step_seconds",
        "counter",
        "seconds",
        "Time of a rank's steps, with its waits for other ranks.",
        label=RANK,
    ),
    Metric(
        "quire_rank_waiting_seconds",
        "counter",
        "seconds",
        "The part of it in which the rank waited for others: to join columns in a stage, or for rows between stages.",
        label=RANK,
    ),
)

# Only where lanes of an engine share experts (-dp with -ep). Values of the label are their numbers.
LANE = "lane"
LANE_METRICS = (
    Metric("quire_lane_tokens", "counter", "tokens", "Tokens that a lane has computed.", label=LANE),
    Metric("quire_lane_requests_running", "gauge", "requests", "Requests of a lane that run.", label=LANE),
    Metric("quire_lane_requests_waiting", "gauge", "requests", "Requests of a lane that wait.", label=LANE),
    Metric(
        "quire_lane_kv_blocks_in_use", "gauge", "blocks", "Blocks of a lane's KV cache that are in use.", label=LANE
    ),
)

# Only servers that speculate have these, as in vLLM. Values of the label are the positions up to the longest draft.
POSITION = "position"
SPECULATION_METRICS = (
    Metric("vllm:spec_decode_num_drafts", "counter", "drafts", "Drafts that were verified: one per request and step."),
    Metric("vllm:spec_decode_num_draft_tokens", "counter", "tokens", "Tokens of these drafts."),
    Metric("vllm:spec_decode_num_accepted_tokens", "counter", "tokens", "Tokens of these drafts that held."),
    Metric(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "tokens",
        "Tokens of these drafts that held, by position in the draft, from 0.",
        label=POSITION,
    ),
    Metric(
        "quire_spec_decode_draft_failures",
        "counter",
        "requests",
        "Requests that continued without drafts, for a while or for good, each time that their drafter failed.",
    ),
)

# With --enable-lora.
LORA_METRICS = (
    Metric(
        "quire_lora_adapters",
        "gauge",
        "adapters",
        "Adapters of the last step: known, requests may name them; in_memory, the others are read when one does.",
        label="state",
        values=("known", "in_memory"),
    ),
    Metric(
        "quire_lora_loads",
        "counter",
        "adapters",
        "Adapters that were read, for the first time or again, by result.",
        label="result",
        values=("ok", "error"),
    ),
    Metric("quire_lora_load_seconds", "histogram", "seconds", "Time to read and check an adapter.", buckets=_REQUEST),
)
LORA_REQUESTS_INFO = Metric(
    "vllm:lora_requests_info",
    "gauge",
    "",
    "Adapters of the unfinished requests, as labels; the value is the time of the scrape, in Unix seconds.",
    common=(),
)
LORA_REQUESTS_LABELS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")

# Labels of vLLM's CacheConfig that have a meaning here. Like vLLM, "None" stands for a setting that was not given.
CACHE_CONFIG_INFO = Metric("vllm:cache_config_info", "gauge", "", "The KV cache's settings, as labels; 1 once ready.")
CACHE_CONFIG_LABELS = (
    "block_size",
    "cache_dtype",
    "effective_attention_block_size",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "is_attention_free",
    "kv_cache_max_concurrency",
    "kv_cache_memory_bytes",
    "kv_cache_size_tokens",
    "kv_offloading_size",
    "num_cpu_blocks",
    "num_gpu_blocks",
    "num_gpu_blocks_override",
    "prefix_caching_hash_algo",
    "sliding_window",
    "user_specified_block_size",
)

# Names and labels of prometheus-fastapi-instrumentator, which vLLM uses. A value outside of the closed set is OTHER.
OTHER = "other"
HTTP_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", OTHER)
HTTP_STATUSES = ("1xx", "2xx", "3xx", "4xx", "5xx")
HTTP_REQUESTS_LABELS = ("method", "status", "handler")
HTTP_DURATION_LABELS = ("method", "handler")
HTTP_REQUESTS = Metric(
    "http_requests",
    "counter",
    "requests",
    "HTTP requests, by method, class of the status and route. Requests of probes and of Prometheus do not count.",
    common=(),
)
HTTP_DURATION = Metric(
    "http_request_duration_seconds",
    "histogram",
    "seconds",
    "Time from the first byte of an HTTP request to the last byte of its answer, by method and route.",
    common=(),
    buckets=_HTTP,
)


def steps_up_to(maximum: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `maximum`, as in vLLM. Larger values fall into +Inf."""
    values: list[float] = []
    decade = 1
    while True:
        for step in (1, 2, 5):
            if decade * step > maximum:
                return tuple(values) or (1.0,)
            values.append(float(decade * step))
        decade *= 10
