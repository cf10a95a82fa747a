"""A start on a fake GPU: the measurements, their order, and the KV cache's part of the rest."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from quire import demo
from quire.config import EngineConfig
from quire.engine.bring_up import RunningWorkers
from quire.engine.bring_up import bring_up as bring_up_workers
from quire.engine.core import EngineCore
from quire.errors import MemoryPlanError
from quire.life_cycle import WorkerSettings
from quire.messages import AddRequest
from quire.model_config import load_model_config
from quire.planning.memory_plan import KvPages
from quire.resolve import DeviceFacts, GpuFacts, resolve
from quire.sampling_params import SamplingParams
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.kv_cache_manager import KVCacheManager
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler
from quire.worker import gpu_memory, kv_cache
from quire.worker import worker as worker_module
from quire.worker.cuda_graphs import paddings
from quire.worker.model_runner import ModelRunner
from quire.worker.worker import DeviceWorker
from tests.engine.harness import demo_model
from tests.worker.fake_accelerator import FakeAccelerator

MIB, GIB = 1 << 20, 1 << 30
GPU = GpuFacts("fake", 90, GIB, GIB)
FACTS = DeviceFacts("cpu", "test", "avx2", 4, 8 * GIB, 8 * GIB, GPU)


MODEL = load_model_config(demo.path())


def config_for(**arguments: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(**{"max_num_seqs": 24, "max_num_batched_tokens": 96} | arguments)


def settings_for(**arguments: Any) -> WorkerSettings:
    return WorkerSettings.of(resolve(config_for(**arguments), MODEL, FACTS, is_server=True))


class GpuWorker(DeviceWorker):
    """Finds a GPU that is not there."""

    def facts(self, wants_gpu: bool) -> DeviceFacts:
        return FACTS


@pytest.fixture(autouse=True)
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "load_model", lambda *arguments, **named: demo_model("bfloat16", None)[1])


def bring_up(accelerator: FakeAccelerator, **arguments: Any) -> tuple[DeviceWorker, RunningWorkers]:
    def ignore(phase: str, share: float, detail: str) -> None: ...

    worker = GpuWorker(MODEL, ignore, lambda: accelerator)
    return worker, bring_up_workers(config_for(**arguments), MODEL, [worker], is_server=True, progress=ignore)


@pytest.mark.parametrize(
    ("arguments", "lens"),
    [
        ({}, [4] * 24),
        ({"max_num_batched_tokens": 100}, [4] * 20 + [5] * 4),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 96, "max_model_len": 32}, [32, 32]),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 2048}, [2048]),
    ],
)
def test_the_largest_step(arguments: dict[str, Any], lens: list[int]) -> None:
    """The whole budget where the rows can use it, over as many rows as may run. All of them sample."""
    batch = gpu_memory.largest_batch(settings_for(**arguments), 1)
    assert batch.num_scheduled_tokens == lens
    assert [len(row.token_ids) for row in batch.new_rows] == lens
    assert all(set(row.block_ids) == {0} for row in batch.new_rows), "the cache has one block"


def test_what_is_measured() -> None:
    """Of the graphs, the first brings the scratch memory, and each further one takes as much as the second."""
    accelerator = FakeAccelerator(free_bytes=[1000 * MIB, 900 * MIB, 890 * MIB], peak_bytes=77 * MIB)
    settings = settings_for()
    _, model = demo_model("bfloat16", None)
    cache = kv_cache.allocate_for(MODEL, settings.model, 1, accelerator.device)
    work = gpu_memory.measure_work(model, cache, settings, accelerator, settings.model.max_model_len)
    assert work.step_bytes == 77 * MIB
    assert work.graph_bytes == 100 * MIB + 10 * MIB * (len(paddings(settings)) - 1)
    assert work.largest_step[0] == 96
    assert len(accelerator.graphs) == 2


def test_what_is_measured_is_not_given_to_the_cache() -> None:
    free = [500 * MIB, 400 * MIB, 390 * MIB, 480 * MIB]  # before graphs, after each of two, and when all is given back
    accelerator = FakeAccelerator(total_bytes=GIB, free_bytes=free, peak_bytes=60 * MIB)
    worker, running = bring_up(accelerator, gpu_memory_utilization=0.25)
    resolved = running.resolved
    work = 60 * MIB + 100 * MIB + 10 * MIB * (len(paddings(WorkerSettings.of(resolved))) - 1)
    assert resolved.memory.work_bytes == work
    assert "in a step of 96 tokens" in resolved.settings["work_bytes"].detail
    block = KvPages.of(resolved, MODEL).page_bytes
    weights = worker.runner.model.weight_bytes()
    assert resolved.memory.num_blocks == (int(0.25 * GIB) - weights - work) // block
    assert resolved.memory.unplanned_bytes == 480 * MIB - resolved.memory.kv_cache_bytes - work
    assert worker.runner.cache.num_bytes == resolved.memory.kv_cache_bytes


def test_too_little_memory() -> None:
    free = [500 * MIB, 400 * MIB, 390 * MIB, 120 * MIB]
    accelerator = FakeAccelerator(total_bytes=GIB, free_bytes=free, peak_bytes=60 * MIB)
    with pytest.raises(MemoryPlanError, match="does not fit"):
        bring_up(accelerator)


def test_a_refused_cache_names_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = kv_cache.allocate

    def refuse(groups: Any, num_pages: int, *rest: Any) -> Any:
        if num_pages > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 70.00 GiB")
        return allocate(groups, num_pages, *rest)

    monkeypatch.setattr(kv_cache, "allocate", refuse)
    with pytest.raises(MemoryPlanError, match=r"refuses .* Lower .*--gpu-memory-utilization"):
        bring_up(FakeAccelerator(), num_gpu_blocks_override=200)


@pytest.mark.parametrize(
    "arguments", [{}, {"enforce_eager": True}, {"async_scheduling": False}, {"max_num_batched_tokens": 24}], ids=str
)
def test_what_comes_up_serves(arguments: dict[str, Any]) -> None:
    accelerator = FakeAccelerator(free_bytes=[900 * MIB])
    worker, running = bring_up(accelerator, num_gpu_blocks_override=200, **arguments)
    runner, resolved = worker.runner, running.resolved
    assert isinstance(runner, ModelRunner)
    assert (runner.forward_pass.captured is None) == (resolved.device.cudagraph_mode == "NONE")
    core = core_of(running)
    for index in range(30):
        params = SamplingParams(temperature=0.0, max_tokens=9)
        core.add(AddRequest(f"r{index}", [5 + index, 7, 9], params, 9))
    counts: dict[str, int] = {}
    while core.has_work():
        for delta in core.step():
            assert delta.error is None
            counts[delta.request_id] = counts.get(delta.request_id, 0) + len(delta.token_ids)
    assert set(counts.values()) == {9}
    assert len(counts) == 30


def core_of(running: RunningWorkers) -> EngineCore:
    resolved = running.resolved
    kv = KVCacheManager(BlockPool(resolved.memory.num_blocks, resolved.model.block_size), enable_prefix_caching=True)
    budget = resolved.scheduler.max_num_batched_tokens
    limits = SchedulerLimits(max_num_seqs=24, max_num_batched_tokens=budget, max_model_len=resolved.model.max_model_len)
    return EngineCore(Scheduler(limits, kv), running.executor, depth=resolved.scheduler.depth)


def test_an_engine_that_nobody_holds_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, cache and graphs; the next engine in this process needs the room."""
    monkeypatch.setitem(globals(), "demo_model", demo_model.__wrapped__)  # a model that no other test holds
    accelerator = FakeAccelerator(free_bytes=[900 * MIB])
    worker, running = bring_up(accelerator, num_gpu_blocks_override=200)
    runner = worker.runner
    assert isinstance(runner, ModelRunner)
    core = core_of(running)
    core.add(AddRequest("r", [5, 7, 9], SamplingParams(temperature=0.0, max_tokens=9), 9))
    while core.has_work():
        core.step()
    owners = (core, running, worker, runner, runner.forward_pass.captured, runner.model, runner.cache.pages)
    alive = [weakref.ref(each) for each in owners]
    del accelerator, worker, running, runner, core, owners
    gc.collect()
    assert [each() for each in alive] == [None] * len(alive)
