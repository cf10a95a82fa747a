"""Names of adapters on two replicas: load, replace, unload, failures, and the messages to a new engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from quire.errors import (
    AdapterNotFoundError,
    EngineRestartedError,
    InvalidRequestError,
    ModelNotFoundError,
)
from quire.frontend.stream import RequestStream
from quire.lora.facts import AdapterFacts
from quire.lora.modules import LoraModule
from quire.lora.request import LoRARequest
from quire.messages import AdapterState, AddRequest, EngineInput, LoadAdapter, UnloadAdapter
from quire.sampling_params import RequestOutputKind, SamplingParams
from tests.frontend.test_replicas import Two, go_on, text_of
from tests.frontend.test_supervisor import until

PATHS = {"/sql": "digest 1", "/fin": "digest 2"}


def two(**options: Any) -> Two:
    return Two(adapters=PATHS, **options)


async def ask(engine: Two, request_id: str, adapter: str | None, **fields: Any) -> RequestStream:
    params = SamplingParams(**{"max_tokens": 9, "output_kind": RequestOutputKind.DELTA} | fields)
    return await engine.engine.add_request("ab", params, request_id, adapter=adapter)


def told(engine: Two, index: int) -> list[EngineInput]:
    return [
        message for message in engine.launchers[index].client.sent if isinstance(message, (LoadAdapter, UnloadAdapter))
    ]


async def test_one_replica_reads_and_all_know() -> None:
    async with two() as engine:
        adapters = engine.engine.adapters
        sql = await adapters.load("sql", "/sql", base_model_name="base")
        assert told(engine, 0) == [LoadAdapter(0, "/sql")]
        assert told(engine, 1) == [LoadAdapter(-1, "/sql", "digest 1")]
        assert adapters.by_name == {"sql": sql}
        assert (sql.digest, sql.lora_int_id, sql.base_model_name) == ("digest 1", 1, "base")
        streams = [await ask(engine, name, "sql", n=2) for name in "ab"]
        for launcher in engine.launchers:
            assert [message.adapter for message in launcher.client.sent if isinstance(message, AddRequest)] == [
                "digest 1"
            ] * 2
        outputs = [output for stream in streams async for output in stream]
        request = LoRARequest("sql", 1, "/sql", "base")
        assert all(output.lora_request == output.outputs[0].lora_request == request for output in outputs)
        assert engine.value("quire_lora_loads", 0, result="ok") == 1


async def test_what_a_request_waits_for_is_said() -> None:
    """So that it is read without rests."""
    async with two() as engine:
        await engine.engine.adapters.ensure(LoRARequest("sql", 1, "/sql"))
        await engine.engine.adapters.load("fin", "/fin")
        loads = [message for message in told(engine, 0) if isinstance(message, LoadAdapter) and message.digest is None]
        assert [(load.path, load.is_awaited) for load in loads] == [("/sql", True), ("/fin", False)]


async def test_unloading_spares_who_runs() -> None:
    async with two(step_seconds=0.001) as engine:
        adapters = engine.engine.adapters
        await adapters.load("sql", "/sql")
        stream = await ask(engine, "running", "sql", max_tokens=100)
        await anext(stream)
        await adapters.unload("sql")
        assert [told(engine, index)[-1] for index in range(2)] == [UnloadAdapter("digest 1", "/sql")] * 2
        with pytest.raises(ModelNotFoundError, match="no adapter of this name"):
            await ask(engine, "late", "sql")
        assert await text_of(stream)
        with pytest.raises(ModelNotFoundError, match="'sql' cannot be found"):
            await adapters.unload("sql")


async def test_replacing_needs_to_be_asked_for_and_keeps_the_number() -> None:
    async with two() as engine:
        adapters = engine.engine.adapters
        await adapters.load("fin", "/fin")
        await adapters.load("sql", "/sql")
        with pytest.raises(InvalidRequestError, match="'sql' has already been loaded"):
            await adapters.load("sql", "/fin")
        new = await adapters.load("sql", "/fin", load_inplace=True)
        assert (new.digest, new.lora_int_id) == ("digest 2", 2)
        assert told(engine, 1)[-2:] == [LoadAdapter(-1, "/fin", "digest 2"), UnloadAdapter("digest 1", "/sql")]


async def test_what_cannot_be_read_changes_nothing() -> None:
    async with two() as engine:
        adapters = engine.engine.adapters
        sql = await adapters.load("sql", "/sql")
        with pytest.raises(AdapterNotFoundError):
            await adapters.load("sql", "/missing", load_inplace=True)
        assert adapters.by_name == {"sql": sql}
        with pytest.raises(InvalidRequestError, match="cannot have this name"):
            await adapters.load("../sql", "/sql")


async def test_operations_on_one_name_come_one_after_another() -> None:
    """One of two loads of one name wins; an unload that comes during a load finds the name."""
    async with two() as engine:
        adapters, first = engine.engine.adapters, engine.launchers[0].client
        first.holds_adapters = True
        loads = [asyncio.create_task(adapters.load("sql", path)) for path in PATHS]
        other = asyncio.create_task(adapters.load("other", "/fin"))
        unload = asyncio.create_task(adapters.unload("sql"))
        await until(lambda: len(told(engine, 0)) == 2)  # of sql and other
        first.holds_adapters = False
        for message in told(engine, 0):
            assert isinstance(message, LoadAdapter)
            first._load(message)
        assert (await loads[0]).digest == "digest 1"
        with pytest.raises(InvalidRequestError):
            await loads[1]
        await unload
        await other
        assert list(adapters.by_name) == ["other"]


async def test_near_names() -> None:
    async with two() as engine:
        await engine.engine.adapters.load("sql-expert", "/sql")
        with pytest.raises(ModelNotFoundError, match="Did you mean sql-expert"):
            await ask(engine, "r", "sql-xpert")


async def test_a_new_engine_knows_the_adapters_before_the_requests() -> None:
    """Also the version of a waiting request that was replaced, which is unloaded after it."""
    async with two() as engine:
        adapters = engine.engine.adapters
        await adapters.load("sql", "/sql")
        engine.pause()
        stream = await ask(engine, "old", "sql")
        await adapters.load("sql", "/fin", load_inplace=True)
        engine.launchers[1].next_is_ready = False  # or it would take the request over
        for launcher in engine.launchers:
            launcher.client.die("killed")
        await until(lambda: len(engine.launchers[0].clients) == 2 and engine.replicas[0].is_ready)
        assert adapters_of(engine.launchers[0].client.sent) == [("LoadAdapter", "digest 2"), *_OLD]
        assert await text_of(stream)


async def test_another_engine_knows_the_adapters_before_the_requests() -> None:
    async with two() as engine:
        adapters = engine.engine.adapters
        await adapters.load("sql", "/sql")
        engine.pause()
        streams = [await ask(engine, name, "sql") for name in ("old", "of the other")]
        await adapters.load("sql", "/fin", load_inplace=True)
        other = engine.launchers[1].client
        before = len(other.sent)
        engine.launchers[0].client.die("killed")
        await until(lambda: engine.replicas[1].num_unfinished == 2)
        assert adapters_of(other.sent[before:]) == _OLD
        go_on(other)
        assert all([await text_of(stream) for stream in streams])


_OLD = [("LoadAdapter", "digest 1"), ("AddRequest", "digest 1"), ("UnloadAdapter", "digest 1")]


def adapters_of(messages: Sequence[EngineInput]) -> list[tuple[str, str | None]]:
    """The kinds of messages, with the adapters in them."""
    return [
        (type(message).__name__, getattr(message, "digest", None) or getattr(message, "adapter", None))
        for message in messages
    ]


async def test_an_engine_that_fails_while_it_reads() -> None:
    async with two() as engine:
        client = engine.launchers[0].client
        client.holds_adapters = True
        load = asyncio.create_task(engine.engine.adapters.load("sql", "/sql"))
        await until(lambda: told(engine, 0))
        client.die("killed")
        with pytest.raises(EngineRestartedError, match="while it read the adapter"):
            await load
        assert not engine.engine.adapters.by_name


async def test_who_leaves_during_a_load_leaves_nothing() -> None:
    async with two() as engine:
        client = engine.launchers[0].client
        client.holds_adapters = True
        load = asyncio.create_task(engine.engine.adapters.load("sql", "/sql"))
        await until(lambda: told(engine, 0))
        load.cancel()
        await asyncio.wait([load])
        client.holds_adapters = False
        client._load(LoadAdapter(0, "/sql"))
        await until(lambda: UnloadAdapter("digest 1", "/sql") in told(engine, 0))
        assert not engine.engine.adapters.by_name


async def test_who_leaves_at_the_moment_of_the_answer_leaves_nothing() -> None:
    async with two() as engine:
        client = engine.launchers[0].client
        client.holds_adapters = True
        load = asyncio.create_task(engine.engine.adapters.load("sql", "/sql"))
        await until(lambda: told(engine, 0))
        client.holds_adapters = False
        engine.replicas[0].on_message(AdapterState(path="/sql", operation=0, facts=AdapterFacts("digest 1", 8, 1, 1)))
        client._loaded.append("digest 1")
        load.cancel()
        await asyncio.wait([load])
        assert told(engine, 0)[-1] == UnloadAdapter("digest 1", "/sql")
        assert not engine.engine.adapters.by_name


async def test_adapters_of_the_start_come_before_the_first_request() -> None:
    modules = [LoraModule("sql", "/sql"), LoraModule("fin", "/fin")]
    async with two(modules=modules) as engine:
        assert list(engine.engine.adapters.by_name) == ["sql", "fin"]
    with pytest.raises(AdapterNotFoundError):
        async with two(modules=[LoraModule("sql", "/missing")]):
            pass


async def test_names_of_adapters_in_use_are_one_series() -> None:
    async with two() as engine:
        engine.metrics.show_adapters(engine.engine.adapter_names)
        await engine.engine.adapters.load("sql", "/sql")
        await engine.engine.adapters.load("fin", "/fin")
        engine.pause()
        for name in ("sql", "fin"):
            for index in range(2):
                await ask(engine, f"{name}{index}", name)
        (line,) = [line for line in engine.metrics.render().decode().splitlines() if line.startswith("vllm:lora_req")]
        assert line.startswith(
            'vllm:lora_requests_info{max_lora="None",running_lora_adapters="",waiting_lora_adapters="fin,sql"} '
        )
