"""Interpreters that become ranks: they get a launch with its descriptors, and end if none comes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire import LLM
from quire.config import EngineConfig
from quire.engine import rank_spawn
from quire.engine.rank_messages import RankLaunch
from quire.engine.rank_spawn import RankInterpreter, spawned_ranks
from quire.entry import llm_engine, spawn
from quire.planning import devices
from quire.planning.replicas import num_early_ranks

# Says what has come, over each of the descriptors.
OBEDIENT = """
import os
from quire.engine.rank_spawn import receive_launch
launch = receive_launch()
if launch is not None:
    os.write(launch.connection, f"connection of rank {launch.rank}, {len(launch.model_folder)}".encode())
    os.write(launch.memory, b"memory")
    os.write(launch.links[7], b"link to 7")
    if launch.adapters is not None:
        os.write(launch.adapters, b"adapters")
"""


@pytest.fixture
def _obedient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_spawn, "PROGRAM", ("-c", OBEDIENT))


@pytest.mark.usefixtures("_obedient")
@pytest.mark.parametrize("with_adapters", [True, False])
def test_a_launch_comes_with_its_descriptors(*, with_adapters: bool) -> None:
    """However long it is."""
    pipes = {name: os.pipe() for name in ("connection", "memory", "link", "adapters")}
    theirs = {name: write for name, (_, write) in pipes.items()}
    launch = RankLaunch(
        config=EngineConfig(),
        model_folder="x" * 1_000_000,
        drafter_folder=None,
        rank=3,
        connection=theirs["connection"],
        memory=theirs["memory"],
        adapters=theirs["adapters"] if with_adapters else None,
        dies_with_parent=False,
        links={7: theirs["link"]},
        cpus=set(),
    )
    process = RankInterpreter().launch(launch)
    for descriptor in theirs.values():
        os.close(descriptor)
    heard = {}
    for name, (read, _) in pipes.items():
        with open(read, "rb") as pipe:
            heard[name] = pipe.read().decode()
    assert process.wait() == 0
    assert heard == {
        "connection": "connection of rank 3, 1000000",
        "memory": "memory",
        "link": "link to 7",
        "adapters": "adapters" if with_adapters else "",
    }


@pytest.mark.usefixtures("_obedient")
def test_those_that_nobody_takes_end() -> None:
    with spawned_ranks(2) as interpreters:
        taken, left = interpreters.pop(), interpreters[0]
        assert left.process.poll() is None
        taken._orders.close()
        assert taken.process.wait() == 0, "nothing comes any more"
    assert left.process.returncode is not None


@pytest.mark.usefixtures("_obedient")
def test_as_many_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[RankInterpreter] = []

    def limited() -> RankInterpreter:
        if len(begun) == 2:
            raise BlockingIOError("no more processes")
        begun.append(RankInterpreter())
        return begun[-1]

    monkeypatch.setattr(rank_spawn, "RankInterpreter", limited)
    with spawned_ranks(5) as interpreters:
        assert interpreters == begun
    assert all(each.process.returncode is not None for each in begun)


def test_no_more_than_cores_are_started_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor any whose first rank is none of ours."""
    monkeypatch.setattr(devices, "num_cores", lambda: 4)
    numbers = {
        (): 0,
        (("tensor_parallel_size", 3),): 2,
        (("tensor_parallel_size", 3), ("data_parallel_size", 2)): 2,
        (("tensor_parallel_size", 8), ("pipeline_parallel_size", 8)): 3,
        (("pipeline_parallel_size", 4), ("nnodes", 2)): 1,
        (("pipeline_parallel_size", 4), ("nnodes", 2), ("node_rank", 1), ("headless", True)): 2,
        (("tensor_parallel_size", 3), ("distributed_executor_backend", "external_launcher")): 0,
    }
    assert {given: num_early_ranks(EngineConfig(**dict(given))) for given in numbers} == numbers  # type: ignore[arg-type]


class HaltError(Exception):
    pass


def test_an_llm_starts_them_before_it_loads_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    @contextmanager
    def spawned(count: int) -> Iterator[list[Any]]:
        events.append(f"{count} started")
        yield []
        raise AssertionError("the start did not stop")

    def load(module: str) -> None:
        events.append("libraries are loaded")
        raise HaltError

    monkeypatch.setattr(llm_engine, "spawned_ranks", spawned)
    monkeypatch.setattr(llm_engine, "load", load)
    monkeypatch.setattr(devices, "num_cores", lambda: 2)
    with pytest.raises(HaltError):
        LLM(tensor_parallel_size=2, device="cpu")
    assert events == ["1 started", "libraries are loaded"]


def test_an_engine_process_is_told_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "ENGINE_PROGRAM", ("-c", "import sys; sys.exit(int(sys.argv[1]))"))
    monkeypatch.setattr(devices, "num_cores", lambda: 4)
    for config, count in ((EngineConfig(), 0), (EngineConfig(tensor_parallel_size=3), 2)):
        with spawn.spawn_engine(config) as process:
            assert process.wait() == count
