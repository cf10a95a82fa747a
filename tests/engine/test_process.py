"""What an engine process does before it is ready."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from quire import envs
from quire.config import EngineConfig
from quire.distributed import wire
from quire.engine import process, server_link, start
from quire.errors import ConfigError, EngineDeadError, VocabularyError
from quire.frontend.client import ProcessClient
from quire.frontend.engine_link import TcpLink, UnixLink
from quire.messages import (
    AddRequest,
    Command,
    EngineBeat,
    EngineBegun,
    EngineFailed,
    EngineLaunch,
    EngineMessage,
    EngineProgress,
    EngineReady,
    Progress,
    ServerAddress,
    UnixSockets,
    UseTokenizer,
    joined,
)
from quire.sampling_params import SamplingParams

TOKENIZER = UseTokenizer("a tokenizer.json", [2])


@pytest.mark.parametrize("fails", [False, True])
async def test_tables_for_constraints_are_made_before_it_is_ready(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Making them holds the interpreter: no step waits for it. A tokenizer that has none stops no engine."""
    order: list[Any] = []

    def use_tokenizer(message: UseTokenizer) -> None:
        order.append(message)
        if fails:
            raise VocabularyError("No tables")

    def ready_message() -> EngineReady:
        order.append("ready")
        return EngineReady(100, 10, 16, 4, 64)

    core = Mock(adapters=None, use_tokenizer=use_tokenizer, predicted_seconds=0.0)
    core.has_work.return_value = False
    idle = {"take_memory": lambda: False, "calibrate": lambda: False, "keep_costs": lambda: None}
    started = SimpleNamespace(core=core, ready_message=ready_message, **idle)
    monkeypatch.setattr(start, "start_engine", lambda *arguments, **options: started)
    with tempfile.TemporaryDirectory() as folder:
        sockets = UnixSockets(f"ipc://{folder}/input", f"ipc://{folder}/output")
        client = ProcessClient(UnixLink(sockets), first=TOKENIZER)
        engine = process.EngineProcess(EngineLaunch(EngineConfig(), "model", sockets, gets_tokenizer=True))
        thread = threading.Thread(target=engine.run)
        thread.start()
        try:
            while not isinstance(await client.receive(), EngineReady):
                pass
            client.send(Command("shutdown"))
        finally:
            thread.join(30)
            engine.close()
            client.close()
    assert order == [TOKENIZER, "ready"]
    core.shutdown.assert_called_once()


async def test_continuations_come_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets each of them."""
    params = SamplingParams(n=3, seed=5, prompt_logprobs=1, temperature=0.5)
    names = ("a", "a.1", "a.2")
    asked = [
        AddRequest(
            name, [1, 2, 3], params.continuation(index), 9, [2], 1.5, 3, "salt", "digest", "a" if index else None
        )
        for index, name in enumerate(names)
    ]
    added: list[AddRequest] = []
    core = Mock(adapters=None, add=lambda message: added.extend(message.continuations()), predicted_seconds=0.0)
    core.has_work.return_value = False
    idle = {"take_memory": lambda: False, "calibrate": lambda: False, "keep_costs": lambda: None}
    started = SimpleNamespace(core=core, ready_message=lambda: EngineReady(100, 10, 16, 4, 64), **idle)
    monkeypatch.setattr(start, "start_engine", lambda *arguments, **options: started)
    with tempfile.TemporaryDirectory() as folder:
        sockets = UnixSockets(f"ipc://{folder}/input", f"ipc://{folder}/output")
        client = ProcessClient(UnixLink(sockets))
        engine = process.EngineProcess(EngineLaunch(EngineConfig(), "model", sockets))
        thread = threading.Thread(target=engine.run)
        thread.start()
        try:
            while not isinstance(await client.receive(), EngineReady):
                pass
            client.send(joined(asked))
            client.send(Command("shutdown"))
        finally:
            thread.join(30)
            engine.close()
            client.close()
    assert added == asked


async def test_what_it_begins_is_delivered_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that only waits to be sent would be lost with a process that the request ends."""
    delivered: list[bytes] = []
    monkeypatch.setattr(server_link.UnixLink, "deliver", lambda link, frame: delivered.append(frame))

    def start_engine(*arguments: Any, on_begun: Callable[[list[str]], None], **options: Any) -> None:
        on_begun(["a", "b"])
        assert [msgspec.msgpack.decode(frame, type=EngineMessage) for frame in delivered] == [EngineBegun(["a", "b"])]
        raise ConfigError("This test has no engine")

    monkeypatch.setattr(start, "start_engine", start_engine)
    with tempfile.TemporaryDirectory() as folder:
        sockets = UnixSockets(f"ipc://{folder}/input", f"ipc://{folder}/output")
        client = ProcessClient(UnixLink(sockets))
        engine = process.EngineProcess(EngineLaunch(EngineConfig(), "model", sockets))
        assert await asyncio.to_thread(engine.run) == 1
        while not isinstance(message := await client.receive(), EngineFailed):
            pass
        engine.close()
        client.close()
    assert message.message == "This test has no engine."


async def test_an_engine_finds_the_model_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """And reports the fault to its server, over a connection."""
    monkeypatch.setenv(envs.CLUSTER_KEY.name, "of the tests, long enough")
    listener = wire.listen("127.0.0.1", 0)
    client = ProcessClient(TcpLink(listener, b"of the tests, long enough"))
    launch = EngineLaunch(EngineConfig(), "", ServerAddress(*listener.getsockname()))

    def find(launch: EngineLaunch, progress: Progress) -> tuple[Path, Path | None]:
        progress("download", 0.5, "a file")
        raise ConfigError("There is no such model here")

    def run() -> int:
        engine = process.EngineProcess(launch, find_model=find)
        try:
            return engine.run()
        finally:
            engine.close()

    running = asyncio.ensure_future(asyncio.to_thread(run))
    received: list[EngineMessage] = []
    while not received or not isinstance(received[-1], EngineFailed):
        received.append(await client.receive())
    with pytest.raises(EngineDeadError, match="connection to the engine is closed"):
        await client.receive()
    assert await running == 1
    assert EngineBeat(0.0) in received, "while it looks for the model, too"
    progress, failed = (message for message in received if not isinstance(message, EngineBeat))
    assert isinstance(progress, EngineProgress)
    assert failed == EngineFailed("There is no such model here.", ConfigError.code)
    client.close()


def test_a_server_that_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_link, "CONNECT_SECONDS", 0.1)
    monkeypatch.setenv(envs.CLUSTER_KEY.name, "of the tests, long enough")
    with wire.listen("127.0.0.1", 0) as listener:
        server = ServerAddress(*listener.getsockname())
    with pytest.raises(TimeoutError, match="no program listens"):
        process.EngineProcess(EngineLaunch(EngineConfig(), "", server))
