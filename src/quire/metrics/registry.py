"""Every metric once: name, kind, meaning, labels, buckets. Names, types and labels are vLLM 0.32's: its dashboards fit.

All carry the labels model_name and engine. Counters get `_total` in the text format. Times in seconds, lengths in
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

COMMON_LABELS = ("model_name", "engine")

# vLLM's buckets start at 10 ms between tokens and at 0.3 s per request; a small model on a CPU is faster than both, so
# each family continues downwards. vLLM's own boundaries are all kept: its queries give the same answers.
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
_STEP_TOKENS = tuple(float(n) for n in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))
_N = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

# Stands for 1-2-5 steps up to max_model_len, which is known when the model is.
UP_TO_MODEL_LEN = (-1.0,)


@dataclass(frozen=True)
class Metric:
    """One family. `labels` come after the common ones; `buckets` are upper bounds of a histogram."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


# The families with labels of their own. vLLM's rejections carry no engine label.
REQUEST_SUCCESS = Metric("vllm:request_success", "counter", "Requests that ended, by reason.", ("finished_reason",))
ADMISSION_REJECTIONS = Metric(
    "vllm:admission_rejections", "counter", "Requests refused because the queue was full, by reason.", ("reason",)
)
CACHE_CONFIG_INFO = Metric(
    "vllm:cache_config_info",
    "gauge",
    "The KV cache's settings, as labels.",
    (
        "block_size",
        "num_gpu_blocks",
        "cache_dtype",
        "enable_prefix_caching",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
    ),
)
METRICS: tuple[Metric, ...] = (
    Metric("vllm:num_requests_running", "gauge", "Requests in the running batch."),
    Metric("vllm:num_requests_waiting", "gauge", "Requests waiting to be scheduled."),
    Metric("vllm:kv_cache_usage_perc", "gauge", "Share of KV cache blocks in use, 0 to 1."),
    Metric("vllm:prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    Metric("vllm:prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache."),
    Metric(
        "vllm:num_preemptions", "counter", "Times a running request lost its KV blocks and has to be computed again."
    ),
    Metric("vllm:prompt_tokens", "counter", "Prompt tokens of requests that reached their first token; as in usage."),
    Metric("vllm:generation_tokens", "counter", "Tokens generated."),
    Metric(
        "vllm:iteration_tokens_total",
        "histogram",
        "Tokens computed in one step, prompt and generated.",
        buckets=_STEP_TOKENS,
    ),
    Metric("vllm:time_to_first_token_seconds", "histogram", "Arrival to first token.", buckets=_FIRST_TOKEN),
    Metric(
        "vllm:inter_token_latency_seconds", "histogram", "Time between two tokens of a request.", buckets=_INTER_TOKEN
    ),
    Metric(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "Mean time per token after the first, per request.",
        buckets=_INTER_TOKEN,
    ),
    Metric("vllm:e2e_request_latency_seconds", "histogram", "Arrival to last token.", buckets=_REQUEST),
    Metric("vllm:request_queue_time_seconds", "histogram", "Arrival to first scheduling.", buckets=_REQUEST),
    Metric("vllm:request_inference_time_seconds", "histogram", "First scheduling to last token.", buckets=_REQUEST),
    Metric("vllm:request_prefill_time_seconds", "histogram", "First scheduling to first token.", buckets=_REQUEST),
    Metric("vllm:request_decode_time_seconds", "histogram", "First token to last token.", buckets=_REQUEST),
    Metric("vllm:request_prompt_tokens", "histogram", "Prompt tokens per request.", buckets=UP_TO_MODEL_LEN),
    Metric("vllm:request_generation_tokens", "histogram", "Generated tokens per request.", buckets=UP_TO_MODEL_LEN),
    Metric(
        "vllm:request_max_num_generation_tokens",
        "histogram",
        "Longest of the n continuations, per request.",
        buckets=UP_TO_MODEL_LEN,
    ),
    Metric(
        "vllm:request_prefill_kv_computed_tokens",
        "histogram",
        "Prompt tokens not found in the cache, per request.",
        buckets=UP_TO_MODEL_LEN,
    ),
    Metric("vllm:request_params_max_tokens", "histogram", "max_tokens asked for.", buckets=UP_TO_MODEL_LEN),
    Metric("vllm:request_params_n", "histogram", "n asked for.", buckets=_N),
    Metric("vllm:request_num_preemptions", "histogram", "Preemptions per request that had one.", buckets=_PREEMPTIONS),
)


def steps_up_to(maximum: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... as far as `maximum` reaches; what is longer falls into +Inf. vLLM's series."""
    values: list[float] = []
    decade = 1
    while True:
        for step in (1, 2, 5):
            if decade * step > maximum:
                return tuple(values) or (1.0,)
            values.append(float(decade * step))
        decade *= 10
