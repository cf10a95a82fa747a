"""FlashInfer as a backend: its arguments, on a fake that follows FlashInfer's documentation, against our own reference;
and when it is chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from quire import demo
from quire.attention import flashinfer, select
from quire.attention.backend import AttentionSpec
from quire.attention.flashinfer import FlashInferAttention
from quire.attention.reference import ReferenceAttention
from quire.attention.select import SharedBackends, select_backend
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from quire.forward_batch import ForwardBatch, HostStep, LayerCache, StepTable
from quire.kernels import cpu, gpu
from quire.life_cycle import WorkerSettings
from quire.loader import load
from quire.model_config import load_model_config
from quire.models.form import ModelForm
from quire.models.registry import build_model
from quire.planning import flashinfer_facts
from quire.resolve import DeviceFacts, GpuFacts, resolve
from quire.screen.explain import explain
from quire.settings import Resolved
from quire.worker import worker
from quire.worker.accelerator import Graph
from quire.worker.model_runner import ModelRunner
from tests.attention import fake_flashinfer
from tests.attention.test_backends import SPECS, make_batch
from tests.engine import harness
from tests.engine.harness import Schedule, build_core, run
from tests.engine.test_sameness import prompts
from tests.worker.fake_accelerator import FakeAccelerator

CPU = torch.device("cpu")
MIXED = [(1, 23), (9, 9), (7, 31), (1, 1)]
DECODES = [(1, 23), (1, 16), (1, 1), (1, 17)]
BLOCK_SIZE = 8
GIB = 1 << 30
WITH_GPU = DeviceFacts("cpu", "test", "avx2", 4, 64 * GIB, 60 * GIB, GpuFacts("H100", 90, 80 * GIB, 79 * GIB), "")
MODEL = load_model_config(demo.path())


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("QUIRE_ATTENTION_BACKEND", raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(flashinfer_facts, "find_spec", lambda name: name == "flashinfer" or None)
    monkeypatch.setattr(flashinfer_facts, "version", lambda name: "0.6.14")
    monkeypatch.setattr(flashinfer_facts.shutil, "which", lambda name: "/usr/local/cuda/bin/nvcc")
    yield
    flashinfer._workspace.cache_clear()


def host_step(batch: ForwardBatch, rows: list[tuple[int, int]], padded_rows: int | None = None) -> HostStep:
    """The tables lie in other rows of a worker's tables than in the step, and are wider."""
    count, width = batch.tables[0].block_tables_SM.shape
    tables_CM = np.full((count + 3, width + 2), -7, dtype=np.int32)
    rows_S = np.arange(count)[::-1] + 2
    tables_CM[rows_S, :width] = batch.tables[0].block_tables_SM.numpy()
    query_lens_S, seq_lens_S = np.array(rows).T
    return HostStep(rows_S, query_lens_S, seq_lens_S, tables_CM[None], padded_rows)


@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("name", [name for name in SPECS if not SPECS[name].chunk])
def test_equals_the_reference(name: str, rows: list[tuple[int, int]]) -> None:
    """Unused slots of the cache hold NaN: only the row's own tokens are read."""
    spec = SPECS[name]
    batch, _, _, q_THE = make_batch(spec, BLOCK_SIZE, rows)
    wide = torch.randn(len(q_THE), spec.num_q_heads + 2, spec.head_dim).to(spec.dtype)
    wide[:, 1:-1] = q_THE
    backend = FlashInferAttention(spec)
    backend._has_tensor_cores = True  # groups of any size
    backend.prepare(host_step(batch, rows), batch.caches[0])
    actual = backend.forward(wide[:, 1:-1], batch.caches[0], batch)
    expected = ReferenceAttention(spec).forward(q_THE, batch.caches[0], batch)
    is_exact = spec.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-5 if is_exact else 1e-2, rtol=1e-5 if is_exact else 1e-2)


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_cache_of_codes(codes: torch.dtype) -> None:
    spec = replace(SPECS["grouped"], dtype=torch.float16)
    batch, _, _, q_THE = make_batch(spec, BLOCK_SIZE, MIXED)
    cache = LayerCache(*(x.nan_to_num().to(codes) for x in batch.caches[0].tensors()))
    backend = FlashInferAttention(spec)
    backend.prepare(host_step(batch, MIXED), cache)
    actual = backend.forward(q_THE, cache, batch)
    expected = ReferenceAttention(spec).forward(q_THE, cache, batch)
    torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-3)


def test_one_plan_serves_all_layers_and_each_kind_of_step_has_its_wrapper() -> None:
    spec = SPECS["grouped"]
    backend = FlashInferAttention(spec)
    for rows in (MIXED, DECODES, MIXED, DECODES):
        batch, _, _, q_THE = make_batch(spec, BLOCK_SIZE, rows)
        backend.prepare(host_step(batch, rows), batch.caches[0])
        for _ in range(3):
            backend.forward(q_THE, batch.caches[0], batch)
    assert backend._prefill is not None
    assert backend._decode is not None
    assert (backend._prefill.flashinfer.num_plans, backend._decode.flashinfer.num_plans) == (2, 2)


def test_groups_of_four_and_more_are_decoded_on_tensor_cores() -> None:
    for heads, has_tensor_cores in ((2, False), (6, False), (8, True), (14, True)):
        backend = FlashInferAttention(AttentionSpec(heads, 2, 16, 0.25, 0, 0.0, torch.float16))
        batch, _, _, _ = make_batch(backend._spec, BLOCK_SIZE, DECODES)
        backend.prepare(host_step(batch, DECODES), batch.caches[0])
        assert backend._planned.use_tensor_cores == has_tensor_cores


def test_captured_steps_read_buffers_that_stay() -> None:
    """Padded to eight rows, with other lengths each time; all sizes share scratch."""
    spec = SPECS["window"]
    backend = FlashInferAttention(spec)
    for size, rows in ((8, DECODES), (4, DECODES), (8, [(1, 31), (1, 2)]), (4, DECODES[:1])):
        batch, _, _, q_THE = make_batch(spec, BLOCK_SIZE, rows)
        wide = make_batch(spec, BLOCK_SIZE, [(1, 40)] * len(rows))[0]
        step = host_step(batch, rows, size)
        tables = np.zeros((12, wide.tables[0].block_tables_SM.shape[1]), np.int32)
        tables[:, : step.block_tables_NCM.shape[2] - 2] = 0
        count = batch.tables[0].block_tables_SM.shape[1]
        tables[step.rows_S, :count] = batch.tables[0].block_tables_SM.numpy()
        backend.prepare(replace(step, block_tables_NCM=tables[None]), batch.caches[0])
        padded = torch.cat((q_THE, torch.zeros(size - len(q_THE), *q_THE.shape[1:])))
        actual = backend.forward(padded, batch.caches[0], batch)[: len(q_THE)]
        expected = ReferenceAttention(spec).forward(q_THE, batch.caches[0], batch)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    wrappers = [wrapper.flashinfer for wrapper in backend._captured.values()]
    assert [len(wrapper._buffers[2]) for wrapper in wrappers] == [8, 4]
    assert len({wrapper._buffers[1].data_ptr() for wrapper in wrappers}) == 1
    assert len({wrapper.int_workspace.data_ptr() for wrapper in wrappers}) == 1
    assert [wrapper.num_plans for wrapper in wrappers] == [2, 2]


def assert_replays_follow_plans(
    spec: AttentionSpec, device: torch.device, capture: Callable[[Callable[[], None]], Graph], tolerance: float
) -> None:
    """Sizes are captured without rows, the largest first, as StepGraphs does; then each replay computes the step that
    was planned before it: other rows, lengths and queries, at the same addresses."""
    batch, _, _, _ = make_batch(spec, BLOCK_SIZE, [(1, 40), (1, 33), (1, 40), (1, 17)])
    tables_CM = np.pad(batch.tables[0].block_tables_SM.numpy(), ((3, 0), (0, 2)), constant_values=-7)
    cache = LayerCache(*(tensor.nan_to_num().to(device) for tensor in batch.caches[0].tensors()))
    backend, captured = FlashInferAttention(spec), {}
    nothing = np.zeros(0, np.int64)
    for size in (8, 4):
        q_THE = torch.zeros(size, spec.num_q_heads, spec.head_dim, dtype=spec.dtype, device=device)
        out_THE = torch.empty_like(q_THE)
        forward = partial(backend.forward, q_THE, cache, batch)
        backend.prepare(HostStep(nothing, nothing, nothing, tables_CM[None], size), cache)
        forward()
        captured[size] = q_THE, out_THE, capture(lambda out=out_THE, run=forward: out.copy_(run()))
    generator = torch.Generator().manual_seed(3)
    for size, rows, lens in (
        (8, [0, 1, 2, 3], [40, 33, 2, 17]),
        (4, [2], [9]),
        (8, [3, 0], [1, 39]),
        (4, [1, 3, 0, 2], [8, 16, 31, 40]),
        (8, [0], [40]),
    ):
        q_THE, out_THE, graph = captured[size]
        queries_SHE = torch.randn(len(rows), *q_THE.shape[1:], generator=generator).to(spec.dtype)
        q_THE.zero_()
        q_THE[: len(rows)].copy_(queries_SHE)
        backend.prepare(HostStep(np.array(rows) + 3, np.ones_like(rows), np.array(lens), tables_CM[None], size), cache)
        graph.replay()
        step = replace(
            batch,
            cu_seqlens_q_S1=torch.arange(len(rows) + 1, dtype=torch.int32),
            seq_lens_S=torch.tensor(lens, dtype=torch.int32),
            tables=(StepTable(batch.token_ids_T, batch.tables[0].block_tables_SM[rows]),),
        )
        want_SHE = ReferenceAttention(spec).forward(queries_SHE, batch.caches[0], step)
        torch.testing.assert_close(out_THE[: len(rows)].cpu(), want_SHE, atol=tolerance, rtol=tolerance)


@dataclass
class RunsAgain:
    """Stands for a graph."""

    replay: Callable[[], None]


@pytest.mark.parametrize("name", ["grouped", "window", "soft-cap"])
def test_replays_follow_plans(name: str) -> None:
    """What test_on_a_gpu.py asks of FlashInfer itself."""
    assert_replays_follow_plans(SPECS[name], CPU, RunsAgain, 1e-5)


def planned_bytes(heads: int, kv_heads: int, head_dim: int, num_sms: int, rows: int, tile: int) -> int:
    """The scratch memory that FlashInfer 0.6.14's planner needs: captured (a tile holds one token's heads), or split
    over the GPU.
    """
    tiles = -(-rows * (heads // kv_heads) // tile) + rows - 1 if rows else 2 * num_sms // kv_heads
    return 4 * heads * max(tiles, 2 * num_sms // kv_heads) * tile * (head_dim + 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(32, 8, 128), (40, 8, 128), (64, 8, 128), (16, 2, 128), (96, 8, 128), (64, 2, 128)],
)
def test_scratch_holds_what_the_planner_asks_for(heads: int, kv_heads: int, head_dim: int) -> None:
    """64 heads of 128 dimensions in a graph of 256 rows take more than the recommended 128 MiB."""
    spec = AttentionSpec(heads, kv_heads, head_dim, 0.1, 0, 0.0, torch.bfloat16)
    for num_sms in (108, 132, 188):
        assert flashinfer.split_bytes(spec, num_sms) >= planned_bytes(heads, kv_heads, head_dim, num_sms, 0, 128)
        for rows in (1, 24, 256):
            tile = 16 if heads // kv_heads <= 16 else 64
            wanted = planned_bytes(heads, kv_heads, head_dim, num_sms, rows, tile)
            assert flashinfer.split_bytes(spec, num_sms, rows) >= wanted
    assert planned_bytes(64, 8, 128, 132, 256, 16) > 128 << 20 > planned_bytes(32, 8, 128, 132, 256, 16)


def test_a_plan_waits_until_the_one_before_is_copied() -> None:
    """Its numbers pass through pinned memory, which a GPU reads later."""
    events: list[str] = []
    copied = type("Event", (), {"synchronize": lambda self: events.append("waited")})()
    plan = type("Plan", (), {"plan": lambda self: events.append("planned")})()
    wrapper = flashinfer._Wrapper(plan, copied)
    wrapper.plan(CPU)
    assert events == ["waited", "planned"]


def test_the_engine_gives_the_cpu_s_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decodes, padded graphs, two steps in flight, in float32, which the fake computes."""
    want = run(build_core(Schedule(), "float32"), prompts())
    with monkeypatch.context() as patch:
        patch.setattr(FlashInferAttention, "unsupported", staticmethod(lambda spec, device: None))
        kinds: set[type] = set()
        forward = FlashInferAttention.forward
        patch.setattr(
            FlashInferAttention, "forward", lambda self, *a: (kinds.add(type(self._planned)), forward(self, *a))[1]
        )
        patch.setitem(select._BACKENDS, "auto", FlashInferAttention)
        harness.demo_model.cache_clear()  # it is loaded for another backend
        accelerator = FakeAccelerator()
        schedule = Schedule(chunk=17, depth=2, accelerator=accelerator, graph_sizes=(1, 2, 4, 8))
        try:
            core = build_core(schedule, "float32")
            assert isinstance(core.executor, ModelRunner)
            assert run(core, prompts()) == want
        finally:
            harness.demo_model.cache_clear()
    assert sum(graph.num_replays for graph in accelerator.graphs) > 10
    assert kinds == {
        fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        fake_flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    }


def settings(device: DeviceFacts = WITH_GPU, **arguments: Any) -> Resolved:
    model = load_model_config(demo.path(), {"head_dim": arguments.pop("head_dim", 128)})
    return resolve(EngineConfig.from_kwargs(**arguments), model, device, is_server=True)


def test_it_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings say why it is not chosen by itself, and where it is named, why it cannot be."""
    own = settings().settings["attention_backend"]
    assert (own.value, own.source) == ("TRITON_ATTN", "device")
    assert "FlashInfer 0.6.14 takes this model too, but no GPU has shown which is faster" in own.detail
    text = explain(
        "demo", EngineConfig(), ServerConfig(), load_model_config(demo.path(), {"head_dim": 128}), WITH_GPU
    ).text()
    assert f"why     {own.detail}" in text
    chosen = settings(attention_backend="flashinfer").settings["attention_backend"]
    assert (chosen.value, chosen.source) == ("FLASHINFER", "argument")
    assert "0.6.14 is installed" in chosen.detail
    for arguments, why in (
        ({"head_dim": 96}, "takes heads of 64, 128, 256 dimensions, not 96"),
        ({"dtype": "float32"}, "takes bfloat16 and float16, not float32"),
        ({"kv_cache_dtype": "int8"}, "does not read a KV cache of int8"),
        ({"deterministic": True}, "--deterministic is set"),
        ({"model_impl": "transformers"}, "transformers' modelling code"),
    ):
        plain = settings(**arguments).settings["attention_backend"]
        assert plain.value == "TRITON_ATTN"
        assert why in plain.detail
        with pytest.raises(ConfigError, match=f"FlashInfer cannot be used: .*{why}"):
            settings(attention_backend="flashinfer", **arguments)
    assert settings(kv_cache_dtype="fp8", attention_backend="FLASHINFER").device.attention_backend == "FLASHINFER"
    mode = settings(attention_backend="FLASHINFER").settings["cudagraph_mode"]
    assert mode.value == "FULL_DECODE_ONLY"
    assert "FlashInfer's kernels for mixed steps are not captured" in mode.detail
    monkeypatch.setattr(flashinfer_facts.shutil, "which", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert "nvcc" in settings().settings["attention_backend"].detail
    monkeypatch.setattr(flashinfer_facts, "find_spec", lambda name: None)
    assert "not FlashInfer: it is not installed" in settings().settings["attention_backend"].detail
    with pytest.raises(ConfigError, match="FlashInfer cannot be used: it is not installed"):
        settings(attention_backend="FLASHINFER")


@pytest.mark.parametrize("name", ["flashinfer", "FLASHINFER", "FlashInfer"])
def test_the_environment_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same checks; a flag comes first."""
    monkeypatch.setenv("QUIRE_ATTENTION_BACKEND", name)
    resolved = settings()
    chosen = resolved.settings["attention_backend"]
    assert (chosen.value, chosen.source) == ("FLASHINFER", "environment")
    assert resolved.device.cudagraph_mode == "FULL_DECODE_ONLY"
    with pytest.raises(ConfigError, match=r"does not read a KV cache of int8.*Unset QUIRE_ATTENTION_BACKEND"):
        settings(kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match=r"the model on the CPU.*Unset QUIRE_ATTENTION_BACKEND"):
        settings(replace(WITH_GPU, gpu=None))
    assert settings(attention_backend="TRITON_ATTN", kv_cache_dtype="int8").device.attention_backend == "TRITON_ATTN"


def test_other_names_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = replace(WITH_GPU, gpu=None)
    for name, device, value in (
        ("triton", WITH_GPU, "TRITON_ATTN"),
        ("CPU_ATTN", on_cpu, "CPU_ATTN"),
        ("cpu", on_cpu, "CPU_ATTN"),
    ):
        monkeypatch.setenv("QUIRE_ATTENTION_BACKEND", name)
        chosen = settings(device).settings["attention_backend"]
        assert (chosen.value, chosen.source) == (value, "environment")
    monkeypatch.setenv("QUIRE_ATTENTION_BACKEND", "flash")
    with pytest.raises(ConfigError, match=r"'flash'.*one of auto, flashinfer, triton_attn, cpu_attn, triton, cpu, ref"):
        settings()


def test_the_reference_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ATTENTION_BACKEND", "reference")
    mode = settings().settings["cudagraph_mode"]
    assert (mode.value, mode.source) == ("NONE", "environment")
    assert "the reference attention waits for the device" in mode.detail


def test_an_installation_that_does_not_work_names_the_other_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether loading fails or the build of its kernels, which its first plan does; later errors stay as they are."""

    def fails(*arguments: Any, **settings: Any) -> None:
        raise RuntimeError("Ninja build failed")

    spec = SPECS["grouped"]
    backend = FlashInferAttention(spec)
    batch, _, _, _ = make_batch(spec, BLOCK_SIZE, MIXED)
    step = host_step(batch, MIXED)
    with monkeypatch.context() as patch:
        patch.setattr(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan", fails)
        with pytest.raises(ConfigError, match=r"Ninja build failed.*--attention-backend TRITON_ATTN"):
            backend.prepare(step, batch.caches[0])
    backend.prepare(step, batch.caches[0])
    monkeypatch.setattr(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan", fails)
    with pytest.raises(RuntimeError, match=r"^Ninja build failed"):
        backend.prepare(step, batch.caches[0])
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"cannot be loaded.*--attention-backend TRITON_ATTN"):
        FlashInferAttention(spec)


def test_a_model_knows_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the settings to the layers' specs: the layers refuse the same shapes as the settings."""
    monkeypatch.setattr(gpu, "serves", lambda device: True)
    build_model(MODEL, ModelForm(torch.bfloat16, None, CPU, "FLASHINFER", torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match="does not read a KV cache of int8"):
        build_model(MODEL, ModelForm(torch.bfloat16, None, CPU, "FLASHINFER", torch.int8))

    def build(config: Any, form: ModelForm, **sharing: Any) -> Any:
        raise InterruptedError(form.cache_dtype)

    monkeypatch.setattr(load, "build_model", build)
    for name, dtype in (("auto", torch.bfloat16), ("fp8_e5m2", torch.float8_e5m2), ("int8", torch.int8)):
        config = EngineConfig.from_kwargs(device="cpu", load_format="dummy", kv_cache_dtype=name, dtype="bfloat16")
        told = WorkerSettings.of(resolve(config, MODEL, WITH_GPU, is_server=True))
        with pytest.raises(InterruptedError, match=str(dtype)):
            worker.DeviceWorker(MODEL, lambda phase, share, detail: None).load(told)


def test_names() -> None:
    on_cpu = replace(WITH_GPU, gpu=None)
    assert settings(attention_backend="triton_attn").device.attention_backend == "TRITON_ATTN"
    assert settings(on_cpu).device.attention_backend == "auto"
    assert settings(on_cpu, attention_backend="CPU_ATTN").device.attention_backend == "CPU_ATTN"
    with pytest.raises(ConfigError, match="TRITON_ATTN does not run on cpu"):
        settings(on_cpu, attention_backend="TRITON_ATTN")
    with pytest.raises(ConfigError, match="it runs on CUDA, and the model on the CPU"):
        settings(on_cpu, attention_backend="FLASHINFER")
    with pytest.raises(ConfigError, match="there are FlashInfer and our own kernels"):
        EngineConfig.from_kwargs(attention_backend="FLASH_ATTN")
    text = explain("demo", EngineConfig(attention_backend="TRITON_ATTN"), ServerConfig(), MODEL, WITH_GPU).text()
    assert "attention_backend TRITON_ATTN [argument]" in " ".join(text.split())


def test_select(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its names only; the settings give the reasons."""
    spec = AttentionSpec(8, 2, 128, 0.1, 0, 0.0, torch.bfloat16)
    cuda = torch.device("cuda")
    for name in ("FLASHINFER", "TRITON_ATTN", "auto", "reference"):
        assert select_backend(spec, cuda, name).name == name
    with pytest.raises(ConfigError, match="it runs on CUDA, not on cpu"):
        select_backend(spec, CPU, "FLASHINFER")
    with pytest.raises(ConfigError, match="heads of 64, 128, 256 dimensions, not 80"):
        select_backend(replace(spec, head_dim=80), cuda, "FLASHINFER")
    with pytest.raises(ConfigError, match="our attention with chunks and sinks does not run on it"):
        select_backend(replace(spec, chunk=64, has_sinks=True), cuda, "FLASHINFER")
    assert select_backend(replace(spec, cache_dtype=torch.float8_e5m2), cuda, "FLASHINFER").name == "FLASHINFER"
    with pytest.raises(ConfigError, match="does not read a KV cache of int8"):
        select_backend(replace(spec, cache_dtype=torch.int8), cuda, "FLASHINFER")
    with pytest.raises(ConfigError, match="does not read a KV cache of int8"):
        SharedBackends([0], cuda, "FLASHINFER", torch.int8).get(0, spec)
    monkeypatch.setattr(gpu, "_is_deterministic", True)
    with pytest.raises(ConfigError, match="--deterministic is set"):
        select_backend(spec, cuda, "FLASHINFER")
    monkeypatch.setattr(cpu, "_available", True)
    assert select_backend(spec, CPU, "CPU_ATTN").name == "CPU_ATTN"
