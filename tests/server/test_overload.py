"""More than the engine can do: what is accepted ends well, the rest is told when to come again, nothing hangs."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from quire.errors import QueueFullError
from quire.frontend.admission import MAX_RETRY_SECONDS, Admission
from quire.frontend.echo_client import EchoClient
from quire.messages import AddRequest, EngineReady, SetLimits
from quire.schedule import StepRecord
from tests.server.serving import RunningServer
from tests.server.test_errors import error_of


def record(num_running: int, num_waiting: int) -> StepRecord:
    zeros = {name: 0 for name in StepRecord.__struct_fields__ if not name.endswith("_seconds")}
    return StepRecord(**{**zeros, "num_running": num_running, "num_waiting": num_waiting})


def admission(limit: int | None) -> Admission:
    result = Admission()
    result.on_ready(EngineReady(2048, 1, 16, 4, 64, {"max_num_queued_reqs": {"value": limit}}))
    return result


def test_predicted_wait():
    """Three wait for four slots that need 2 s each on average: half a slot-time per request."""
    door = admission(3)
    for seconds in (1.0, 3.0):
        door.on_finished(seconds)
    door.on_step(record(num_running=4, num_waiting=3))
    assert door.predicted_wait_seconds == pytest.approx((3 + 1) * 2.0 / 4)
    with pytest.raises(QueueFullError, match="fewer than 3") as error:
        door.check()
    assert error.value.retry_after_seconds == 2
    door.on_step(record(num_running=4, num_waiting=2))
    door.check()
    door.on_step(record(num_running=1, num_waiting=10**9))
    assert door.retry_after_seconds == MAX_RETRY_SECONDS
    door.on_idle()
    door.check()
    assert door.retry_after_seconds >= 1


def test_no_limit_is_no_limit():
    for door in (admission(None), Admission()):
        door.on_step(record(num_running=1, num_waiting=10**6))
        door.check()


def test_five_times_saturation():
    """Four run and eight may wait; sixty come at once."""
    client = EchoClient(None, step_seconds=0.002, max_num_seqs=4, max_num_queued_reqs=8, max_model_len=2048)
    with RunningServer(client) as server:
        body = {"prompt": "Hi", "max_tokens": 20, "ignore_eos": True}

        async def storm() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:

                async def ask(number: int) -> httpx.Response:
                    await asyncio.sleep(0.001 * number)
                    streamed = {"stream": True} if number % 2 else {}
                    return await http.post("/v1/completions", json={**body, **streamed})

                return await asyncio.gather(*(ask(number) for number in range(60)))

        answers = asyncio.run(storm())
        accepted = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(accepted) + len(refused) == 60
        assert len(accepted) >= 12
        assert refused, "five times saturation filled no queue of eight"
        for answer in accepted:
            if answer.headers["content-type"].startswith("text/event-stream"):
                assert answer.text.endswith("data: [DONE]\n\n")
                assert '"finish_reason":"length"' in answer.text
            else:
                assert answer.json()["usage"]["completion_tokens"] == 20
        for answer in refused:
            assert error_of(answer, 429)["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
        server.wait_for_idle()
        assert refusals(server) == len(refused)
        assert server.complete(max_tokens=3).status_code == 200


def refusals(server: RunningServer) -> float:
    text = server.http.get("/metrics").text
    line = next(line for line in text.splitlines() if line.startswith("vllm:admission_rejections_total{"))
    assert 'reason="queue_full"' in line
    return float(line.rsplit(" ", 1)[1])


def test_a_full_queue_costs_no_tokenization(monkeypatch):
    """The last step said that the queue is full: nothing is tokenized, nothing is sent to the engine."""
    client = EchoClient(None, max_num_seqs=1, max_num_queued_reqs=2)
    with RunningServer(client) as server:
        server.run(lambda: setattr(client, "is_paused", True))
        server.run(lambda: server.engine.admission.on_step(record(num_running=1, num_waiting=2)))
        monkeypatch.setattr(type(server.engine), "num_unfinished", property(lambda engine: 3))
        monkeypatch.setattr(server.engine.input_processor, "process", None)
        response = server.complete(max_tokens=3)
        assert error_of(response, 429)["code"] == "queue_full"
        assert response.headers["retry-after"] == "3"
        assert not [message for message in client.sent if isinstance(message, AddRequest)]
        monkeypatch.undo()
        server.run(lambda: (setattr(client, "is_paused", False), client._wake.set()))
        assert server.complete(max_tokens=3).status_code == 200, "the record of a queue that is gone refuses nobody"


def test_the_limit_moves_with_the_engines():
    client = EchoClient(None, max_num_queued_reqs=2)
    with RunningServer(client) as server:
        assert server.engine.admission.max_num_queued_reqs == 2
        server.run(lambda: server.engine.set_limits(SetLimits(max_num_queued_reqs=7)))
        assert server.engine.admission.max_num_queued_reqs == 7
