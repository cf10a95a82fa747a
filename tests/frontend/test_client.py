"""ProcessClient against a small engine at the other end of its link; EchoClient as other tests rely on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import msgspec
import pytest

from quire.engine.server_link import ServerLink
from quire.errors import EngineDeadError, InvalidRequestError, QueueFullError
from quire.frontend import client as client_module
from quire.frontend.client import ProcessClient
from quire.frontend.echo_client import EchoClient
from quire.messages import (
    Abort,
    AddRequest,
    Command,
    EngineFailed,
    EngineInput,
    EngineOutputs,
    EngineReady,
    RequestDelta,
    SetLimits,
)
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.schedule import TokenLogprobs
from tests.frontend.links import Ends

READY = EngineReady(100, 10, 16, 4, 64, {"max_model_len": {"value": 100, "source": "flag"}})


def add(request_id: str = "a", prompt: tuple[int, ...] = (5, 6, 7), **params: object) -> AddRequest:
    limits = {"max_tokens": 4, "stop_token_ids": [2]} | params
    sampling = SamplingParams(output_kind=RequestOutputKind.DELTA, logit_bias={3: 1.5}, **limits)
    return AddRequest(request_id, list(prompt), sampling, sampling.max_tokens or 4, [2], fork_of="b")


class TinyEngine(threading.Thread):
    """Answers every message with one delta that spells it, until the command shutdown."""

    def __init__(self, connect: Callable[[], ServerLink]) -> None:
        super().__init__(daemon=True)
        self.connect = connect
        self.received: list[EngineInput] = []

    def run(self) -> None:
        link = self.connect()
        link.send(msgspec.msgpack.encode(READY))
        while True:
            message = msgspec.msgpack.decode(link.receive(), type=EngineInput)
            self.received.append(message)
            if message == Command("shutdown"):
                link.close()
                return
            if isinstance(message, AddRequest):
                logprobs = [TokenLogprobs([1, 2], [-0.5, -1.5], [1, 2])]
                delta = RequestDelta(message.request_id, message.prompt_token_ids, logprobs, finish_reason="length")
                link.send(msgspec.msgpack.encode(EngineOutputs([delta])))


async def test_a_message_of_another_engine_is_refused(ends: Ends):
    """Each engine has a link of its own: a message with another index belongs to no request."""
    client = ProcessClient(ends.front, engine_index=1)
    TinyEngine(ends.new_link).start()  # which says that it is engine 0
    with pytest.raises(EngineDeadError, match="to engine 1 is from engine 0"):
        await client.receive()
    receiving = asyncio.ensure_future(client.receive())
    await asyncio.sleep(0)
    client.mark_dead("The engine was given up")
    with pytest.raises(EngineDeadError, match="given up"):
        await receiving
    client.close()


async def test_messages_cross_the_link_unchanged(ends: Ends):
    client = ProcessClient(ends.front)
    sent = [add("a"), Abort(["a", "b"]), SetLimits(max_num_seqs=3), add("z", seed=-(2**63)), Command("shutdown")]
    for message in sent[:2]:
        client.send(message)  # before the engine has connected
    engine = TinyEngine(ends.new_link)
    engine.start()
    assert await client.receive() == READY
    for message in sent[2:]:
        client.send(message)
    first = await client.receive()
    assert first.deltas[0].token_ids == [5, 6, 7]
    assert first.deltas[0].logprobs[0].ranks == [1, 2]
    assert (await client.receive()).deltas[0].request_id == "z"
    await asyncio.to_thread(engine.join, 10)
    assert engine.received == sent
    client.close()
    assert not client.is_alive


async def test_a_pending_receive_hears_of_the_death(ends: Ends):
    client = ProcessClient(ends.front)
    pending = asyncio.ensure_future(client.receive())
    await asyncio.sleep(0)
    client.mark_dead("Killed by signal 9")
    client.mark_dead("said twice")
    with pytest.raises(EngineDeadError, match="signal 9"):
        await pending
    assert not client.is_alive
    with pytest.raises(EngineDeadError, match="signal 9"):
        client.send(Abort(["a"]))
    with pytest.raises(EngineDeadError, match="signal 9"):
        await client.receive()
    client.close()


async def test_the_process_is_watched(ends: Ends, monkeypatch):
    monkeypatch.setattr(client_module, "LIFE_CHECK_SECONDS", 0.01)
    alive = [True]
    client = ProcessClient(ends.front, is_process_alive=lambda: alive[0])
    pending = asyncio.ensure_future(client.receive())
    await asyncio.sleep(0.03)
    assert not pending.done()
    alive[0] = False
    with pytest.raises(EngineDeadError, match="has ended"):
        await pending
    client.close()


@pytest.mark.parametrize("frame", [b"", b"\xff", b"\x80", msgspec.msgpack.encode({"type": "outputs", "deltas": 5})])
async def test_unreadable_messages_end_the_engine_not_the_process(ends: Ends, frame):
    client = ProcessClient(ends.front)
    receiving = asyncio.ensure_future(client.receive())
    (await asyncio.to_thread(ends.connect)).send(frame)
    with pytest.raises(EngineDeadError, match="cannot be read"):
        await receiving
    client.close()


async def echo_all(client: EchoClient, num_finished: int = 1) -> dict[str, list[RequestDelta]]:
    """Deltas by request until this number of requests is over."""
    deltas: dict[str, list[RequestDelta]] = {}
    while num_finished:
        message = await client.receive()
        for delta in message.deltas if isinstance(message, EngineOutputs) else ():
            deltas.setdefault(delta.request_id, []).append(delta)
            num_finished -= delta.finish_reason is not None
    return deltas


async def test_echo_gives_the_prompt_up_to_max_tokens():
    client = EchoClient()
    assert isinstance(await client.receive(), EngineReady)
    client.send(add(max_tokens=5))
    deltas = (await echo_all(client))["a"]
    assert [delta.token_ids for delta in deltas] == [[5], [6], [7], [5], [6]]
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + ["length"]
    assert deltas[0].queued_seconds == 0.0


async def test_an_echo_that_is_paused_ends_no_step():
    """Not even the one that has begun: a request that comes now gets no token."""
    client = EchoClient(step_seconds=0.01)
    assert isinstance(await client.receive(), EngineReady)
    client.send(add(max_tokens=5))
    step = asyncio.ensure_future(client.receive())
    await asyncio.sleep(0)
    client.is_paused = True
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(step), 0.05)
    client.is_paused = False
    client._wake.set()
    (delta,) = (await step).deltas
    assert delta.token_ids == [5]


async def test_echo_honours_stops_logprobs_and_min_tokens():
    client = EchoClient([9, 8])
    client.send(add("eos", logprobs=2, max_tokens=9))
    client.send(add("min", min_tokens=5, max_tokens=9))
    client.send(add("stop", stop_token_ids=[8]))
    client._running["stop"].request.stop_token_ids.append(8)
    deltas = await echo_all(client, 3)
    assert [delta.token_ids[0] for delta in deltas["eos"]] == [9, 8, 2]
    assert all(len(delta.logprobs[0].token_ids) == 2 for delta in deltas["eos"])
    assert (deltas["eos"][-1].finish_reason, deltas["eos"][-1].stop_reason) == ("stop", 2)
    assert [delta.token_ids[0] for delta in deltas["min"]] == [9, 8, 9, 8, 2]
    assert (deltas["stop"][-1].token_ids, deltas["stop"][-1].stop_reason) == ([8], 8)


async def test_echo_aborts_refuses_fails_and_dies():
    refused = InvalidRequestError("no thanks")
    client = EchoClient(
        max_num_seqs=1, max_num_queued_reqs=1, error_of=lambda request: refused if request.request_id == "bad" else None
    )
    await client.receive()
    for name in ("run", "wait", "full", "bad"):
        client.send(add(name, max_tokens=1000))
    deltas = (await client.receive()).deltas
    codes = {delta.request_id: delta.error_code for delta in deltas}
    assert codes == {"full": QueueFullError.code, "bad": InvalidRequestError.code, "run": None}
    client.send(Abort(["run"]))
    assert [delta.request_id for delta in (await client.receive()).deltas] == ["wait"]
    client.fail_request("wait", refused)
    assert (await client.receive()).deltas[0].error == "no thanks."
    assert client.num_requests == 0
    client.die("gone")
    assert await client.receive() == EngineFailed("gone")
    with pytest.raises(EngineDeadError, match="gone"):
        await client.receive()
