"""`quire serve -dp 2 --data-parallel-backend ray`: replicas on two machines of a Ray cluster, behind one API.

Other tests need no cluster: their places only note the started processes.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

import quire.demo
from quire import AsyncLLM, SamplingParams, envs
from quire.config import EngineConfig
from quire.engine.nodes import checkpoint
from quire.engine.server_link import TcpLink
from quire.entry import launch, ray_replica
from quire.entry.launch import EngineProcesses
from quire.entry.ray_replica import RayReplica
from quire.entry.replica import find
from quire.errors import ConfigError, EngineDeadError
from quire.messages import EngineLaunch, EngineProgress, ServerAddress, UseTokenizer
from tests.e2e import reference
from tests.e2e.serving import INTERPRETER, SMALL, START_SECONDS, Serve
from tests.e2e.serving import quire as run_quire
from tests.e2e.test_replicas import post, texts, values
from tests.frontend.test_supervisor import until
from tests.ray_cluster import OTHER, processes_with, two_machines

ON_RAY = ("-dp", "2", "--data-parallel-backend", "ray", *SMALL)
ENGINE = "quire.entry.replica"
LONG = {"prompt": "Hello", "max_tokens": 300, "temperature": 0, "ignore_eos": True}


def on_ray(function: Any) -> Any:
    """A test over a cluster."""
    for mark in (pytest.mark.slow, pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("cluster")):
        function = mark(function)  # the warnings are Ray's own
    return function


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with two_machines(other_cpus=2):
        yield


def actors() -> list[int]:
    """Processes of Ray that run one of ours, and idle ones."""
    return [each.pid for each in psutil.process_iter(["name"]) if each.info["name"].startswith("ray::Quire")]


def restarts(server: Serve, reason: str) -> list[float]:
    return sorted(values(server, "quire_engine_restarts_total", reason=reason).values())


@on_ray
def test_replicas_on_two_machines() -> None:
    """Their answers equal one process's; each is replaced alone; none is left behind a server that is killed."""
    with Serve(*ON_RAY, program=INTERPRETER) as server, ThreadPoolExecutor(8) as pool:
        places = re.search(r"places for the replicas: 0 on (\S+), 1 on (\S+)", server.log)
        assert places is not None, server.log
        assert OTHER in places.groups()
        here = os.environ["RAY_ADDRESS"].partition(":")[0]
        assert f"replicas connect to this machine at {here}" in server.log, "one of two networks"
        assert places[1] != places[2]
        prompt = reference.TEXTS[0]
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
        assert texts(server, 4, body) == {reference.tokenizer().decode(reference.greedy(prompt, 12))}
        tokens = values(server, "vllm:generation_tokens_total")
        assert tokens.keys() == {"0", "1"}
        assert all(tokens.values())

        (expected,) = texts(server, 1, LONG)
        futures = [pool.submit(post, server, "/v1/completions", LONG) for _ in range(6)]
        server.wait_for(lambda: sum(values(server, "vllm:num_requests_running").values()) == 6, "all to run")
        killed, other = processes_with(ENGINE)
        os.kill(killed, signal.SIGKILL)
        assert {future.result().json()["choices"][0]["text"] for future in futures} == {expected}
        assert server.get("/health").status_code == 200
        server.wait_for(lambda: "the engine is ready again" in server.log, "the next engine", START_SECONDS)
        assert "The engine process was ended by SIGKILL" in server.log
        assert restarts(server, "crash") == [0, 1]
        assert other in processes_with(ENGINE)
        assert len(texts(server, 4, body)) == 1

        os.kill(other, signal.SIGSTOP)  # only Ray can end it: it does not notice that its connection is closed
        server.wait_for(lambda: other not in processes_with(ENGINE), "its end", 30.0)
        server.wait_for(lambda: server.log.count("the engine is ready again") == 2, "the next one", START_SECONDS)
        assert restarts(server, "silent") == [0, 1]
        assert len(texts(server, 4, body)) == 1

        assert len(processes_with(ENGINE)) == len(actors()) == 2
        stopped = psutil.Process(processes_with(ENGINE)[0])
        stopped.suspend()
        (actor,) = (each for each in stopped.parents() if each.pid in actors())
        actor.kill()
        server.wait_for(lambda: not stopped.is_running(), "the end of an engine without its actor", 5.0)
        server.process.kill()
        server.process.wait()
        until = time.monotonic() + 5.0
        while processes_with(ENGINE) or actors():
            assert time.monotonic() < until, (processes_with(ENGINE), actors())
            time.sleep(0.05)


@on_ray
def test_two_on_one_machine() -> None:
    """They share its memory. The next server finds the places free."""
    body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
    with Serve(*ON_RAY, "-dp", "3", program=INTERPRETER) as server:
        assert len(re.findall(rf"\d on {re.escape(OTHER)}\b", server.log)) == 2
        assert len(texts(server, 6, body)) == 1
        assert len(processes_with(ENGINE)) == len(values(server, "vllm:num_requests_running")) == 3
        assert server.stop() == 0
    assert not processes_with(ENGINE)
    with Serve(*ON_RAY, "-dpl", "1", program=INTERPRETER) as server:
        assert re.search(rf"0 on (?!{re.escape(OTHER)})\S+, 1 on {re.escape(OTHER)}", server.log)
        assert len(texts(server, 4, body)) == 1


@on_ray
def test_what_ray_cannot_place_is_said() -> None:
    before = time.monotonic()
    ended = run_quire("serve", "--port", "0", *ON_RAY, "-dp", "4", program=INTERPRETER)
    assert time.monotonic() - before < 25.0
    assert ended.returncode == 2
    assert "Ray has no room for 4 replicas" in ended.stderr
    assert sorted(re.findall(r" has (\d of \d) CPUs free", ended.stderr)) == ["1 of 1", "2 of 2"]
    assert "Expected CPU 1 for each replica" in ended.stderr
    ended = run_quire("serve", "--port", "0", *ON_RAY, "-dpl", "2", program=INTERPRETER)
    assert ended.returncode == 2
    assert re.search(r"\(this one\) has 1 of 1 CPUs free, 1 too few", ended.stderr)
    assert "Expected CPU 1 for each replica: 2 here" in ended.stderr


@on_ray
async def test_async_llm() -> None:
    """Its ranks are processes of the machine where its replica is."""
    options = {"kv_cache_memory_bytes": "32M", "num_threads": 1, "dtype": "float32", "tensor_parallel_size": 2}
    engine = AsyncLLM(data_parallel_backend="ray", **options)
    try:
        params = SamplingParams(max_tokens=12, temperature=0.0)
        async for output in engine.generate(reference.TEXTS[0], params, "a"):
            tokens = output.outputs[0].token_ids
        assert list(tokens) == reference.greedy(reference.TEXTS[0], 12)
        assert len(processes_with(ENGINE)) == len(processes_with("quire.engine.rank_process")) == 1
    finally:
        await engine.shutdown()
    assert not processes_with(ENGINE) + processes_with("quire.engine.rank_process")
    assert not sys.modules["ray"].is_initialized()


def test_places_are_given_back() -> None:
    closed: list[bool] = []
    EngineProcesses([], SimpleNamespace(close=lambda: closed.append(True))).stop()  # type: ignore[arg-type]
    assert closed


class NotedPlaces:
    """A RayReplicas whose engines are threads of the test."""

    address, key = "127.0.0.1", b"of the tests, long enough"

    def __init__(self) -> None:
        self.launches: list[EngineLaunch] = []
        self.codes: list[Future[int]] = []
        self.error: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()

    def start(self, index: int, launch: EngineLaunch) -> tuple[str, Future[int]]:
        assert self.answers.wait(5.0)
        if self.error is not None:
            raise self.error
        self.launches.append(launch)
        self.codes.append(Future())
        return f"actor {len(self.codes)}", self.codes[-1]

    def end(self, actor: str) -> None:
        code = self.codes[int(actor.removeprefix("actor ")) - 1]
        if not code.done():
            code.set_exception(RuntimeError("The actor was killed"))


TOKENIZER = UseTokenizer("a tokenizer.json", [2])


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> NotedPlaces:
    monkeypatch.setenv(envs.CLUSTER_KEY.name, NotedPlaces.key.decode())
    return NotedPlaces()


def handle_over(places: Any) -> RayReplica:
    config = EngineConfig(data_parallel_size=2, data_parallel_backend="ray")
    return RayReplica(config, quire.demo.path("target"), places, 1, TOKENIZER)


async def test_one_engine_after_another(places: NotedPlaces) -> None:
    handle = handle_over(places)
    for number in range(2):
        client = handle.launch()
        await until(lambda: len(places.launches) == number + 1)  # noqa: B023
        given = places.launches[-1]
        assert (given.is_first, given.engine_index, given.gets_tokenizer) == (number == 0, 1, True)
        assert given.checkpoint == checkpoint(quire.demo.path("target"), is_dummy=False)
        assert isinstance(given.link, ServerAddress)
        receiving = asyncio.ensure_future(client.receive())
        engine = await asyncio.to_thread(TcpLink, given.link, lambda: None)
        engine.send(msgspec.msgpack.encode(EngineProgress("load", 0.5, engine_index=1)))
        assert isinstance(await receiving, EngineProgress)
        assert msgspec.msgpack.decode(await asyncio.to_thread(engine.receive), type=UseTokenizer) == TOKENIZER
        assert handle.is_alive()
        assert handle.describe_end() is None
        engine.close()
        places.codes[-1].set_result(-9)
        with pytest.raises(EngineDeadError):
            await client.receive()
        assert not client.is_alive
        client.close()
        handle.kill()
        assert not handle.is_alive()
        assert "The engine process was ended by SIGKILL" in (handle.describe_end() or "")
        handle.kill()  # as a stop after it


async def test_an_engine_that_never_came(places: NotedPlaces, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client learns it from Ray, which also ends a process that does not end by itself."""
    monkeypatch.setattr(ray_replica, "END_SECONDS", 0.1)
    handle = handle_over(places)
    client = handle.launch()
    places.codes[0].set_exception(RuntimeError("A trace\n\tThe node died"))
    with pytest.raises(EngineDeadError, match="The engine process has ended"):
        await client.receive()
    client.close()
    assert handle.describe_end() == "Ray has not started replica 1, or has lost it: The node died"
    client = handle.launch()
    handle.kill()
    assert places.codes[-1].done(), "Ray has ended it"
    assert handle.describe_end() is None, "it was told to"
    client.close()
    places.error = RuntimeError("A trace\nThe cluster is gone")
    client = handle.launch()
    with pytest.raises(EngineDeadError, match="The engine process has ended"):
        await client.receive()
    client.close()
    assert handle.describe_end() == "Ray has not started replica 1, or has lost it: The cluster is gone"
    with pytest.raises(OSError, match="Ray cannot start it: The cluster is gone"):
        handle_over(places).launch()


async def test_a_slow_cluster_holds_nobody_up(places: NotedPlaces, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica starts again while the server answers others. If it is not wanted any more, it ends when it comes."""
    monkeypatch.setattr(ray_replica, "END_SECONDS", 0.1)
    handle = handle_over(places)
    handle.launch().close()
    handle.kill()
    places.answers.clear()
    before = time.monotonic()
    client = handle.launch()
    assert time.monotonic() - before < 1.0
    assert handle.is_alive()
    handle.kill()
    assert handle.describe_end() is None, "it was told to"
    places.answers.set()
    await until(lambda: len(places.codes) == 2 and places.codes[-1].done())
    assert not handle.is_alive()
    client.close()


async def test_nobody_waits_on_the_loop_for_engines_to_end() -> None:
    """AsyncLLM.shutdown returns at once, and its result is done when they have ended."""
    has_ended, closed = threading.Event(), list[str]()

    async def end() -> None:
        closed.append("engine")

    llm = AsyncLLM.__new__(AsyncLLM)
    llm._engine = SimpleNamespace(close=lambda: None, shutdown=end)  # type: ignore[assignment]
    llm._processes = SimpleNamespace(stop=lambda: has_ended.wait(5.0))  # type: ignore[assignment]
    llm._shutdown = None
    before = time.monotonic()
    done = llm.shutdown()
    await until(lambda: bool(closed))
    assert time.monotonic() - before < 1.0
    assert not done.done()
    has_ended.set()
    await done


def test_what_was_started_is_closed_if_a_later_replica_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[int]()

    class Handle:
        def __init__(self, index: int) -> None:
            self.index = index

        def launch(self) -> Any:
            if self.index == 2:
                raise OSError(12, "Cannot allocate memory")
            return SimpleNamespace(close=lambda: closed.append(self.index))

        def tell_to_stop(self) -> None: ...

        def stop(self) -> None: ...

    handles: Any = [Handle(index) for index in range(3)]
    monkeypatch.setattr(launch, "_engine_processes", lambda *arguments: EngineProcesses(handles, None))
    parts: Any = SimpleNamespace(input_processor=None, tokenizer=None, model_name="")
    with pytest.raises(OSError, match="Cannot allocate memory"):
        launch.start_async_engine(EngineConfig(data_parallel_size=3), parts, has_constraints=False)
    assert closed == [0, 1]


async def test_an_address_that_cannot_be_listened_at(places: NotedPlaces) -> None:
    """It is an error of the config for the first engine; the next ones are tried again."""
    handle, places.address = handle_over(places), "0.0.0.0"
    with pytest.raises(ConfigError, match="from all networks"):
        handle.launch()
    places.address = "127.0.0.1"
    handle.launch().close()
    places.address = "0.0.0.0"
    with pytest.raises(OSError, match="from all networks"):
        handle.launch()


def test_the_model_must_be_that_of_the_server(tmp_path: Path) -> None:
    folder = quire.demo.path("target")
    wanted = EngineLaunch(EngineConfig(), "", ServerAddress("", 0), 1, checkpoint=checkpoint(folder, is_dummy=False))
    assert find(wanted, print) == (folder, None)
    wanted.checkpoint = "another"
    with pytest.raises(ConfigError, match=rf"where Ray has placed replica 1, is another one.*{folder}.*another"):
        find(wanted, print)
