"""Which CPUs processes are bound to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.planning import binding, devices
from quire.planning.binding import cpus_of_processes
from quire.planning.replicas import has_own_cores


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two nodes with four CPUs each; this process may not use CPU 7. A third node has memory only."""
    for number, cpus in enumerate(("0-3", "4-7", "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus + "\n")
    monkeypatch.setattr(binding, "_NODES", tmp_path)
    monkeypatch.setattr(devices, "allowed_cpus", lambda: set(range(7)))


def places(**settings: Any) -> list[set[int]]:
    return cpus_of_processes(EngineConfig.from_kwargs(**settings))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"numa_bind": True}, [{0, 1, 2, 3}]),
        ({"numa_bind": True, "tensor_parallel_size": 2}, [{0, 1, 2, 3}, {4, 5, 6}]),
        ({"numa_bind": True, "data_parallel_size": 2, "tensor_parallel_size": 2}, [{0, 1}, {2, 3}, {4}, {5, 6}]),
        ({"numa_bind_nodes": (1, 0), "tensor_parallel_size": 2}, [{4, 5, 6}, {0, 1, 2, 3}]),
        ({"numa_bind_cpus": ("0-1,6", "3"), "pipeline_parallel_size": 2}, [{0, 1, 6}, {3}]),
        ({"numa_bind": True, "pipeline_parallel_size": 4, "nnodes": 2}, [{0, 1, 2, 3}, {4, 5, 6}]),
    ],
)
def test_places(settings: dict[str, Any], expected: list[set[int]]) -> None:
    assert places(**settings) == expected


def test_the_variable_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("0-1|2-3", [{0, 1}, {2, 3}]), ("auto", []), ("nobind", [])):
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", text)
        assert places(tensor_parallel_size=2) == expected
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1|2-3")
    assert places(numa_bind_cpus=("5", "6"), tensor_parallel_size=2) == [{5}, {6}]
    with pytest.raises(ConfigError, match="Expected 3: one for each process"):
        places(tensor_parallel_size=3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"numa_bind_cpus": ("0-x",)}, "no list of CPUs"),
        ({"numa_bind": True, "numa_bind_cpus": ("0",)}, "Got 'numa_bind, numa_bind_cpus'. Expected one of these"),
        ({"numa_bind_cpus": ("7",)}, "Got '7'. Expected some of CPUs 0,1,2,3,4,5,6"),
        ({"numa_bind_cpus": ("",)}, "Got ''"),
        ({"numa_bind_nodes": (2,)}, "Got 2. Expected a NUMA node with CPUs of this process: 0, 1"),
        ({"numa_bind_nodes": (0,), "tensor_parallel_size": 2}, "Expected 2 nodes"),
        ({"numa_bind": True, "tensor_parallel_size": 16}, "Got '8 processes'. Expected at most 4: the CPUs of node 0"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        places(**settings)


def test_a_system_that_tells_no_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(binding, "_NODES", tmp_path / "none")
    with pytest.raises(ConfigError, match="no NUMA node"):
        places(numa_bind=True)


def test_bound_processes_have_their_cores_alone() -> None:
    bound = EngineConfig.from_kwargs(numa_bind=True, tensor_parallel_size=4, num_threads=2)
    assert has_own_cores(bound, 2)
    assert not has_own_cores(bound, 1)
