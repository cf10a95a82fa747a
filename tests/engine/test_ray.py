"""Stages on a Ray cluster, which is two addresses of this machine: the tokens of one process, and lack of room."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import quire.demo
from quire.config import EngineConfig
from quire.engine import ray_cluster
from quire.engine.nodes import let_in
from quire.engine.start import StartedEngine, start_engine
from quire.errors import ConfigError, EngineDeadError
from quire.kernels import cpu
from tests.engine.harness import run
from tests.engine.ranks import LIMITS, ignore, started
from tests.engine.test_rank_processes import ENDLESS, is_there, wait_for
from tests.engine.test_sameness import brief
from tests.ray_cluster import processes_with, two_machines

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

RAY: dict[str, Any] = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}


def on_ray(**more: Any) -> StartedEngine:
    config = EngineConfig.from_kwargs(**LIMITS | RAY | more)
    return start_engine(config, quire.demo.path("target"), is_server=False, progress=ignore)


def test_each_stage_gets_a_machine() -> None:
    assert EngineConfig.from_kwargs(**RAY).nnodes == 2
    assert EngineConfig.from_kwargs(**RAY | {"pipeline_parallel_size": 4, "nnodes": 2}).nnodes == 2
    assert EngineConfig.from_kwargs(tensor_parallel_size=2, distributed_executor_backend="ray").nnodes == 1


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray is not installed.*pip install 'quire\[ray\]'"):
        on_ray()


def test_nobody_waits_for_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def init(**options: Any) -> None:
        asked.wait()  # for ever, as far as the start knows

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    monkeypatch.setattr(ray_cluster, "CONNECT_SECONDS", 0.05)
    try:
        with pytest.raises(ConfigError, match=r"No Ray cluster is reached: no answer in 0\.05 seconds"):
            on_ray()
    finally:
        asked.set()


def test_a_lack_of_room_is_said_within_ten_seconds() -> None:
    """Ray is asked for so long. What each machine lacks is known at once then."""
    asked: list[float] = []
    cluster = object.__new__(ray_cluster.RayCluster)
    group = SimpleNamespace(wait=asked.append)  # it answers None: there is no room
    cluster.ray = SimpleNamespace(util=SimpleNamespace(placement_group=lambda *bundles, strategy: group))
    cluster._here = "127.0.0.1"
    cluster._no_room = lambda *arguments: ConfigError("no room")  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="no room"):
        cluster.take_places([{"CPU": 1}], "SPREAD", is_first_here=True, whom="nodes", expected="more")
    (seconds,) = asked
    assert seconds <= 8.0 < 10.0


class LostNodes:
    """A Starting whose nodes end at once."""

    address, port, key = "127.0.0.2", 0, "of the tests, long enough"

    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []

    def start(self, address: str, port: int) -> None:
        self.started.append((address, port))

    def check(self) -> None:
        raise ConfigError("Node 1 ended with exit code 2")

    def close(self) -> None: ...


def test_nobody_waits_for_a_node_that_has_ended() -> None:
    starting = LostNodes()
    with pytest.raises(ConfigError, match="Node 1 ended"):
        let_in(EngineConfig.from_kwargs(**LIMITS | RAY), quire.demo.path("target"), str, starting)
    ((address, port),) = starting.started
    assert (address, port > 0) == (starting.address, True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with two_machines():
        yield


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_ray_starts_the_machines(cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    on_term = signal.getsignal(signal.SIGTERM)
    engine = on_ray()
    here = os.environ["RAY_ADDRESS"].partition(":")[0]
    assert f"Ray starts 1 nodes, which connect to {here}, port " in caplog.text, "one of two networks"
    (node,) = processes_with("quire.entry.node")
    assert run(engine.core, brief()) == run(started(1).core, brief())
    assert signal.getsignal(signal.SIGTERM) is on_term
    engine.core.shutdown()
    assert not is_there(node)

    engine = on_ray()  # the places were given back
    (node,) = processes_with("quire.entry.node")
    (rank,) = processes_with("quire.engine.rank_process")

    def hit(core: Any, step: int) -> None:
        if step == 20:
            os.kill(rank, signal.SIGKILL)

    with pytest.raises(EngineDeadError, match=rf"Rank 1 of 2.*process {rank} on .* was killed by SIGKILL"):
        run(engine.core, [ENDLESS], before_step=hit)
    engine.core.shutdown()
    assert wait_for(lambda: not is_there(node), 5.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_ranks_of_a_stage_on_two_machines(cluster: None) -> None:
    engine = on_ray(pipeline_parallel_size=1, tensor_parallel_size=2, nnodes=2)
    assert run(engine.core, brief()) == run(started(1).core, brief())
    engine.core.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_what_ray_cannot_place_is_said(cluster: None) -> None:
    with pytest.raises(ConfigError) as error:
        on_ray(num_threads=3)
    assert "Ray has no room for 2 nodes" in error.value.message
    for machine in (" (this one)", "127.0.0.2"):
        assert f"{machine} has 1 of 1 CPUs free, 2 too few" in error.value.message
    with pytest.raises(ConfigError, match=r"Got '2 machines'\. Expected 3 machines with 1 free CPUs each"):
        on_ray(pipeline_parallel_size=3)
