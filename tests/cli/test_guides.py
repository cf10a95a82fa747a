"""The command lines of the five guides, by row: each runs, runs with a notice, or is refused with the way out."""

from __future__ import annotations

import logging
import shlex

import pytest

from quire.compat.environment import check_environment
from quire.config import EngineConfig
from quire.errors import ConfigError
from tests.cli.reading import read

# guide and row, command line, settings it must give
RUNS = [
    ("S0-6", "--model TheBloke/Mistral-7B-Instruct-v0.2-AWQ --quantization awq", {"quantization": "awq"}),
    ("S0-6", "--model TheBloke/Mistral-7B-Instruct-v0.2-GPTQ --quantization gptq", {"quantization": "gptq"}),
    (
        "S1-11",
        "m/Meta-Llama-3.1-8B-Instruct-AWQ --quantization awq --dtype half",
        {"quantization": "awq", "dtype": "half"},
    ),
    ("S2-9", "--model meta-llama/Llama-3-8b --quantization fp8 --dtype auto", {"quantization": "fp8"}),
    ("S4-26", "Qwen/Qwen3-32B-FP8 --quantization fp8", {"quantization": "fp8"}),
    (
        "S0-3",
        "--model mistralai/Mistral-7B-Instruct-v0.2 --tensor-parallel-size 1 --gpu-memory-utilization 0.90 "
        "--max-model-len 8192 --max-num-seqs 256 --max-num-batched-tokens 8192 --port 8000",
        {"max_model_len": 8192, "max_num_seqs": 256, "gpu_memory_utilization": 0.9, "port": 8000},
    ),
    ("S0-4", "--model m --gpu-memory-utilization 0.95", {"gpu_memory_utilization": 0.95}),
    ("S0-4", "--model m --gpu-memory-utilization 0.85", {"gpu_memory_utilization": 0.85}),
    (
        "S0-11",
        "--model m --max-num-batched-tokens 16384 --max-num-seqs 512",
        {"max_num_batched_tokens": 16384, "max_num_seqs": 512},
    ),
    (
        "S0-18",
        "--model m --served-model-name mistral-7b --host 0.0.0.0 --port 8000 --max-model-len 8192 "
        "--gpu-memory-utilization 0.90 --max-num-seqs 256 --enable-prefix-caching --uvicorn-log-level warning",
        {"served_model_name": ("mistral-7b",), "host": "0.0.0.0", "uvicorn_log_level": "warning"},
    ),
    ("S4-6", "m --kv-cache-dtype fp8_e4m3", {"kv_cache_dtype": "fp8_e4m3"}),
    ("S4-31", "--model m --kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"}),
    ("S1-3", "meta-llama/Llama-3.1-8B-Instruct", {"model": "meta-llama/Llama-3.1-8B-Instruct"}),
    (
        "S1-8",
        "m --enable-prefix-caching --gpu-memory-utilization 0.95 --max-model-len 4096",
        {"enable_prefix_caching": True},
    ),
    ("S1-9", "m --max-num-seqs 256 --max-num-batched-tokens 32768", {"max_num_batched_tokens": 32768}),
    (
        "S1-15",
        "m --gpu-memory-utilization 0.95 --max-model-len 4096 --max-num-seqs 256 --enable-prefix-caching --dtype half "
        "--port 8000",
        {"dtype": "half", "max_num_seqs": 256},
    ),
    (
        "S2-3",
        "--model m --tensor-parallel-size 1 --max-model-len 8192 --max-num-seqs 256 --gpu-memory-utilization 0.90 "
        "--host 0.0.0.0 --port 8000",
        {"tensor_parallel_size": 1, "host": "0.0.0.0"},
    ),
    ("S2-15", "--model m --max-num-seqs 32 --max-num-batched-tokens 4096", {"max_num_seqs": 32}),
    (
        "S4-27",
        "--model m --quantization gguf --gguf-file m.Q4_K_M.gguf",
        {"quantization": "gguf", "gguf_file": "m.Q4_K_M.gguf"},
    ),
    ("S2-15", "m --performance-mode interactivity", {"performance_mode": "interactivity"}),
    (
        "S3-1",
        "--model m --max-num-batched-tokens 8192 --gpu-memory-utilization 0.85",
        {"max_num_batched_tokens": 8192},
    ),
    (
        "S3-2",
        "--model m --enable-chunked-prefill --max-num-batched-tokens 4096",
        {"enable_chunked_prefill": True, "enable_prefix_caching": True},
    ),
    ("S3-2", "--model m --enable-chunked-prefill False", {"enable_chunked_prefill": False}),
    ("S3-3", "--model m --enable-prefix-caching", {"enable_prefix_caching": True}),
    ("S3-5", "--model m --num-speculative-decoder-samples 0", {"model": "m"}),
    ("S3-6", "--model m --block-size 32 --gpu-memory-utilization 0.88", {"block_size": 32}),
]

# row, command line, settings, the notice's words
RUNS_WITH_NOTICE = [
    (
        "S2-14",
        "--model m --max-num-seqs 512 --max-num-batched-tokens 32768 --block-size 32 --swap-space 4",
        {"block_size": 32, "max_num_seqs": 512},
        "--swap-space has no effect: preempted requests are computed again",
    ),
    (
        "S4-23",
        "--model m --lora-extra-vocab-size 256",
        {"model": "m"},
        "--lora-extra-vocab-size has no effect: a vocabulary never grows here",
    ),
]

# row, command line, the name the error is about, what its text says
REFUSED = [
    (
        "S0-16",
        "--model meta-llama/Meta-Llama-3-8B --speculative-model meta-llama/Meta-Llama-3-1B --num-speculative-tokens 5",
        "num_speculative_tokens",
        "present flag is --spec-tokens",
    ),
    (
        "S2-7",
        "--model meta-llama/Llama-3-70b --tensor-parallel-size 4 --dtype bfloat16 --max-model-len 16384 "
        "--gpu-memory-utilization 0.95",
        "tensor_parallel_size",
        "Tensor parallelism is not supported",
    ),
    (
        "S2-11",
        "--model m --speculative-model d --num-speculative-tokens 5 --tensor-parallel-size 4",
        "num_speculative_tokens",
        "Not supported either: --speculative-model",
    ),
    ("S3-4", "--model m --tensor-parallel-size 2", "tensor_parallel_size", "Leave --tensor-parallel-size out"),
    (
        "S3-5",
        "--model m --num-speculative-decoder-samples 4",
        "num_speculative_decoder_samples",
        "no version of vLLM had it",
    ),
    (
        "S4-23",
        "--model m --enable-lora --lora-modules a=/a b=/b --max-loras 1 --max-lora-rank 16 --lora-extra-vocab-size 256",
        "enable_lora",
        "Not supported either: --lora-modules",
    ),
]


def _check(line: str, settings: dict[str, object]) -> None:
    engine, server = read(*shlex.split(line))
    for name, value in settings.items():
        assert getattr(engine if hasattr(engine, name) else server, name) == value


@pytest.mark.parametrize(("row", "line", "settings"), RUNS, ids=[row for row, *_ in RUNS])
def test_runs(row: str, line: str, settings: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _check(line, settings)
    assert not caplog.records, "flags that do what the guide says need no notice"


@pytest.mark.parametrize(
    ("row", "line", "settings", "notice"), RUNS_WITH_NOTICE, ids=[row for row, *_ in RUNS_WITH_NOTICE]
)
def test_runs_with_notice(
    row: str, line: str, settings: dict[str, object], notice: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _check(line, settings)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(notice)


@pytest.mark.parametrize(("row", "line", "name", "part"), REFUSED, ids=[row for row, *_ in REFUSED])
def test_refused(row: str, line: str, name: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*shlex.split(line))
    assert caught.value.param == name
    assert part in caught.value.message
    assert caught.value.fix, "a refusal says what to do"


def test_speculation_in_python() -> None:
    """S4-4."""
    with pytest.raises(ConfigError, match="vLLM's present flag is --spec-tokens"):
        EngineConfig.from_kwargs(model="m", speculative_model="d", num_speculative_tokens=5)


def test_output_processing_in_python(caplog: pytest.LogCaptureFixture) -> None:
    """S2-15: the value of the guide is vLLM's default."""
    with caplog.at_level(logging.WARNING):
        config = EngineConfig.from_kwargs(max_num_seqs=32, max_num_batched_tokens=4096, disable_async_output_proc=False)
    assert config.max_num_seqs == 32
    assert not caplog.records


def test_deep_gemm_variable(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """S4-31 pairs it with the KV cache's dtype, with which it has nothing to do."""
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    with caplog.at_level(logging.WARNING):
        check_environment()
    assert "VLLM_USE_DEEP_GEMM has no effect: it is about block-FP8 weights on GPUs" in caplog.text
