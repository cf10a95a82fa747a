"""The settings of adapters: what is chosen, what does not go together, and how adapters are named."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from quire import demo
from quire.config import EngineConfig
from quire.errors import ConfigError, InvalidRequestError, MemoryPlanError
from quire.life_cycle import WorkerSettings
from quire.lora.modules import LoraModule, check_name, parse_module
from quire.model_config import load_model_config
from quire.planning.memory_plan import MemoryFacts, plan_kv_cache
from quire.resolve import DeviceFacts, resolve
from quire.settings import LoraSettings, Resolved

MODEL = load_model_config(demo.path())
FACTS = DeviceFacts("cpu", "test", "avx2", 4, 8 << 30, 6 << 30)


def resolved(**arguments: object) -> Resolved:
    return resolve(EngineConfig.from_kwargs(**arguments), MODEL, FACTS, is_server=True)


def test_without_adapters_there_are_no_settings() -> None:
    assert resolved().lora is None
    assert resolved().settings["max_loras"].value is None
    assert WorkerSettings.of(resolved()).lora is None


def test_as_many_as_there_are_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = ["a=./a", "b=./b"]
    lora = resolved(enable_lora=True, lora_modules=modules).lora
    assert lora == LoraSettings(max_loras=2, max_rank=16, max_cpu_loras=2, dtype=MODEL.dtype)
    assert resolved(enable_lora=True).lora == replace(lora, max_loras=8, max_cpu_loras=8), "LLM(...) names them later"
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    settled = resolved(enable_lora=True, lora_modules=modules)
    assert settled.lora == replace(lora, max_loras=8, max_cpu_loras=8)
    assert settled.settings["max_loras"].detail == "adapters may be loaded later"


def test_given_numbers() -> None:
    lora = resolved(
        enable_lora=True, max_loras=3, max_cpu_loras=9, max_lora_rank=64, lora_dtype="float32", dtype="bfloat16"
    )
    assert lora.lora == LoraSettings(3, 64, 9, "float32")
    assert WorkerSettings.of(lora).lora == lora.lora
    memory = MemoryFacts(8 << 30, 6 << 30, 1 << 29, 1 << 28)
    assert plan_kv_cache(EngineConfig(), MODEL, lora, memory).lora == lora.lora
    few = resolved(enable_lora=True, max_cpu_loras=4).lora
    assert few is not None
    assert few.max_loras == 4, "a step holds no more than memory does"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"enable_lora": True, "max_lora_rank": 24}, "Got 24. Expected one of 1, 8, 16, 32, 64, 128, 256, 320, 512"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "at least max_loras = 4"),
        ({"enable_lora": True, "max_loras": 0}, "Expected a positive number"),
        ({"enable_lora": True, "lora_dtype": "int8"}, "Expected one of auto, bfloat16"),
        ({"lora_modules": ["a=b"]}, "Give --enable-lora too"),
        ({"enable_lora": True, "lora_modules": ["a=b", "a=c"]}, "Two adapters have one name. Got 'a'"),
        ({"enable_lora": True, "lora_modules": ["a"]}, "Expected name=path"),
        ({"enable_lora": True, "lora_modules": ['{"name": "a"}']}, "Expected name=path"),
        ({"enable_lora": True, "lora_modules": ['{"name": "a", "path": "b", "rank": 2}']}, "Expected name=path"),
        ({"enable_lora": True, "lora_modules": ["a b=c"]}, "Expected name=path"),
        ({"enable_lora": True, "model_impl": "transformers"}, "Merge the adapter into the model"),
    ],
)
def test_what_does_not_go_together(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolved(**arguments)


def test_settings_without_the_switch_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolved(max_loras=4)
    assert "max_loras has no effect without enable_lora" in caplog.text


def test_names() -> None:
    assert parse_module("org/sql=./a=b") == LoraModule("org/sql", "./a=b")
    as_json = parse_module('{"name": "sql", "path": "/p", "base_model_name": "base"}')
    assert as_json == LoraModule("sql", "/p", "base")
    for name in ("", " a", "a b", "a,b", "a\n", "a\0", "../a", "x" * 201, "é"):
        with pytest.raises(InvalidRequestError, match="An adapter cannot have this name"):
            check_name(name, "lora_name")


@pytest.mark.parametrize(
    ("most", "in_memory", "advice"), [(2, 9, "--max-cpu-loras [1-8] "), (9, 9, "--max-loras [1-8] --max")]
)
def test_too_little_memory_names_the_adapters(most: int, in_memory: int, advice: str) -> None:
    """A smaller step would not help, and what is advised does."""
    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": most,
        "max_cpu_loras": in_memory,
        "max_lora_rank": 512,
    }
    config, lora = EngineConfig(**arguments), resolved(**arguments)
    assert lora.lora is not None
    num_bytes = lora.lora.num_bytes(MODEL)
    memory = MemoryFacts(
        8 << 30, num_bytes + (400 << 20), 1 << 24, num_bytes + (1 << 24), 1 << 20, lora_bytes=num_bytes
    )
    with pytest.raises(MemoryPlanError, match=advice) as error:
        plan_kv_cache(config, MODEL, lora, memory)
    assert "--max-num-batched-tokens" not in error.value.message
    words = error.value.message[error.value.message.index("--max-") :].split()
    given = {"max_loras": int(words[1])} if words[0] == "--max-loras" else {}
    fewer = arguments | given | {"max_cpu_loras": int(words[words.index("--max-cpu-loras") + 1])}
    less = resolved(**fewer)
    assert less.lora is not None
    saved = num_bytes - less.lora.num_bytes(MODEL)
    facts = replace(memory, work_bytes=memory.work_bytes - saved, lora_bytes=num_bytes - saved)
    assert plan_kv_cache(EngineConfig(**fewer), MODEL, less, facts).memory.num_blocks > 0
