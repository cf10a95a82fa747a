"""Every setting has its source, and the performance modes report their changes."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any, get_args

import pytest

from quire import demo
from quire.config import EngineConfig, ServerConfig
from quire.model_config import load_model_config
from quire.option import Source, options
from quire.planning.memory_plan import MemoryFacts, plan_kv_cache
from quire.resolve import DeviceFacts, GpuFacts, resolve, resolve_server
from quire.settings import Planned
from quire.speculative_config import SpeculativeConfig

GIB = 1 << 30
MODEL = load_model_config(demo.path())
DEVICE = DeviceFacts(
    kind="cpu", name="test", isa="avx2", num_cores=4, total_memory_bytes=8 * GIB, free_memory_bytes=6 * GIB
)
MEMORY = MemoryFacts(total_bytes=8 * GIB, free_bytes=6 * GIB, weight_bytes=GIB, work_bytes=GIB)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_NUM_THREADS", "QUIRE_ISA", "VLLM_API_KEY", "VLLM_LOGGING_LEVEL", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)


def _resolve(is_server: bool = True, **arguments: Any) -> Planned:
    config = EngineConfig.from_kwargs(**arguments)
    return plan_kv_cache(config, MODEL, resolve(config, MODEL, DEVICE, is_server=is_server), MEMORY)


def test_every_config_field_has_provenance() -> None:
    for config, record in (
        (EngineConfig, _resolve().settings),
        (ServerConfig, resolve_server(ServerConfig()).settings),
    ):
        for f in options(config):
            setting = record[f.name]
            assert setting.source in get_args(Source), f.name
            assert setting.is_live == f.metadata["live"]
            if f.name != "max_model_len":  # says with numbers whether it limits the KV cache too
                assert setting.limits == f.metadata["limits"]
    assert all(setting.source for setting in _resolve().settings.values())


@pytest.mark.parametrize("gpu", [None, GpuFacts("H100", 90, 80 << 30, 79 << 30)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("arguments", [{}, {"max_model_len": -1, "num_gpu_blocks_override": 10}], ids=str)
def test_what_is_computed_with_is_what_is_shown(gpu: GpuFacts | None, arguments: dict[str, Any]) -> None:
    """Every field of the owners' dataclasses has the value that its setting shows, also where memory cut it."""
    config = EngineConfig.from_kwargs(**arguments)
    before = resolve(config, MODEL, replace(DEVICE, gpu=gpu), is_server=True)
    was = replace(before, settings=dict(before.settings))
    after = plan_kv_cache(config, MODEL, before, MEMORY)
    assert before == was, "what was resolved is overwritten"
    for resolved in (before, after):
        for owner in (f.name for f in fields(resolved) if f.name not in ("settings", "drafter", "lora")):
            for name, value in asdict(getattr(resolved, owner)).items():
                if name in ("speculation", "balancing"):
                    continue  # no settings of their own: keys of speculative_config and eplb_config
                assert resolved.settings[name].value == value, (owner, name)


def test_the_plan_adds_up() -> None:
    """The free memory after the weights is KV cache, work, and the rest for others."""
    resolved = _resolve()
    planned = (resolved.memory.kv_cache_bytes, resolved.memory.work_bytes, resolved.memory.unplanned_bytes)
    assert sum(planned) == MEMORY.free_bytes
    assert min(planned) > 0


# A legal value of every field of EngineConfig that is not its default.
OTHER_VALUES: dict[str, Any] = {
    "model": "x",
    "gguf_file": "x.gguf",
    "tokenizer": "x",
    "tokenizer_mode": "slow",
    "skip_tokenizer_init": True,
    "revision": "x",
    "tokenizer_revision": "x",
    "hf_token": "x",
    "hf_overrides": {"a": 1},
    "download_dir": "x",
    "load_format": "dummy",
    "packed_weights_cache": True,
    "model_impl": "native",
    "device": "cpu",
    "dtype": "float32",
    "seed": 1,
    "served_model_name": ("x",),
    "max_model_len": 64,
    "generation_config": "vllm",
    "override_generation_config": {"a": 1},
    "max_logprobs": 1,
    "logprobs_mode": "processed_logprobs",
    "deterministic": True,
    "attention_backend": "CPU_ATTN",
    "enforce_eager": True,
    "cudagraph_mode": "NONE",
    "cudagraph_capture_sizes": (1, 8),
    "max_cudagraph_capture_size": 8,
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 1 << 28,
    "num_gpu_blocks_override": 999,
    "block_size": 32,
    "enable_prefix_caching": False,
    "performance_mode": "interactivity",
    "max_num_seqs": 9,
    "max_num_batched_tokens": 999,
    "long_prefill_token_threshold": 9,
    "max_num_queued_reqs": 9,
    "slo_ttft": 0.5,
    "slo_itl": 0.05,
    "slo_attainment": 0.9,
    "distributed_timeout_seconds": 60,
    "max_parallel_loading_workers": 2,
    "enable_expert_parallel": True,
    "expert_placement_strategy": "round_robin",
    "enable_eplb": True,
    "eplb_config": {"window_size": 5},
    "enable_batch_sharded_sampling": True,
    "max_shared_prefill_tokens": 9,
    "enable_chunked_prefill": False,
    "scheduling_policy": "priority",
    "watermark": 0.1,
    "async_scheduling": True,
    "kv_cache_dtype": "int8",
    "num_threads": 2,
    "disable_log_stats": True,
    "expert_metrics": True,
    "otlp_traces_endpoint": "http://localhost:4317",
    "kv_cache_metrics": True,
    "kv_cache_metrics_sample": 0.5,
    "speculative_config": {"method": "suffix", "num_speculative_tokens": 3},
    "enable_lora": True,
    "lora_modules": ("a=b",),
    "tensor_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "device_ids": ("0",),
    "numa_bind": True,
    "numa_bind_nodes": (0,),
    "numa_bind_cpus": ("0",),
    "nnodes": 2,
    "node_rank": 1,
    "master_addr": "10.0.0.1",
    "master_port": 29502,
    "headless": True,
    "distributed_executor_backend": "mp",
    "max_loras": 3,
    "max_lora_rank": 64,
    "max_cpu_loras": 5,
    "lora_dtype": "float32",
    "lora_target_modules": ("q_proj",),
    "lora_dir": ("x",),
    "data_parallel_size": 2,
    "data_parallel_size_local": 1,
    "data_parallel_start_rank": 1,
}
# One legal value each in this version; `slo` and `spec_...`, which become others; flags without a meaning of their own.
FIXED = {
    "trust_remote_code", "quantization", "slo", "spec_method", "spec_model", "spec_tokens",
    "per_request_spec_decode_metrics", "data_parallel_backend",
}  # fmt: skip


@pytest.mark.parametrize("f", [f for f in options(EngineConfig) if f.name not in FIXED], ids=lambda f: f.name)
def test_a_given_value_is_recorded_as_given(f: Any) -> None:
    assert f.name in OTHER_VALUES, "a new setting: give a legal value of it here"
    value = OTHER_VALUES[f.name]
    needed: dict[str, Any] = {"enable_lora": True} if "lora" in f.name else {}
    if f.name == "enable_eplb":
        needed = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    if f.name == "enable_batch_sharded_sampling":
        needed = {"tensor_parallel_size": 2}
    if f.name in ("nnodes", "node_rank", "headless"):
        needed = {"pipeline_parallel_size": 2, "nnodes": 2}
    if f.name in ("node_rank", "headless"):
        needed |= {"node_rank": 1, "headless": True}
    if f.name == "data_parallel_start_rank":
        needed = {"data_parallel_size": 2, "enable_expert_parallel": True, "nnodes": 2, "headless": True}
    setting = _resolve(**needed | {f.name: value}).settings[f.name]
    assert setting.source == "argument"
    value = ("a",) if f.name == "lora_modules" else value  # their paths are not for everybody
    shown = SpeculativeConfig(**value).effective() if f.name == "speculative_config" else value
    assert setting.value == ("set" if f.metadata["secret"] else shown)


@pytest.mark.parametrize(
    ("others", "why"),
    [({}, "one rank"), ({"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, "torchrun")],
    ids=["one rank", "torchrun"],
)
def test_sampling_that_is_not_shared_says_why(others: dict[str, Any], why: str) -> None:
    setting = _resolve(enable_batch_sharded_sampling=True, **others).settings["enable_batch_sharded_sampling"]
    assert (setting.value, setting.source) == (False, "formula")
    assert why in setting.detail


def test_memory_settings_know_their_reason() -> None:
    default = _resolve()
    assert default.settings["weight_bytes"].source == default.settings["work_bytes"].source == "measured"
    assert default.settings["num_blocks"].source == "formula"
    by_blocks = _resolve(num_gpu_blocks_override=200).settings["num_blocks"]
    assert (by_blocks.value, by_blocks.source) == (200, "argument")
    assert _resolve(kv_cache_memory_bytes="256M").settings["num_blocks"].source == "argument"
    longest = _resolve(max_model_len=-1, num_gpu_blocks_override=10).settings["max_model_len"]
    assert (longest.value, longest.source) == (160, "formula")


@pytest.mark.parametrize(
    ("is_server", "arguments", "limits", "source"),
    [
        (True, {}, (128, 256), "formula"),
        (False, {}, (256, 1024), "formula"),
        (True, {"performance_mode": "throughput"}, (256, 1024), "formula"),
        (False, {"performance_mode": "throughput"}, (512, 2048), "formula"),
        (True, {"performance_mode": "throughput", "max_num_seqs": 64}, (64, 256), "formula"),
        (True, {"performance_mode": "throughput", "max_num_batched_tokens": 512}, (128, 512), "argument"),
        (True, {"performance_mode": "interactivity"}, (128, 256), "formula"),
        (True, {"performance_mode": "interactivity", "max_num_seqs": 1024}, (1024, 1024), "formula"),
        (True, {"max_model_len": 16, "max_num_seqs": 4}, (4, 64), "formula"),
        (True, {"max_num_seqs": 4096}, (4096, 4096), "default"),
        (True, {"enable_chunked_prefill": False, "performance_mode": "interactivity"}, (128, 2048), "formula"),
    ],
)
def test_batch_limits(is_server: bool, arguments: dict[str, Any], limits: tuple[int, int], source: str) -> None:
    """vLLM's requests, tokens at the knee and two per request; twice for throughput if neither is set; at most a
    quarter of vLLM's tokens for interactivity."""
    resolved = _resolve(is_server, **arguments)
    assert (resolved.scheduler.max_num_seqs, resolved.scheduler.max_num_batched_tokens) == limits
    assert resolved.settings["max_num_batched_tokens"].source == source


def test_the_mode_explains_itself() -> None:
    def detail(**arguments: Any) -> str:
        return _resolve(**arguments).settings["max_num_batched_tokens"].detail

    assert "x 2 for throughput" in detail(performance_mode="throughput")
    assert "tokens / 4 for interactivity" in detail(performance_mode="interactivity")
    assert "not doubled for throughput" in detail(performance_mode="throughput", max_num_seqs=64)


def test_server_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "do-not-show")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    settings = resolve_server(ServerConfig(port=1)).settings
    assert (settings["port"].value, settings["port"].source) == (1, "argument")
    assert (settings["api_key"].value, settings["api_key"].source) == ("set", "environment")
    assert (settings["log_level"].value, settings["log_level"].source) == ("debug", "environment")
    server = resolve_server(ServerConfig(tool_call_parser="hermes"), "</think>")
    for f in options(ServerConfig):
        if f.name != "api_key":  # which is never shown
            assert getattr(server, f.name) == server.settings[f.name].value, f.name
    assert (server.log_level, server.log_format, server.reasoning_parser) == ("debug", "text", "qwen3")
    given = resolve_server(ServerConfig(api_key=("do-not-show",))).settings["api_key"]
    assert (given.value, given.source) == ("set", "argument")
