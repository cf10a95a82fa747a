"""The memory plan: the meaning of each memory setting, and every change that an error advises works."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import demo
from quire.config import EngineConfig
from quire.errors import ConfigError, MemoryPlanError
from quire.formats.kv_format import KV_FORMATS, kv_format
from quire.model_config import ModelConfig, load_model_config
from quire.planning.memory_plan import MemoryFacts, plan_kv_cache, weights_do_not_fit
from quire.resolve import DeviceFacts, resolve, shown_bytes
from quire.settings import Planned

MIB, GIB = 1 << 20, 1 << 30
MODEL = load_model_config(demo.path())
BLOCK = 16 * 2 * 6 * 2 * 64 * 2  # bytes: 16 tokens, K and V, 6 layers, 2 heads of 64, bfloat16
DEVICE = DeviceFacts(
    kind="cpu", name="test", isa="avx2", num_cores=4, total_memory_bytes=8 * GIB, free_memory_bytes=6 * GIB
)
MEMORY = MemoryFacts(
    total_bytes=8 * GIB, free_bytes=6 * GIB, weight_bytes=512 * MIB, work_bytes=200 * MIB, logits_bytes=40 * MIB
)
NEEDED = 2048 // 16  # blocks of one request of the demo model's whole context


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "QUIRE_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def _plan(memory: MemoryFacts = MEMORY, model: ModelConfig = MODEL, **arguments: Any) -> Planned:
    config = EngineConfig.from_kwargs(**arguments)
    resolved = plan_kv_cache(config, model, resolve(config, model, DEVICE, is_server=True), memory)
    assert (
        resolved.memory.kv_cache_bytes
        == resolved.memory.num_blocks
        * resolved.model.block_size
        * model.kv_bytes_per_token(kv_format(resolved.model.kv_cache_dtype, resolved.model.dtype))
    )
    return resolved


def test_block_bytes() -> None:
    assert 16 * MODEL.kv_bytes_per_token(KV_FORMATS["bfloat16"]) == BLOCK


def test_codes_hold_more_tokens_in_the_same_bytes() -> None:
    """float8: exactly twice as many as bfloat16; int8: fewer by its scales, 4 bytes per row of head_dim codes."""
    tokens = {
        kv: _plan(kv_cache_memory_bytes=1000 * BLOCK, kv_cache_dtype=kv).memory.num_blocks * 16
        for kv in ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8")
    }
    assert tokens["auto"] == tokens["bfloat16"] == 16_000
    assert tokens["fp8"] == tokens["fp8_e4m3"] == tokens["fp8_e5m2"] == 32_000
    head_dim = MODEL.kv_specs()[0].head_dim_k
    assert tokens["int8"] == 32_000 * head_dim // (head_dim + 4) // 16 * 16
    detail = _plan(kv_cache_dtype="fp8").settings["kv_cache_dtype"].detail
    assert detail == f"fp8_e4m3: {BLOCK // 32:,} bytes per token, 2.00x the tokens of bfloat16 in the same bytes"


def test_kv_cache_in_another_dtype_than_the_models() -> None:
    with pytest.raises(ConfigError) as caught:
        _plan(kv_cache_dtype="float16")
    assert "runs in bfloat16" in caught.value.message
    assert "auto, fp8, fp8_e4m3, fp8_e5m2, int8" in caught.value.message
    assert _plan(kv_cache_dtype="float16", dtype="float16").model.kv_cache_dtype == "float16"


def test_number_of_blocks() -> None:
    """--num-gpu-blocks-override is taken as it is, above everything else."""
    resolved = _plan(num_gpu_blocks_override=300, kv_cache_memory_bytes=GIB, gpu_memory_utilization=0.5)
    assert resolved.memory.num_blocks == 300


def test_exact_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """--kv-cache-memory-bytes: whole blocks of it, above environment and utilization."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    resolved = _plan(kv_cache_memory_bytes=200 * BLOCK + 5, gpu_memory_utilization=0.5)
    assert resolved.memory.num_blocks == 200
    assert _plan(kv_cache_memory_bytes="64M").memory.num_blocks == 64 * MIB // BLOCK


def test_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_CPU_KVCACHE_SPACE is in GiB, above the utilization, and 0 leaves the choice to us."""
    default = _plan().memory.num_blocks
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1.5")
    assert _plan(gpu_memory_utilization=0.5).memory.num_blocks == 3 * GIB // 2 // BLOCK
    assert _plan().settings["num_blocks"].source == "environment"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")
    assert _plan().memory.num_blocks == default
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "much")
    with pytest.raises(ConfigError, match="VLLM_CPU_KVCACHE_SPACE"):
        _plan()


@pytest.mark.parametrize("share", [0.2, 0.5, 0.6])
def test_utilization_is_a_share_of_total_memory(share: float) -> None:
    """Weights, work and KV cache together take it."""
    resolved = _plan(gpu_memory_utilization=share)
    taken = MEMORY.weight_bytes + MEMORY.work_bytes + resolved.memory.kv_cache_bytes
    assert share * MEMORY.total_bytes - BLOCK < taken <= share * MEMORY.total_bytes


def test_utilization_does_not_take_what_is_not_free() -> None:
    resolved = _plan(gpu_memory_utilization=0.95)
    assert resolved.memory.kv_cache_bytes + MEMORY.work_bytes <= MEMORY.free_bytes - 0.05 * MEMORY.total_bytes
    setting = resolved.settings["num_blocks"]
    assert setting.source == "measured"
    assert "less than --gpu-memory-utilization allows" in setting.detail


def test_default_takes_what_is_useful() -> None:
    """Two full contexts per running request, if that much is free beside the reserve."""
    assert _plan().memory.num_blocks == 2 * 128 * NEEDED
    assert _plan(max_num_seqs=4).memory.num_blocks == 2 * 4 * NEEDED


def test_default_leaves_a_reserve() -> None:
    memory = replace(MEMORY, free_bytes=GIB)
    reserve = MEMORY.work_bytes + int(0.05 * MEMORY.total_bytes)
    assert _plan(memory).memory.num_blocks == (GIB - reserve) // BLOCK


def test_longest_context_that_fits() -> None:
    """max_model_len -1 is cut to the cache, never to nothing, and not touched where all fits."""
    assert _plan(max_model_len=-1, num_gpu_blocks_override=10).model.max_model_len == 160
    assert _plan(max_model_len=-1).model.max_model_len == 2048
    with pytest.raises(MemoryPlanError):
        _plan(max_model_len=-1, kv_cache_memory_bytes=BLOCK - 1)


def test_one_request_fits_exactly() -> None:
    assert _plan(num_gpu_blocks_override=NEEDED).memory.num_blocks == NEEDED
    with pytest.raises(MemoryPlanError):
        _plan(num_gpu_blocks_override=NEEDED - 1)
    assert _plan(num_gpu_blocks_override=NEEDED - 1, max_model_len=2032).memory.num_blocks == NEEDED - 1


def test_the_error_has_the_numbers() -> None:
    with pytest.raises(MemoryPlanError) as caught:
        _plan(kv_cache_memory_bytes=MIB)
    for text in ("2048 tokens", "6.0 MiB needed", "1.0 MiB available", "5.0 MiB missing", "weights 512.0 MiB"):
        assert text in caught.value.message


def _advice(error: MemoryPlanError) -> list[dict[str, Any]]:
    """The advised changes as arguments."""
    assert error.fix is not None
    if not error.fix.startswith("Use one of: "):
        return []
    changes = []
    for item in error.fix.removeprefix("Use one of: ").split("; "):
        flag, value = re.sub(r" \(.*\)", "", item).split()
        name = flag.removeprefix("--").replace("-", "_")
        changes.append({name: int(value) if value.isdigit() else value})
    return changes


def _after(change: dict[str, Any], memory: MemoryFacts, tokens: int) -> MemoryFacts:
    """The machine's measurements at the next start with this change."""
    if "dtype" in change:
        saved = memory.weight_bytes // 2
        return replace(memory, weight_bytes=memory.weight_bytes - saved, free_bytes=memory.free_bytes + saved)
    if "max_num_batched_tokens" in change:
        activations = memory.work_bytes - memory.logits_bytes
        less = activations * change["max_num_batched_tokens"] // tokens
        return replace(memory, work_bytes=memory.logits_bytes + less)
    return memory


SIZES = st.integers(0, 700 * MIB)


@given(
    free=SIZES,
    weights=SIZES,
    activations=SIZES,
    logits=st.integers(0, 50 * MIB),
    arguments=st.fixed_dictionaries(
        {"dtype": st.sampled_from(["float32", "bfloat16"]), "max_num_seqs": st.sampled_from([1, 128])},
        optional={
            "gpu_memory_utilization": st.floats(0.01, 1.0),
            "kv_cache_memory_bytes": st.integers(1, 20 * MIB),
            "num_gpu_blocks_override": st.integers(1, NEEDED),
            "block_size": st.sampled_from([8, 16, 128]),
        },
    ),
)
def test_every_advice_works(free: int, weights: int, activations: int, logits: int, arguments: dict[str, Any]) -> None:
    memory = MemoryFacts(GIB, free, weights, activations + logits, logits)
    try:
        _plan(memory, **arguments)
    except MemoryPlanError as error:
        for change in _advice(error):
            tokens = resolve(
                EngineConfig.from_kwargs(**arguments), MODEL, DEVICE, is_server=True
            ).scheduler.max_num_batched_tokens
            _plan(_after(change, memory, tokens), **arguments | change)


def test_there_is_advice_of_every_kind() -> None:
    """The property above would hold for no advice at all."""
    tight = MemoryFacts(GIB, 300 * MIB, 500 * MIB, 280 * MIB, 10 * MIB)
    seen = set()
    for memory, arguments in (
        (MEMORY, {"kv_cache_memory_bytes": MIB}),
        (MEMORY, {"kv_cache_memory_bytes": 4 * MIB}),
        (MEMORY, {"num_gpu_blocks_override": 5}),
        (tight, {"dtype": "float32", "max_num_batched_tokens": 2048}),
    ):
        with pytest.raises(MemoryPlanError) as caught:
            _plan(memory, **arguments)
        seen |= {name for change in _advice(caught.value) for name in change}
    assert seen == {
        "max_model_len",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
        "dtype",
        "kv_cache_dtype",
        "max_num_batched_tokens",
    }


def test_weights_that_do_not_fit() -> None:
    resolved = resolve(EngineConfig(dtype="float32"), MODEL, DEVICE, is_server=True)
    assert "--dtype bfloat16" in weights_do_not_fit(resolved, 10 * GIB, 8 * GIB).message
    assert "--dtype" not in weights_do_not_fit(resolved, 20 * GIB, 8 * GIB).message


def test_threads_are_performance_cores() -> None:
    for num_efficient, why in (
        (0, "physical cores allowed by affinity and cgroup quota"),
        (8, "performance cores allowed by affinity and cgroup quota, without 8 efficient cores"),
    ):
        resolved = resolve(EngineConfig(), MODEL, replace(DEVICE, num_efficient_cores=num_efficient), is_server=True)
        assert (resolved.device.num_threads, resolved.settings["num_threads"].detail) == (4, why)


@pytest.mark.parametrize(("is_server", "limits"), [(True, (128, 256)), (False, (256, 1024))])
def test_batch_limits(is_server: bool, limits: tuple[int, int]) -> None:
    resolved = resolve(EngineConfig(), MODEL, DEVICE, is_server=is_server)
    assert (resolved.scheduler.max_num_seqs, resolved.scheduler.max_num_batched_tokens) == limits
    assert resolved.settings["max_num_seqs"].is_live
    assert resolved.device.num_threads == 4


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}, "max_num_batched_tokens"),
        ({"max_model_len": 2049}, "max_model_len"),
    ],
)
def test_settings_that_contradict_each_other(arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(EngineConfig(**arguments), MODEL, DEVICE, is_server=True)
    assert caught.value.param == param
    assert caught.value.fix is not None


def test_long_context_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert resolve(EngineConfig(max_model_len=4096), MODEL, DEVICE, is_server=True).model.max_model_len == 4096


def test_shown_bytes() -> None:
    assert [shown_bytes(count) for count in (0, MIB // 2, 3 * GIB // 2)] == ["0.0 MiB", "0.5 MiB", "1.50 GiB"]
