"""The device of a model, and the settings that follow from it, on a GPU that is only described."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import demo
from quire.config import EngineConfig, ServerConfig
from quire.engine.start import start_engine
from quire.errors import ConfigError, MemoryPlanError
from quire.kernels import gpu, gpu_facts
from quire.model_config import load_model_config
from quire.planning import devices
from quire.planning.memory_plan import MemoryFacts, plan_kv_cache
from quire.resolve import NEVER_RUN, DeviceFacts, GpuFacts, resolve
from quire.screen.explain import explain
from quire.settings import Planned, Resolved

GIB = 1 << 30
MODEL = load_model_config(demo.path())
H100 = GpuFacts("NVIDIA H100 80GB HBM3", 90, 80 * GIB, 79 * GIB)
L4 = GpuFacts("NVIDIA L4", 89, 24 * GIB, 23 * GIB)
CPU = DeviceFacts("cpu", "test", "avx2", 4, 64 * GIB, 60 * GIB, no_gpu="torch finds no GPU of NVIDIA")
WITH_H100 = replace(CPU, gpu=H100, no_gpu="")


def settings(device: DeviceFacts = WITH_H100, is_server: bool = True, model: Any = MODEL, **arguments: Any) -> Resolved:
    return resolve(EngineConfig.from_kwargs(**arguments), model, device, is_server=is_server)


def test_auto_is_the_gpu_if_there_is_one() -> None:
    assert (settings().device.device, settings(CPU).device.device) == ("cuda", "cpu")
    assert settings().settings["device"].detail == f"{H100.name}; {NEVER_RUN}"
    assert settings(CPU).settings["device"].detail == "torch finds no GPU of NVIDIA"
    assert settings(CPU).settings["device"].source == "device"
    chosen = resolve(EngineConfig.from_kwargs(device="cuda"), MODEL, WITH_H100, is_server=True).settings["device"]
    assert (chosen.value, chosen.source) == ("cuda", "argument")
    assert chosen.detail == f"there is {H100.name}; {NEVER_RUN}"


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="There is no GPU that can be used: torch finds no GPU of NVIDIA"):
        resolve(EngineConfig(device="cuda"), MODEL, CPU, is_server=True)
    with pytest.raises(ConfigError, match="tpu"):
        EngineConfig(device="tpu")


def test_the_cpu_beside_a_gpu_is_the_cpu_without_one() -> None:
    beside = resolve(EngineConfig(device="cpu"), MODEL, WITH_H100, is_server=True).settings
    alone = resolve(EngineConfig(device="cpu"), MODEL, CPU, is_server=True).settings
    assert beside.pop("device").detail == f"there is {H100.name}"
    alone.pop("device")
    assert beside == alone


@pytest.mark.parametrize(
    ("gpu", "is_server", "limits"),
    [(H100, True, (1024, 8192)), (H100, False, (1024, 16384)), (L4, True, (256, 2048)), (L4, False, (256, 8192))],
)
def test_limits_are_those_of_vllm(gpu: GpuFacts, is_server: bool, limits: tuple[int, int]) -> None:
    resolved = settings(replace(CPU, gpu=gpu), is_server)
    assert (resolved.scheduler.max_num_seqs, resolved.scheduler.max_num_batched_tokens) == limits


def test_what_a_gpu_is_good_at() -> None:
    resolved = settings()
    assert (resolved.device.isa, resolved.scheduler.async_scheduling, resolved.device.gpu_memory_utilization) == (
        "sm_90",
        True,
        0.9,
    )
    assert settings(model=replace(MODEL, dtype="float32")).model.dtype == "bfloat16"
    assert settings(CPU, model=replace(MODEL, dtype="float32")).model.dtype == "float32"
    assert settings(model=replace(MODEL, dtype="float16")).model.dtype == "float16"
    assert settings(dtype="float32").model.dtype == "float32"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"enforce_eager": True}, "no CUDA graphs"),
        ({"model_impl": "transformers"}, "transformers' modelling code is not captured"),
    ],
)
def test_what_is_not_captured_in_graphs(arguments: dict[str, Any], why: str) -> None:
    assert settings().settings["enforce_eager"].value is False
    assert settings(quantization="int8", kv_cache_dtype="fp8").settings["enforce_eager"].value is False
    setting = settings(**arguments).settings["enforce_eager"]
    assert setting.value is True
    assert why in setting.detail


def test_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag or vLLM's variable; explain shows its choices, and says that a CPU needs none."""
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    plain, chosen = settings().settings["deterministic"], settings(deterministic=True).settings["deterministic"]
    assert (plain.value, plain.source, chosen.value, chosen.source) == (False, "default", True, "argument")
    assert "cuBLAS" in plain.detail
    assert "Triton instead of cuBLAS" in chosen.detail
    assert "on CPU every path is" in settings(CPU, deterministic=True).settings["deterministic"].detail
    with pytest.raises(ConfigError, match="modelling code is not deterministic on a GPU"):
        settings(deterministic=True, model_impl="transformers")
    assert settings(CPU, deterministic=True, model_impl="transformers").device.deterministic
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    from_variable = settings().settings["deterministic"]
    assert (from_variable.value, from_variable.source) == (True, "environment")
    text = explain("demo", EngineConfig(), ServerConfig(), MODEL, WITH_H100).text()
    assert "kernel  Triton: tensor cores" in text
    fp8 = explain("demo", EngineConfig(quantization="fp8"), ServerConfig(), MODEL, WITH_H100).text()
    assert "_scaled_mm" in settings(quantization="fp8").settings["deterministic"].detail
    assert "from 257 rows" not in fp8


def test_an_engine_on_the_cpu_leaves_the_process_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is deterministic anyway, and a later one on a GPU need not be."""
    monkeypatch.setattr(gpu, "_is_deterministic", False)
    config = EngineConfig(device="cpu", deterministic=True, max_num_seqs=1, num_gpu_blocks_override=8, max_model_len=64)
    start_engine(config, Path(demo.path("target")), is_server=False, progress=lambda phase, share, detail: None)
    assert not gpu.is_deterministic()


def planned(memory: MemoryFacts, **arguments: Any) -> Planned:
    config = EngineConfig.from_kwargs(**arguments)
    return plan_kv_cache(config, MODEL, resolve(config, MODEL, WITH_H100, is_server=True), memory)


# 80 GiB. CUDA itself and another process hold 1 of them.
MEMORY = MemoryFacts(total_bytes=80 * GIB, free_bytes=64 * GIB, weight_bytes=15 * GIB, work_bytes=2 * GIB)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_utilization(share: float) -> None:
    """The share is of all memory, for weights, work and cache together, as vLLM's; 0.9 is taken if none is given."""
    resolved = planned(MEMORY, gpu_memory_utilization=share)
    taken = MEMORY.weight_bytes + MEMORY.work_bytes + resolved.memory.kv_cache_bytes
    block = resolved.memory.kv_cache_bytes // resolved.memory.num_blocks
    assert share * 80 * GIB - block < taken <= share * 80 * GIB
    if share == 0.9:
        assert planned(MEMORY).memory.num_blocks == resolved.memory.num_blocks


def test_the_rest_of_the_machine_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert planned(MEMORY).memory.kv_cache_bytes > 40 * GIB


def test_what_other_processes_hold_is_not_taken() -> None:
    busy = replace(MEMORY, free_bytes=20 * GIB)
    resolved = planned(busy, gpu_memory_utilization=0.95)
    assert resolved.memory.kv_cache_bytes <= (20 - 2 - 0.02 * 80) * GIB
    assert "less than --gpu-memory-utilization allows" in resolved.settings["num_blocks"].detail
    with pytest.raises(MemoryPlanError, match="does not fit"):
        planned(replace(MEMORY, free_bytes=GIB))


def test_explain_shows_the_device_and_its_reason() -> None:
    shown = explain("demo", EngineConfig(), ServerConfig(), MODEL, WITH_H100)
    text = shown.text()
    assert "gpu      NVIDIA H100 80GB HBM3, sm_90, 80.00 GiB, 79.00 GiB free now" in text
    assert shown.as_dict()["machine"]["gpu"] == asdict(H100)
    assert " device cuda [device]" in " ".join(text.split())
    assert "kernel  cuBLAS" in text
    quantized = explain("demo", EngineConfig(quantization="int4"), ServerConfig(), MODEL, WITH_H100).text()
    assert "kernel  Triton: codes to bfloat16, tensor cores" in quantized
    assert 70 * GIB < shown.settings["kv_cache_bytes"].value < 72 * GIB
    on_cpu = explain("demo", EngineConfig(), ServerConfig(), MODEL, CPU)
    assert on_cpu.as_dict()["machine"]["gpu"] is None
    assert "why     torch finds no GPU of NVIDIA" in on_cpu.text()


def test_asking_for_gpus_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver torch is not asked; with one, torch finds the same GPU as an engine would."""
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    monkeypatch.setattr(devices.subprocess, "run", lambda *args, **kwargs: pytest.fail("asked"))
    assert devices.ask_gpu() == "no driver of a GPU is loaded"
    monkeypatch.setattr(devices, "has_gpu", lambda: True)

    def answers(text: str) -> None:
        done = subprocess.CompletedProcess([], 0, stdout=text)
        monkeypatch.setattr(devices.subprocess, "run", lambda *args, **kwargs: done)

    answers(json.dumps(asdict(H100)))
    assert devices.ask_gpu() == H100
    answers(json.dumps("Triton is not installed"))
    assert devices.ask_gpu() == "Triton is not installed"

    def fails(*args: Any, **kwargs: Any) -> None:
        raise subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr(devices.subprocess, "run", fails)
    assert devices.ask_gpu() == "asking for GPUs failed (TimeoutExpired)"


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    assert gpu_facts.detect() == devices.ask_gpu() == "no driver of a GPU is loaded"
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in str(gpu_facts.detect())
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu_facts.detect() == "this torch is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert gpu_facts.detect() == "torch finds no GPU of NVIDIA"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_facts, "find_spec", lambda name: None)
    assert gpu_facts.detect() == "Triton is not installed"
    monkeypatch.setattr(gpu_facts, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (L4.free_memory_bytes, L4.total_memory_bytes))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert gpu_facts.detect() == "NVIDIA L4 is of compute capability 7.5, and the kernels need 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="12ab"))
    assert gpu_facts.detect() == replace(L4, num_visible=2, uuid="12ab")


@pytest.mark.parametrize(
    ("fast", "allowed", "cores", "efficient"),
    [
        (None, range(12), 8, 0),
        ("0-7", range(12), 4, 4),
        ("0-1,4-5", range(12), 2, 6),
        ("0-7", range(4, 10), 2, 2),
        ("0-7", range(8, 12), 4, 0),  # the process has efficient cores only
    ],
)
def test_efficient_cores_do_not_count(
    fast: str | None, allowed: range, cores: int, efficient: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four cores with two threads each, and four with one, as on Alder Lake."""

    def read(path: Path) -> str | None:
        if path == Path("/sys/devices/cpu_core/cpus"):
            return fast and fast + "\n"
        if path.name == "thread_siblings_list" and (number := int(path.parts[-3].removeprefix("cpu"))) < 8:
            return f"{number // 2 * 2}-{number // 2 * 2 + 1}\n"
        return None

    monkeypatch.setattr(devices, "_read_text", read)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: set(allowed), raising=False)
    assert (devices.num_cores(), devices.num_efficient_cores()) == (cores, efficient)


@pytest.mark.parametrize(
    ("capacities", "cores", "efficient"),
    [
        ((1024,) * 8, 8, 0),
        ((397,) * 4 + (1024,) * 4, 4, 4),  # RK3588
        ((250,) * 4 + (850,) * 3 + (1024,), 4, 4),  # three kinds: the middle one is worth more than half of the first
        ((397,) * 4, 4, 0),  # the process has efficient cores only
        ((512, 1024), 2, 0),
        ((511, 1024), 1, 1),
    ],
)
def test_cores_of_less_than_half_of_the_largest_capacity_do_not_count(
    capacities: tuple[int, ...], cores: int, efficient: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> str | None:
        return f"{capacities[int(path.parts[-2].removeprefix('cpu'))]}\n" if path.name == "cpu_capacity" else None

    monkeypatch.setattr(devices, "_read_text", read)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: set(range(len(capacities))), raising=False)
    assert (devices.num_cores(), devices.num_efficient_cores()) == (cores, efficient)


def test_facts_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of Linux is there; macOS' names are answered as on an M1 with 8 GB and half of the memory in use."""
    pages = os.sysconf("SC_PAGE_SIZE")
    numbers = {"free": GIB, "pageable_external": 2 * GIB, "purgeable": GIB}
    answers = {
        f"vm.page_{kind}_count": (number // pages).to_bytes(4, sys.byteorder) for kind, number in numbers.items()
    }
    answers["hw.physicalcpu"], answers["hw.perflevel0.physicalcpu"] = b"\x08\0\0\0", b"\x04\0\0\0"
    answers["hw.perflevel1.physicalcpu"] = b"\x04\0\0\0"
    answers["machdep.cpu.brand_string"] = b"Apple M1\0"
    monkeypatch.setattr(devices, "_read_text", lambda path: None)
    monkeypatch.setattr(devices, "_sysctl", answers.get)
    assert (devices.num_cores(), devices.free_memory_bytes(), devices.cpu_name()) == (4, 4 * GIB, "Apple M1")
    assert devices.num_efficient_cores() == 4
    del answers["hw.perflevel0.physicalcpu"]  # a Mac with Intel's CPU
    assert devices.num_cores() == 8


def test_free_pages_that_linux_keeps_for_single_processors_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """MemAvailable leaves them out: memory that a program has returned seemed to be taken."""
    zones = """
Node 0, zone   Normal
  pages free     3169374
  pagesets
    cpu: 0
              count:    3107
              high:     55439
    cpu: 1
              count:    18396
              high:     56238
Node 0, zone  Movable
    cpu: 0
              count:    1
"""
    files = {Path("/proc/meminfo"): "MemTotal: 16777216 kB\nMemAvailable: 4194304 kB\n"}
    monkeypatch.setattr(devices, "_read_text", files.get)
    assert devices.free_memory_bytes() == 4 * GIB  # a system that does not tell
    files[Path("/proc/zoneinfo")] = zones
    assert devices.free_memory_bytes() == 4 * GIB + (3107 + 18396 + 1) * os.sysconf("SC_PAGE_SIZE")
