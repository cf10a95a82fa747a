"""The bytes that are printed are the bytes that are taken."""

from __future__ import annotations

import json
import logging

import pytest

from quire import LLM, demo
from quire.errors import MemoryPlanError
from quire.formats.kv_format import kv_format
from quire.model_config import load_model_config
from quire.worker.kv_cache import PagedCache

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


def _cache(llm: LLM) -> PagedCache:
    cache: PagedCache = llm.llm_engine.core.executor.workers[0].runner.cache  # type: ignore[attr-defined]
    return cache


def _stored_bytes() -> int:
    """Of the tensors in the demo model's file, which are all bfloat16."""
    data = (demo.path() / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    return sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in header.values())


# Each format, and a small and a large block.
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "block_size"),
    [
        ("bfloat16", "auto", 8),
        ("float32", "auto", 128),
        ("bfloat16", "fp8", 128),
        ("float32", "fp8_e5m2", 8),
        ("bfloat16", "int8", 128),
        pytest.param("bfloat16", "int8", 8, marks=pytest.mark.slow),
        pytest.param("float32", "auto", 8, marks=pytest.mark.slow),
    ],
)
def test_planned_kv_cache_is_allocated(dtype: str, kv_cache_dtype: str, block_size: int) -> None:
    wanted = (1 << 23) + 12345
    settings = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "block_size": block_size}
    llm = LLM(**settings, kv_cache_memory_bytes=wanted, max_model_len=256, num_threads=1)
    cache = _cache(llm)
    assert cache.num_bytes == llm.resolved.memory.kv_cache_bytes
    (storage,) = {t.untyped_storage().nbytes() for layer in cache.layers for t in layer.tensors()}
    assert storage == sum(t.nbytes for layer in cache.layers for t in layer.tensors()), "all of it is used"
    assert storage == llm.resolved.memory.kv_cache_bytes
    block_bytes = block_size * llm.model_config.kv_bytes_per_token(kv_format(kv_cache_dtype, dtype))
    assert wanted - block_bytes < storage <= wanted
    assert llm.llm_engine.core.scheduler.kv.pool.num_blocks == llm.resolved.memory.num_blocks == storage // block_bytes


def test_weight_bytes_are_the_checkpoints() -> None:
    config = load_model_config(demo.path())
    assert config.weight_bytes("bfloat16") == _stored_bytes()
    assert config.weight_bytes("float32") == 2 * _stored_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weight_bytes_are_what_is_held(dtype: str) -> None:
    """Packing may pad rows to the width of a kernel's tile, no more."""
    llm = LLM(dtype=dtype, kv_cache_memory_bytes=1 << 23, max_model_len=256, num_threads=1)
    held = llm.llm_engine.core.executor.workers[0].runner.model.weight_bytes()  # type: ignore[attr-defined]
    planned = llm.model_config.weight_bytes(dtype)
    assert planned <= held <= 1.05 * planned
    assert llm.resolved.memory.weight_bytes == held, "the plan counts something else"


def test_utilization_is_planned_on_this_machine() -> None:
    """A real start under a share of the machine's memory; pages are taken when they are first written."""
    llm = LLM(gpu_memory_utilization=0.2, num_threads=1)
    setting = llm.resolved.settings["num_blocks"]
    assert setting.source in ("formula", "measured")
    assert _cache(llm).num_bytes == llm.resolved.memory.kv_cache_bytes


def test_more_than_the_system_promises() -> None:
    with pytest.raises(MemoryPlanError, match="--kv-cache-memory-bytes"):
        LLM(kv_cache_memory_bytes=1 << 50, num_threads=1)


def test_more_than_is_free_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.planning.devices.free_memory_bytes", lambda: 1 << 20)
    with caplog.at_level(logging.WARNING):
        LLM(kv_cache_memory_bytes=1 << 23, max_model_len=256, num_threads=1)
    assert "only 1.0 MiB are free" in caplog.text
