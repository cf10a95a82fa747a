"""AsyncLLM: an engine process of its own under concurrent streams, aborts, moved limits, shutdown and sudden death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio

from quire import AsyncLLM, EngineConfig, SamplingParams
from quire.entry import spawn
from quire.errors import (
    EngineDeadError,
    InvalidRequestError,
    MemoryPlanError,
    NotReadyError,
    QuireError,
    UnsupportedFieldError,
)
from quire.messages import AddRequest, SetLimits
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind
from quire.schedule import StepRecord
from tests.e2e import reference
from tests.e2e.serving import LIGHT_ENGINE
from tests.nursery import LightPopen

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 25, "num_threads": 1}
DEATH_IS_NOTICED_SECONDS = 5.0
ENDLESS = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncLLM]:
    engine = AsyncLLM(**OPTIONS)
    await engine.wait_ready()
    yield engine
    await engine.shutdown()


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are started have no model."""
    monkeypatch.setattr(spawn, "ENGINE_PROGRAM", (LIGHT_ENGINE,))
    monkeypatch.setattr("subprocess.Popen", LightPopen)


def _greedy(
    kind: RequestOutputKind = RequestOutputKind.CUMULATIVE, max_tokens: int = 20, **fields: Any
) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, output_kind=kind, **fields)


async def _outputs(engine: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, request_id)]


async def _wait_for(condition: Callable[[], bool], what: str, seconds: float = DEATH_IS_NOTICED_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        await asyncio.sleep(0.01)


async def _wait_for_end(engine: AsyncLLM) -> None:
    await _wait_for(lambda: engine._engine.num_unfinished == 0, "the requests to end")


async def test_concurrent_streams_equal_offline_tokens(engine: AsyncLLM) -> None:
    kinds = list(RequestOutputKind)
    jobs = [
        _outputs(engine, prompt, _greedy(kinds[index % 3]), f"stream-{index}")
        for index, prompt in enumerate(reference.prompts() * 3)
    ]
    for index, outputs in enumerate(await asyncio.gather(*jobs)):
        expected = reference.greedy(reference.prompts()[index % len(reference.prompts())], 20)
        assert outputs[-1].finished
        if kinds[index % 3] is RequestOutputKind.DELTA:
            tokens = [token for output in outputs for token in output.outputs[0].token_ids]
        else:
            tokens = outputs[-1].outputs[0].token_ids
        assert tokens == expected, index
        if kinds[index % 3] is RequestOutputKind.FINAL_ONLY:
            assert len(outputs) == 1


async def test_deltas_join_to_the_final_output(engine: AsyncLLM) -> None:
    fields: dict[str, Any] = {"logprobs": 2, "stop": ["path component"], "n": 2, "seed": 3}
    prompt = reference.prompts()[0]
    deltas = await _outputs(engine, prompt, _greedy(RequestOutputKind.DELTA, 40, **fields), "delta")
    (final,) = await _outputs(engine, prompt, _greedy(RequestOutputKind.FINAL_ONLY, 40, **fields), "final")
    assert len(deltas) > 5, "nothing was streamed"
    for whole in final.outputs:
        parts = [part for output in deltas for part in output.outputs if part.index == whole.index]
        assert "".join(part.text for part in parts) == whole.text
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert [entry for part in parts for entry in part.logprobs or []] == whole.logprobs
        assert parts[-1].finish_reason == whole.finish_reason == "stop"
        assert parts[-1].stop_reason == whole.stop_reason == "path component"
    assert any(output.finished for output in deltas)


async def test_abort_ends_the_stream(engine: AsyncLLM) -> None:
    num_outputs = 0
    async for output in engine.generate("Hello", ENDLESS, "to-abort"):
        assert not output.finished
        num_outputs += 1
        if num_outputs == 3:
            await engine.abort("to-abort")
    assert num_outputs >= 3
    await _wait_for_end(engine)
    await engine.abort("unknown")


async def test_leaving_the_loop_aborts(engine: AsyncLLM) -> None:
    stream = engine.generate("Hello", ENDLESS, "to-leave")
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    await _wait_for_end(engine)


async def test_refused_requests_do_not_disturb(engine: AsyncLLM) -> None:
    running = asyncio.create_task(_outputs(engine, reference.prompts()[0], _greedy(), "undisturbed"))
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        await _outputs(engine, [99_999], _greedy(), "bad")
    with pytest.raises(UnsupportedFieldError, match="--enable-lora"):
        await anext(engine.generate("a", None, "adapter", lora_request=object()))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequestError, match="in use"):
        await _outputs(engine, "a", _greedy(), "undisturbed")
    assert (await running)[-1].outputs[0].token_ids == reference.greedy(reference.prompts()[0], 20)
    await engine.check_health()


async def test_a_message_the_engine_cannot_read_concerns_nobody_else(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = engine._engine.replicas[0].client
    running = asyncio.create_task(_outputs(engine, reference.prompts()[0], _greedy(), "bystander"))
    await _wait_for(lambda: engine._engine.num_unfinished == 1, "the bystander to be sent")
    client._link.send(b"\xc1")  # no msgpack at all

    def send_spoilt(message: AddRequest) -> None:
        client._link.send(msgspec.msgpack.encode(msgspec.to_builtins(message) | {"sampling_params": 5}))

    monkeypatch.setattr(client, "send", send_spoilt)
    with pytest.raises(QuireError, match="could not take the request"):
        await _outputs(engine, "Hello", _greedy(), "spoilt")
    monkeypatch.undo()
    assert (await running)[-1].outputs[0].token_ids == reference.greedy(reference.prompts()[0], 20)
    await engine.check_health()


async def test_limits_move_while_serving(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[StepRecord] = []
    monkeypatch.setattr(engine._engine.replicas[0].output_processor.metrics, "on_step", records.append)

    async def most_running(name: str) -> int:
        records.clear()
        params = _greedy(max_tokens=40, ignore_eos=True)
        await asyncio.gather(*(_outputs(engine, "Hello", params, f"{name}-{index}") for index in range(6)))
        return max(record.num_rows for record in records)

    await engine.set_limits(SetLimits(max_num_seqs=2))
    assert await most_running("two") == 2
    await engine.set_limits(SetLimits(max_num_seqs=4, max_num_batched_tokens=8))
    assert await most_running("four") == 4
    assert max(record.num_prefill_tokens + record.num_decode_tokens for record in records) <= 8
    with pytest.raises(InvalidRequestError, match="max_num_seqs"):
        await engine.set_limits(SetLimits(max_num_seqs=0))
    await engine.set_limits(SetLimits(max_num_seqs=8, max_num_batched_tokens=64))
    assert await most_running("six") == 6


async def test_prefix_cache_can_be_reset(engine: AsyncLLM) -> None:
    prompt = reference.prompts()[0] * 3
    cached = []
    for index in range(3):
        if index == 2:
            await engine.reset_prefix_cache()
        cached.append((await _outputs(engine, prompt, _greedy(max_tokens=1), f"hit-{index}"))[-1].num_cached_tokens)
    assert cached[1] > 0
    assert cached[2] == 0


@pytest.mark.usefixtures("light")
async def test_shutdown_ends_streams_and_the_process() -> None:
    engine = AsyncLLM.from_engine_args(EngineConfig(**OPTIONS))
    stream = engine.generate("Hello", ENDLESS, "endless")
    await anext(stream)
    pid = engine._processes.handles[0].pid
    assert pid is not None
    folder = engine._processes.handles[0].socket_folder
    assert folder is not None
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o777 == 0o700, "others can reach the sockets"
    done = engine.shutdown()
    assert engine.shutdown() is done
    with pytest.raises(EngineDeadError, match="shutting down"):
        async for _ in stream:
            pass
    await done
    assert not psutil.pid_exists(pid)
    assert not folder.exists()
    with pytest.raises(EngineDeadError):
        await _outputs(engine, "Hello", _greedy(), "late")


@pytest.mark.usefixtures("light")
async def test_engine_death_and_recovery() -> None:
    """Requests go on in the next engine, and new requests wait for it."""
    engine = AsyncLLM(**OPTIONS)
    try:
        prompt, whole = reference.prompts()[0], _greedy(RequestOutputKind.FINAL_ONLY)
        expected = (await _outputs(engine, prompt, whole, "undisturbed"))[-1].outputs[0].token_ids
        long = SamplingParams(temperature=1.0, seed=7, max_tokens=500, ignore_eos=True)
        answer = [output async for output in engine.generate("Hello", long, "long")]
        streams = [engine.generate("Hello", long, f"long-{index}") for index in range(3)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        waiting = asyncio.create_task(_outputs(engine, prompt, whole, "whole"))
        await _wait_for(lambda: engine._engine.num_unfinished == 4, "the request to be sent")
        assert engine._processes.handles[0].pid is not None
        os.kill(engine._processes.handles[0].pid, signal.SIGKILL)
        await _wait_for(lambda: engine._engine.is_restarting, "the death to be noticed")
        with pytest.raises(NotReadyError):
            await engine.check_health()
        late = asyncio.create_task(_outputs(engine, prompt, _greedy(), "late"))
        for task in (waiting, late):
            assert (await task)[-1].outputs[0].token_ids == expected
        for stream in streams:
            rest = [output async for output in stream]
            assert rest[-1].outputs[0].token_ids == answer[-1].outputs[0].token_ids
        await engine.check_health()
    finally:
        await engine.shutdown()


@pytest.mark.usefixtures("light")
async def test_two_replicas() -> None:
    engine = AsyncLLM(**OPTIONS, data_parallel_size=2)
    try:
        params = _greedy(RequestOutputKind.FINAL_ONLY, ignore_eos=True)
        streams = [engine.generate("Hello", params, f"r{rank}", data_parallel_rank=rank) for rank in (0, 1)]
        (first,), (second,) = await asyncio.gather(*(_collected(stream) for stream in streams))
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        assert all(replica.records for replica in engine._engine.replicas), "each has computed one"
        await engine.set_limits(SetLimits(max_num_seqs=2))
        await engine.reset_prefix_cache()
        with pytest.raises(InvalidRequestError, match="no replica of this rank"):
            await anext(engine.generate("Hello", params, "r2", data_parallel_rank=2))
        pids = [handle.pid for handle in engine._processes.handles]
    finally:
        await engine.shutdown()
    assert not any(pid is not None and psutil.pid_exists(pid) for pid in pids)


async def _collected(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


@pytest.mark.usefixtures("light")
async def test_a_start_that_fails_says_why() -> None:
    engine = AsyncLLM(**OPTIONS | {"kv_cache_memory_bytes": 100_000})
    try:
        with pytest.raises(MemoryPlanError, match="--kv-cache-memory-bytes"):
            await engine.wait_ready()
    finally:
        await engine.shutdown()


SCRIPT = """
import asyncio, sys
from quire import AsyncEngineArgs
from quire import AsyncLLM
from quire import SamplingParams
from quire.entry import spawn
from quire.sampling_params import RequestOutputKind

spawn.ENGINE_PROGRAM = (sys.argv[1],)

async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(kv_cache_memory_bytes=1 << 24, num_threads=1))
    params = SamplingParams(max_tokens=5, temperature=0.0, output_kind=RequestOutputKind.DELTA, ignore_eos=True)
    try:
        async for output in engine.generate(request_id="1", prompt="Hello", sampling_params=params):
            for completion in output.outputs:
                print(len(completion.token_ids), flush=True)
        print(engine._processes.handles[0].pid, flush=True)
    finally:
        {end}
    return engine

engine = asyncio.run(main())
print(int(engine._engine.replicas[0].client._link._context.closed))
"""


async def test_vllm_script_without_await_at_the_end() -> None:
    """vLLM's shutdown() is a plain function: a script that does not await ours must end as cleanly."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT.format(end="engine.shutdown()"), LIGHT_ENGINE]
    result = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    *counts, pid, is_closed = map(int, result.stdout.split())
    assert sum(counts) == 5
    assert is_closed, "the sockets stayed open"
    assert not psutil.pid_exists(pid)


async def test_engine_ends_with_a_killed_parent() -> None:
    command = [sys.executable, "-c", SCRIPT.format(end="await asyncio.sleep(60)"), LIGHT_ENGINE]
    with LightPopen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        lines = [int(parent.stdout.readline()) for _ in range(6)]
        engine = psutil.Process(lines[-1])
        sockets = {connection.laddr for connection in engine.net_connections("unix")}
        parent.kill()
    await _wait_for(lambda: not engine.is_running(), "the engine to follow its parent")
    assert not [path for path in sockets if path and Path(str(path)).exists()]
