"""The requests of RayReplicas to Ray, over a cluster that only notes them; and the actor around an engine process."""

from __future__ import annotations

import json
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import __version__, envs
from quire.config import EngineConfig
from quire.engine.ray_cluster import QuireProcess
from quire.engine.ray_replicas import RayReplicas
from quire.errors import ConfigError
from quire.messages import EngineLaunch, ServerAddress
from quire.planning import devices

HERE, OTHER = "10.0.0.1", "10.0.0.2"
GIB = 1 << 30


class NotedRay:
    """As much of Ray's module as is used: three machines with 8 CPUs each. This process is on a; c is lost.

    Attributes:
        bundles, strategy: that were asked for.
        started: the arguments of QuireProcess.run of each actor, and the bundle that it is in.
        machines: of each bundle; None: Ray has no room.
        is_open: the places are reserved.
        is_lost: machines do not answer.
    """

    is_lost = False

    def __init__(self, machines: dict[int, str] | None) -> None:
        self.machines, self.is_open = machines, False
        self.started: list[tuple[int, tuple[Any, ...]]] = []
        self.options: list[dict[str, Any]] = []
        self.util = SimpleNamespace(
            placement_group=self._place,
            placement_group_table=lambda places: {"bundles_to_node_id": self.machines},
            remove_placement_group=self._remove,
        )

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "a")

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "NodeManagerAddress": address, "Alive": name != "c", "Resources": {"CPU": 8.0}}
            for name, address in (("a", HERE), ("b", OTHER), ("c", "10.0.0.3"))
        ]

    def _place(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.bundles, self.strategy, self.is_open = bundles, strategy, True
        return SimpleNamespace(wait=lambda seconds: self.machines is not None)

    def _remove(self, places: Any) -> None:
        self.is_open = False

    def remote(self, work: Any) -> Any:
        def options(scheduling_strategy: Any, **options: Any) -> Any:
            bundle = scheduling_strategy.placement_group_bundle_index
            self.options.append(options)
            if work is devices.free_memory_bytes:
                return SimpleNamespace(remote=lambda: 10 * GIB + bundle)

            def run(*arguments: Any) -> Any:
                self.started.append((bundle, arguments))
                return SimpleNamespace(future=Future)

            return SimpleNamespace(remote=lambda: SimpleNamespace(run=SimpleNamespace(remote=run)))

        return SimpleNamespace(options=options)

    def get(self, values: list[int], timeout: float) -> list[int]:
        if self.is_lost:
            raise TimeoutError("no answer")
        return values

    def kill(self, actor: Any) -> None:
        raise ConnectionError("the cluster is gone")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_cores", lambda: 4)
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    monkeypatch.delenv(envs.NUM_THREADS.name, raising=False)
    monkeypatch.delenv(envs.CLUSTER_KEY.name, raising=False)


def replicas_on(
    monkeypatch: pytest.MonkeyPatch, machines: dict[int, str] | None, count: int, **more: Any
) -> tuple[NotedRay, RayReplicas]:
    ray = NotedRay(machines)
    monkeypatch.setitem(sys.modules, "ray", ray)
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=_Place)
    monkeypatch.setitem(sys.modules, "ray.util", ray.util)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    free = {"a": {"CPU": 8.0}, "b": {"CPU": 2.0}}
    state = SimpleNamespace(available_resources_per_node=lambda: free)
    monkeypatch.setitem(sys.modules, "ray._private", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray._private.state", state)
    config = EngineConfig.from_kwargs(data_parallel_size=count, data_parallel_backend="ray", **more)
    return ray, RayReplicas(config)


class _Place:
    def __init__(self, places: Any, placement_group_bundle_index: int) -> None:
        self.placement_group_bundle_index = placement_group_bundle_index


def test_the_address_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Of several networks: Ray's network, unless another one is given."""
    caplog.set_level("INFO")
    replicas_on(monkeypatch, {0: "b", 1: "a"}, 2)
    replicas_on(monkeypatch, {0: "b", 1: "a"}, 2, master_addr="127.0.0.3")
    said = [line for line in caplog.messages if "connect to this machine" in line]
    assert said == [f"replicas connect to this machine at {address}" for address in (HERE, "127.0.0.3")]


def test_ray_spreads_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a number of threads each needs the cores of a machine."""
    ray, replicas = replicas_on(monkeypatch, {0: "b", 1: "a"}, 2)
    assert (ray.bundles, ray.strategy) == ([{"CPU": 4}, {"CPU": 4}], "SPREAD")
    assert replicas.address == HERE
    assert len(replicas.key) == 64, "a new one"
    replicas.close()
    assert not ray.is_open
    ray, _ = replicas_on(monkeypatch, {0: "b", 1: "a"}, 2, num_threads=2, tensor_parallel_size=2)
    assert ray.bundles == [{"CPU": 4}, {"CPU": 4}]


def test_so_many_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them here, as with vLLM; they share its cores."""
    ray, _ = replicas_on(monkeypatch, {0: "a", 1: "b", 2: "c"}, 5, data_parallel_size_local=2)
    here = {f"node:{HERE}": 0.001}
    assert (ray.bundles, ray.strategy) == ([{"CPU": 4} | here, {"CPU": 4}, {"CPU": 2}], "STRICT_SPREAD")


def test_a_gpu_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    ray, replicas = replicas_on(monkeypatch, {0: "a", 1: "b"}, 2, num_threads=1)
    assert ray.bundles == [{"CPU": 1, "GPU": 1}] * 2
    replicas.start(0, launch())
    assert ray.options[-1] == {"max_restarts": 0, "num_cpus": 1, "num_gpus": 1}
    ray, _ = replicas_on(monkeypatch, {0: "a", 1: "b"}, 2, num_threads=1, tensor_parallel_size=2)
    assert ray.bundles == [{"CPU": 2, "GPU": 2}] * 2
    ray, _ = replicas_on(monkeypatch, {0: "a", 1: "b"}, 2, num_threads=1, device="cpu")
    assert ray.bundles == [{"CPU": 1}] * 2


def launch() -> EngineLaunch:
    return EngineLaunch(EngineConfig(), "", ServerAddress(HERE, 4000), 1)


def test_what_an_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its share of the machine where Ray has its place now, and the key."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    given = {"hf_token": "secret", "num_threads": 2}
    ray, replicas = replicas_on(monkeypatch, {0: "b", 1: "a", 2: "b"}, 3, **given)
    for index in range(3):
        replicas.start(index, launch())
    ray.machines = {0: "b", 1: "a", 2: ""}
    replicas.start(0, launch())
    replicas.start(2, launch())
    told = [json.loads(arguments[1]) for _, arguments in ray.started]
    assert [bundle for bundle, _ in ray.started] == [0, 1, 2, 0, 2]
    assert [each["config"]["data_parallel_size_local"] for each in told] == [2, 1, 2, 1, 1]
    assert {each["config"]["data_parallel_size"] for each in told} == {3}
    assert [each["free_memory_bytes"] for each in told] == [10 * GIB + 2, None, 10 * GIB + 2, 10 * GIB + 2, None]
    assert "secret" not in str(ray.started)
    program, _, environment, version = ray.started[0][1]
    assert program == ("-m", "quire.entry.replica", "0")
    assert (environment[envs.CLUSTER_KEY.name].encode(), version) == (replicas.key, __version__)


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as error:
        replicas_on(monkeypatch, None, 2, num_threads=3)
    message = error.value.message
    assert f"{HERE} (this one) has 8 of 8 CPUs free; {OTHER} has 2 of 8 CPUs free, 1 too few" in message
    assert "Expected CPU 3 for each replica" in message
    assert not sys.modules["ray"].is_open, "nothing stays reserved"  # type: ignore[attr-defined]


def test_machines_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NotedRay, "is_lost", True)
    with pytest.raises(ConfigError, match=r"^The free memory of Ray's machines is not known: no answer"):
        replicas_on(monkeypatch, {0: "a", 1: "a"}, 2)
    assert not sys.modules["ray"].is_open, "nothing stays reserved"  # type: ignore[attr-defined]


def test_a_cluster_that_is_gone_ends_no_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ray, replicas = replicas_on(monkeypatch, {0: "a", 1: "b"}, 2)
    monkeypatch.setattr(ray.util, "remove_placement_group", ray.kill)
    replicas.end("an actor")
    replicas.close()
    replicas.close()
    assert caplog.text.count("the cluster is gone") == 2


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[ray\]', or leave --data-parallel-backend out"):
        RayReplicas(EngineConfig(data_parallel_size=2, data_parallel_backend="ray"))


def test_the_actor_runs_a_process(tmp_path: Path) -> None:
    """Which sees the end of the actor as the end of its standard input."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, select, sys\n"
        "line = sys.stdin.buffer.readline()\n"
        "is_open = not select.select([0], [], [], 0.1)[0]\n"
        "sys.exit(7 if line == b'{}\\n' and is_open and os.environ['WORD'] == 'x' else 1)\n"
    )
    assert QuireProcess().run(("-S", str(program)), b"{}", {"WORD": "x"}, __version__) == 7
    program.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert QuireProcess().run(("-S", str(program)), b"x" * (1 << 20), {}, __version__) == -9
    with pytest.raises(RuntimeError, match=r"installed there, and 0\.0 here"):
        QuireProcess().run(("-S", str(program)), b"{}", {}, "0.0")
