"""The CPUs of each process of an engine, with --numa-bind and VLLM_CPU_OMP_THREADS_BIND.

The memory of a bound process is near its cores: the system gives it pages of its own NUMA node first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from quire import envs
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.planning import devices
from quire.resolve import DeviceFacts

_NODES = Path("/sys/devices/system/node")
_UNBOUND = ("", "auto", "nobind", "all")


def is_bound(config: EngineConfig) -> bool:
    """Whether each process has CPUs of its own."""
    asked = config.numa_bind or config.numa_bind_nodes or config.numa_bind_cpus
    return bool(asked) or envs.CPU_OMP_THREADS_BIND.get() not in _UNBOUND


def cpus_of_processes(config: EngineConfig) -> list[set[int]]:
    """The CPUs of each rank on this machine, replica after replica; empty: they are not bound.

    Raises ConfigError for CPUs or NUMA nodes that this process may not use or that are not there.
    """
    if not is_bound(config):
        return []
    count = config.num_local_replicas * config.num_local_ranks
    allowed, by_hand = devices.allowed_cpus(), config.numa_bind_cpus
    name = "numa_bind_cpus"
    if not by_hand and not config.numa_bind and not config.numa_bind_nodes:
        by_hand, name = tuple(envs.CPU_OMP_THREADS_BIND.get().split("|")), envs.CPU_OMP_THREADS_BIND.name
    ways = [each for each in ("numa_bind", "numa_bind_nodes", "numa_bind_cpus") if getattr(config, each)]
    _check(len(ways) < 2, name, ", ".join(ways), "one of these settings")
    if by_hand:
        places = [_numbers(text, name) for text in by_hand]
        _check(len(places) == count, name, f"{len(places)} lists of CPUs", f"{count}: one for each process")
    else:
        name = "numa_bind_nodes" if config.numa_bind_nodes else "numa_bind"
        places = _on_nodes(config.numa_bind_nodes, count, _nodes(allowed), name)
    for place in places:
        _check(bool(place) and place <= allowed, name, _shown(place), f"some of CPUs {_shown(allowed)}")
    return places


def _on_nodes(wished: Sequence[int], count: int, nodes: Mapping[int, set[int]], name: str) -> list[set[int]]:
    """The CPUs of each process, from its NUMA node. Processes on the same node share its CPUs evenly."""
    _check(bool(nodes), name, "no NUMA node", "a system that tells them, with a node whose CPUs this process may use")
    numbers = wished or [sorted(nodes)[index * len(nodes) // count] for index in range(count)]
    _check(len(numbers) == count, name, list(numbers), f"{count} nodes: one for each process")
    for number in numbers:
        _check(number in nodes, name, number, f"a NUMA node with CPUs of this process: {', '.join(map(str, nodes))}")
    places = []
    for index, number in enumerate(numbers):
        cpus, place, sharers = sorted(nodes[number]), numbers[:index].count(number), numbers.count(number)
        _check(sharers <= len(cpus), name, f"{sharers} processes", f"at most {len(cpus)}: the CPUs of node {number}")
        places.append(set(cpus[len(cpus) * place // sharers : len(cpus) * (place + 1) // sharers]))
    return places


def bind(cpus: set[int]) -> None:
    """Bind this thread, and threads that it starts, to these CPUs."""
    os.sched_setaffinity(0, cpus)


@contextmanager
def freed_behind() -> Iterator[None]:
    """At the end of the block, let this thread compute everywhere again. Threads that started inside stay bound."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def bound_facts(device: DeviceFacts, config: EngineConfig, cores_of_a_process: int) -> DeviceFacts:
    """The facts of a machine with as many cores as all bound processes have, within the cgroup's CPU quota.

    Its equal parts have the cores of a process.
    """
    count = config.num_local_replicas * config.num_local_ranks
    if (quota := devices.cpu_quota()) is not None:
        cores_of_a_process = min(cores_of_a_process, max(1, int(quota) // count))
    return replace(device, num_cores=cores_of_a_process * count)


def _nodes(allowed: set[int]) -> dict[int, set[int]]:
    """The CPUs of each NUMA node that this process may use."""
    found = {}
    for path in sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda each: int(each.parent.name[4:])):
        if cpus := devices.cpu_list(path.read_text()) & allowed:
            found[int(path.parent.name[4:])] = cpus
    return found


def _numbers(text: str, name: str) -> set[int]:
    try:
        return devices.cpu_list(text)
    except ValueError:
        raise ConfigError(
            "This is no list of CPUs", value=text, expected="numbers and ranges, as 0-3,8", param=name
        ) from None


def _check(is_right: bool, name: str, value: object, expected: str) -> None:
    if not is_right:
        raise ConfigError("Processes cannot be bound to these CPUs", value=value, expected=expected, param=name)


def _shown(cpus: set[int]) -> str:
    return ",".join(map(str, sorted(cpus)))
