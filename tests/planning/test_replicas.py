"""The shares of replicas: together they never exceed the machine, whatever the order in which replicas load."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import LLM
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from quire.planning import devices
from quire.planning.memory_plan import MemoryFacts, plan_kv_cache
from quire.planning.replicas import check_machine, has_own_cores, share_of_machine, share_of_memory
from quire.resolve import GpuFacts, resolve
from quire.screen.explain import explain
from tests.test_resolve import DEVICE, GIB, MIB, MODEL

FIVE_CORES = replace(DEVICE, num_cores=5)


def config_of(count: int, **arguments: Any) -> EngineConfig:
    return EngineConfig(data_parallel_size=count, **arguments)


def test_share_of_machine() -> None:
    assert share_of_machine(FIVE_CORES, config_of(1)) is FIVE_CORES
    share = share_of_machine(FIVE_CORES, config_of(2))
    assert (share.num_cores, share.total_memory_bytes, share.free_memory_bytes) == (2, 4 * GIB, 3 * GIB)
    with_gpu = replace(FIVE_CORES, gpu=GpuFacts("H100", 90, 80 * GIB, 79 * GIB))
    assert share_of_machine(with_gpu, config_of(2)).gpu == with_gpu.gpu, "each has one of its own"


def test_more_replicas_than_cores_or_gpus(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        ConfigError, match=r"more replicas than cores.*Got 6. Expected at most 5.*--data-parallel-size to 5"
    ):
        share_of_machine(FIVE_CORES, config_of(6))
    monkeypatch.setattr(devices, "num_cores", lambda: 2)
    monkeypatch.setattr(devices, "num_gpus", lambda: 0)
    with pytest.raises(ConfigError, match="more replicas than cores"):
        check_machine(config_of(3))
    with caplog.at_level(logging.WARNING):
        check_machine(config_of(2, num_threads=1))
        assert not caplog.records
        check_machine(config_of(2, num_threads=2))
    assert "2 processes with 4 threads in all share 2 cores" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_machine(config_of(1, num_threads=4))
        check_machine(config_of(1, tensor_parallel_size=2))
        assert not caplog.records
        check_machine(config_of(1, tensor_parallel_size=2, num_threads=2))
        assert "2 processes with 4 threads in all share 2 cores" in caplog.text
    monkeypatch.setattr(devices, "num_gpus", lambda: 1)
    with pytest.raises(ConfigError, match=r"more replicas than GPUs.*Leave --data-parallel-size out, or use --device"):
        check_machine(config_of(2))
    check_machine(config_of(2, device="cpu"))


def test_ranks_wait_on_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they leave the core to each other sooner."""
    monkeypatch.delenv("QUIRE_NUM_THREADS", raising=False)
    assert has_own_cores(config_of(2, tensor_parallel_size=2), 4)
    assert has_own_cores(config_of(2, tensor_parallel_size=2, num_threads=2), 8)
    assert not has_own_cores(config_of(2, tensor_parallel_size=2, num_threads=2), 7)
    assert not has_own_cores(config_of(2, tensor_parallel_size=2), 3)
    assert not has_own_cores(config_of(1, tensor_parallel_size=2, num_threads=2), 3)


@given(
    st.integers(2, 5),
    st.integers(1, 64),
    st.integers(0, 60),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_replicas_never_plan_for_more_than_is_free(count: int, free: int, taken: int, are_there: list[bool]) -> None:
    """Whether the others have taken their part before a replica measures, or not."""
    planned = 0
    for index in range(count):
        by_others = sum(are_there[other] for other in range(count) if other != index) * taken
        measured = MemoryFacts(64 * GIB, (free - taken - by_others) * GIB, taken * GIB, 0, taken_bytes=taken * GIB)
        share = share_of_memory(measured, count, free * GIB)
        assert share.free_bytes <= measured.free_bytes
        planned += taken * GIB + max(share.free_bytes, 0)
    assert planned <= max(free, count * taken) * GIB


def test_each_plans_with_its_share() -> None:
    """Utilization is of the share, and so is the reserve."""
    config = config_of(2, gpu_memory_utilization=0.5, max_num_seqs=8)
    facts = share_of_machine(FIVE_CORES, config)
    resolved = resolve(config, MODEL, facts, is_server=True)
    assert resolved.device.num_threads == 2
    assert "for each of 2 replicas" in resolved.settings["num_threads"].detail
    measured = MemoryFacts(8 * GIB, 5 * GIB, 512 * MIB, 100 * MIB, taken_bytes=GIB)
    planned = plan_kv_cache(config, MODEL, resolved, share_of_memory(measured, 2, 6 * GIB))
    assert "0.5 x 4,294,967,296 total" in planned.settings["num_blocks"].detail


def test_explain_has_the_share_and_shows_the_machine() -> None:
    one, two = (explain("demo", config_of(count), ServerConfig(), MODEL, DEVICE) for count in (1, 2))
    assert [found.settings["num_threads"].value for found in (one, two)] == [4, 2]
    assert two.settings["unplanned_bytes"].value < one.settings["unplanned_bytes"].value - 2 * GIB
    assert two.device.num_cores == 4
    assert "replicas 2, and the lines below are of one of them" in two.text()
    assert "replicas" not in one.text().partition("layers")[0]


def test_settings_that_are_refused() -> None:
    assert config_of(2, data_parallel_size_local=2).data_parallel_size == 2
    with pytest.raises(
        ConfigError, match=r"on other machines, and only Ray can start them there.*give --data-parallel-backend ray"
    ):
        config_of(2, data_parallel_size_local=1)
    with pytest.raises(ConfigError, match=r"Only lanes have a place on each machine. Got 1.*--enable-expert-parallel"):
        config_of(2, data_parallel_start_rank=1)
    with pytest.raises(ConfigError, match="Illegal value of data_parallel_size"):
        config_of(0)
    with pytest.raises(ConfigError, match=r"data_parallel_rank is not supported: a server runs all of its replicas"):
        EngineConfig.from_kwargs(data_parallel_rank=1)
    assert EngineConfig.from_kwargs(data_parallel_rpc_port=29550).data_parallel_size == 1


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"enable_expert_parallel": True},
            "--enable-expert-parallel.*lanes are one engine, whose ranks --nnodes places",
        ),
        ({"distributed_executor_backend": "external_launcher"}, "--distributed-executor-backend.*torchrun starts"),
        ({"pipeline_parallel_size": 2, "nnodes": 2}, "Each of several replicas is on one machine"),
        (
            {"data_parallel_size": 1, "pipeline_parallel_size": 2, "nnodes": 2},
            "--nnodes.*each replica is on one machine",
        ),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}, "Each of several replicas is on one"),
        ({"headless": True}, "Only machine 0 runs the server"),
        ({"master_port": 4000}, "--master-port.*the system chooses their ports"),
        ({"device_ids": ("0", "1")}, "--device-ids.*Ray chooses their GPUs"),
        ({"numa_bind": True}, "--numa-bind.*Ray chooses their machines"),
        ({"numa_bind_nodes": (0,)}, "--numa-bind-nodes.*Ray chooses their machines"),
        ({"numa_bind_cpus": ("0",)}, "--numa-bind-cpus.*Ray chooses their machines"),
        ({"data_parallel_size_local": 3}, "Illegal number of replicas on this machine.*1 to data_parallel_size = 2"),
        ({"data_parallel_size_local": 0}, "Illegal number of replicas on this machine"),
    ],
)
def test_what_does_not_go_with_ray(given: dict[str, Any], why: str) -> None:
    arguments = {"data_parallel_size": 2, "data_parallel_backend": "ray"} | given
    with pytest.raises(ConfigError, match=why):
        EngineConfig.from_kwargs(**arguments)


def test_replicas_that_ray_places_share_no_machine_unless_they_are_told() -> None:
    for more, count in (({}, 1), ({"data_parallel_size_local": 2}, 2)):
        config = config_of(6, data_parallel_backend="ray", **more)
        check_machine(config)  # more replicas than cores are of other machines
        assert (config.num_replicas, config.num_local_replicas) == (6, count)
        assert share_of_machine(FIVE_CORES, config).num_cores == 5 // count


def test_llm_is_one_replica() -> None:
    for arguments in ({"data_parallel_size": 2}, {"data_parallel_backend": "ray"}):
        with pytest.raises(ConfigError, match=r"An engine in this process is one replica.*Use AsyncLLM or quire serve"):
            LLM(**arguments)


def test_taken_memory() -> None:
    """In a process of its own: the system may take idle memory of this one away at the same time."""
    code = "from quire.planning.devices import taken_memory_bytes as taken; before = taken()"
    code += "; held = bytearray(b'x' * 2**26); print(taken() - before)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert 60 * MIB < int(ended.stdout) < 80 * MIB


def test_gpus_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert devices.num_gpus() == 2
    devices.take_gpus(1, 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


def test_the_gpu_of_a_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of those that its engine may see. A driver that lists none may have some."""
    monkeypatch.setattr(devices, "_GPU_FOLDER", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [devices.gpu_of_rank(rank) for rank in (1, 2)] == ["1", "2"], "as under WSL"
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert [devices.gpu_of_rank(rank) for rank in (1, 2)] == ["1", ""]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    assert [devices.gpu_of_rank(rank) for rank in (1, 2)] == ["GPU-abc", ""]
    assert [devices.own_gpu(rank) for rank in (1, 2)] == ["GPU-abc", ""]
    devices.see_gpu("GPU-abc")
    assert [devices.own_gpu(rank) for rank in (0, 1)] == ["GPU-abc", "GPU-abc"], "its launcher has chosen it"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-abc"
    devices.see_gpu("")
    assert [devices.visible_gpus(), devices.gpu_of_rank(0)] == [[], ""]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True)))
    with pytest.raises(ConfigError, match=r"This process uses a GPU already.*Set CUDA_VISIBLE_DEVICES=1"):
        devices.see_gpu("1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    devices.see_gpu("1")  # it follows the advice


def test_gpus_that_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each replica takes its own, whatever the process could see before."""
    assert EngineConfig(device_ids=("2,3", " GPU-abc")).gpu_ids == ["2", "3", "GPU-abc"]
    config = config_of(2, device_ids=("7", "4"))
    monkeypatch.setattr(devices, "num_cores", lambda: 8)
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    check_machine(config)
    devices.take_gpus(1, 1, config.gpu_ids)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
    assert not caplog.records
    monkeypatch.setattr(devices, "num_gpus", lambda: 0)
    devices.take_gpus(0, 1, config.gpu_ids)
    assert "--device-ids names GPUs, and no driver lists any" in caplog.text
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7", "the driver may have GPUs that it does not list"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(devices, "visible_gpus", list)
    devices.take_gpus(2, 2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True)))
    with pytest.raises(ConfigError, match="This process uses a GPU already"):
        devices.take_gpus(0, 1, config.gpu_ids)


@pytest.mark.parametrize("names", [("0",), ("0", "0"), ("0,0,1",)])
def test_a_gpu_for_each_replica(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="names a GPU twice, or fewer GPUs than there are replicas"):
        config_of(2, device_ids=names)
    with pytest.raises(ConfigError, match="--device cpu uses none"):
        config_of(2, device_ids=("0", "1"), device="cpu")
