"""A start names environment variables of vLLM and Quire that it does not read, misspelt ones with the nearest name."""

from __future__ import annotations

import logging

import pytest

from quire import envs
from quire.compat.environment import NOT_READ, REFUSED, check_environment
from quire.errors import ConfigError

# vLLM's documented variables that matter to an operator.
DOCUMENTED = [
    "VLLM_ENGINE_READY_TIMEOUT_S",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    "VLLM_LOGGING_LEVEL",
    "VLLM_LOG_STATS_INTERVAL",
    "VLLM_LOGGING_CONFIG_PATH",
    "VLLM_CONFIGURE_LOGGING",
    "VLLM_API_KEY",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_LORA_RESOLVER_CACHE_DIR",
    "VLLM_PLUGINS",
    "VLLM_CACHE_ROOT",
    "VLLM_HOST_IP",
    "VLLM_PORT",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_CPU_NUM_OF_RESERVED_CPU",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
    "VLLM_ENABLE_STARTUP_PLAN",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
    "VLLM_MAX_N_SEQUENCES",
    "VLLM_COMPUTE_NANS_IN_LOGITS",
    "VLLM_NO_USAGE_STATS",
    "VLLM_USE_MODELSCOPE",
    "VLLM_USE_RUST_FRONTEND",
    "VLLM_USE_RUST_BENCH",
]
READ = {variable.name for variable in envs.VARIABLES}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(("VLLM_", "QUIRE_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_variable_of_vllm_is_decided(name: str) -> None:
    assert name in READ | NOT_READ.keys() | REFUSED.keys()


def test_none_is_both_read_and_not() -> None:
    assert not READ & (NOT_READ.keys() | REFUSED.keys())


def test_read_variables_need_no_notice(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in READ:
        monkeypatch.setenv(name, "1")
    with caplog.at_level(logging.WARNING):
        check_environment(is_strict=True)
    assert not caplog.records


def test_notice(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASH_ATTN")
    monkeypatch.setenv("VLLM_CPU_KV_CACHE_SPACE", "4")
    monkeypatch.setenv("VLLM_NO_SUCH_THING_AT_ALL", "4")
    with caplog.at_level(logging.WARNING):
        check_environment()
    first, second, third = [record.getMessage() for record in caplog.records]
    assert first.startswith("VLLM_ATTENTION_BACKEND has no effect: ")
    assert second == "VLLM_CPU_KV_CACHE_SPACE is not read by Quire. Did you mean VLLM_CPU_KVCACHE_SPACE?"
    assert third == "VLLM_NO_SUCH_THING_AT_ALL is not read by Quire. Unset it"


def test_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_NUM_THREAD", "4")
    with pytest.raises(ConfigError, match=r"Did you mean QUIRE_NUM_THREADS\?") as caught:
        check_environment(is_strict=True)
    assert caught.value.param == "QUIRE_NUM_THREAD"


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "0")
    check_environment()
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(ConfigError, match="models come from the Hugging Face hub"):
        check_environment()
