"""More requests than the engine can serve: accepted ones end well, the others get a time to retry, none hangs."""

from __future__ import annotations

import asyncio
import heapq
import socket
import time
from collections import Counter
from http.client import HTTPResponse

import httpx
import pytest

from quire.frontend.admission import (
    FREE_REFUSALS,
    MAX_REFUSAL_DELAY_SECONDS,
    REFUSAL_TURN_SECONDS,
    REFUSALS_PER_SECOND,
    Refusals,
)
from quire.frontend.echo_client import EchoClient
from quire.messages import AddRequest, EngineReady, Pace, SetLimits
from tests.frontend.test_admission import record
from tests.server.serving import RunningServer
from tests.server.test_errors import error_of
from tests.server.test_guard import ask, expecting, head_of


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


def refusals(server: RunningServer, reason: str = "queue_full") -> float:
    lines = server.http.get("/metrics").text.splitlines()
    of_all = (line for line in lines if line.startswith("vllm:admission_rejections_total{"))
    line = next(line for line in of_all if f'reason="{reason}"' in line)
    return float(line.rsplit(" ", 1)[1])


def test_a_full_queue_costs_no_tokenization(monkeypatch):
    """The last step said that the queue is full: nothing is tokenized, nothing is sent to the engine."""
    client = EchoClient(None, max_num_seqs=1, max_num_queued_reqs=2)
    with RunningServer(client) as server:
        server.run(lambda: setattr(client, "is_paused", True))
        server.run(lambda: server.engine.replicas[0].admission.on_step(record(num_running=1, num_waiting=2)))
        monkeypatch.setattr(type(server.engine.replicas[0]), "num_unfinished", property(lambda replica: 3))
        monkeypatch.setattr(server.engine.input_processor, "process", None)
        response = server.complete(max_tokens=3)
        assert error_of(response, 429)["code"] == "queue_full"
        assert response.headers["retry-after"] == "1"
        assert not [message for message in client.sent if isinstance(message, AddRequest)]
        monkeypatch.undo()
        server.run(lambda: (setattr(client, "is_paused", False), client._wake.set()))
        assert server.complete(max_tokens=3).status_code == 200, "the record of a queue that is gone refuses nobody"


def test_the_limit_moves_with_the_engines():
    client = EchoClient(None, max_num_queued_reqs=2)
    with RunningServer(client) as server:
        assert server.engine.replicas[0].admission.limits["max_num_queued_reqs"] == 2
        server.run(lambda: server.engine.set_limits(SetLimits(max_num_queued_reqs=7)))
        assert server.engine.replicas[0].admission.limits["max_num_queued_reqs"] == 7


def test_between_two_steps_no_more_is_sent_than_the_queue_takes():
    client = EchoClient(None, max_num_seqs=1, max_num_queued_reqs=3)
    with RunningServer(client) as server:
        server.run(lambda: setattr(client, "is_paused", True))

        async def storm() -> list[int]:
            async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:
                tasks = [asyncio.create_task(http.post("/v1/completions", json={"prompt": "Hi"})) for _ in range(12)]
                done, waiting = set(), set(tasks)
                while len(waiting) > 3:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    assert {task.result().status_code for task in done} == {429}
                server.run(lambda: (setattr(client, "is_paused", False), client._wake.set()))
                return [(await task).status_code for task in tasks]

        answers = asyncio.run(storm())
        assert sorted(answers) == [200] * 3 + [429] * 9
        assert sum(isinstance(message, AddRequest) for message in client.sent) == 3


def test_a_prompt_that_would_miss_the_target_is_refused_once_its_length_is_known(monkeypatch):
    client = EchoClient(None, is_ready=False, max_model_len=2048)
    resolved = {"slo_ttft": {"value": 0.5}, "slo_itl": {"value": None}}
    client.push(EngineReady(2048, 64, 16, 4, 64, resolved, Pace(0.01, 0.012, 0.01, 0.0)))
    with RunningServer(client) as server:
        admission = server.engine.replicas[0].admission
        monkeypatch.setattr(type(server.engine.replicas[0]), "num_unfinished", property(lambda replica: 1))
        server.run(lambda: admission.on_step(record(1, 0, predicted_seconds=0.01)))
        response = server.complete(prompt=[5] * 300)
        assert error_of(response, 429)["code"] == "ttft_target"
        assert response.headers["retry-after"] == "4"
        assert "Expected at most 500ms" in response.json()["error"]["message"]
        assert refusals(server, "ttft_target") == 1
        monkeypatch.undo()
        assert server.complete(prompt=[5] * 300, max_tokens=3).status_code == 200, "nobody else is there"
        server.wait_for_idle()
        assert not admission._prompts
        text = server.http.get("/metrics").text
        assert sum(float(line[-3:]) for line in text.splitlines() if line.startswith("quire_slo_requests_total")) == 1


@pytest.fixture
def full(monkeypatch):
    """A server whose engine has said that its queue is full."""
    client = EchoClient(None, max_num_seqs=1, max_num_queued_reqs=2, max_model_len=2048)
    with RunningServer(client) as server:
        monkeypatch.setattr(type(server.engine.replicas[0]), "num_unfinished", property(lambda replica: 3))
        server.run(lambda: server.engine.replicas[0].admission.on_step(record(num_running=1, num_waiting=2)))
        yield server
        monkeypatch.undo()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completions", "/chat/completions"])
def test_a_refusal_reads_no_body_and_keeps_the_connection(full, path):
    """The answer comes before the body, which is no JSON at that; then the connection is used again, and again."""
    body = b"[" * 3_000_000
    with socket.create_connection(("127.0.0.1", full.port), timeout=10) as connection:
        for _ in range(2):
            connection.sendall(head_of(path, body))
            answer = HTTPResponse(connection)
            answer.begin()
            assert answer.status == 429
            assert b'"queue_full"' in answer.read()
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["connection"] != "close"
            connection.sendall(body)
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert full.http.post("/tokenize", json={"prompt": "a"}).status_code == 200, "the queue is not for this"


def test_a_refusal_of_a_body_that_waits_to_be_asked_for_ends_the_connection(full):
    answer = ask(full, expecting("/v1/completions", b'{"prompt": "a"}'))
    assert answer.startswith(b"HTTP/1.1 429"), answer
    assert b"connection: close\r\n" in answer


def test_the_key_comes_first():
    client = EchoClient(None, max_num_queued_reqs=1)
    with RunningServer(client, api_keys=("key",)) as server:
        server.run(lambda: server.engine.replicas[0].admission.on_step(record(num_running=1, num_waiting=2)))
        assert httpx.post(f"{server.url}/v1/completions", json={}).status_code == 401


def test_refusals_have_a_pace():
    """A burst is refused at once; a client that asks again at once waits for the next turn."""
    refusals, now = Refusals(), 1000.05
    delays = [refusals.delay(now) for _ in range(FREE_REFUSALS - 1)]
    assert max(delays) == 0.0
    turns = [now + delay for _ in range(REFUSALS_PER_SECOND) if (delay := refusals.delay(now)) > 0]
    assert len(turns) >= REFUSALS_PER_SECOND - 1
    per_turn = Counter(round(turn / REFUSAL_TURN_SECONDS, 3) for turn in turns)
    assert all(turn.is_integer() for turn in per_turn), per_turn
    assert max(per_turn.values()) <= REFUSALS_PER_SECOND * REFUSAL_TURN_SECONDS + 1
    assert turns[-1] == pytest.approx(now + 1, abs=REFUSAL_TURN_SECONDS)
    assert refusals.delay(now + 100) == 0.0


def test_the_pace_holds_for_a_thousand_who_ask_at_once():
    """Each of them asks again as soon as it is told; more of them wait no longer than the limit."""
    refusals, now = Refusals(), 1000.05
    turns = [now + refusals.delay(now) for _ in range(900)]
    for _ in range(3000):
        heapq.heapreplace(turns, turns[0] + refusals.delay(turns[0]))
    per_turn = Counter(round(turn / REFUSAL_TURN_SECONDS) for turn in turns)
    assert max(per_turn.values()) <= REFUSALS_PER_SECOND * REFUSAL_TURN_SECONDS + 1
    last = max(turns)
    many = [refusals.delay(last) for _ in range(20 * REFUSALS_PER_SECOND)]
    assert MAX_REFUSAL_DELAY_SECONDS - REFUSAL_TURN_SECONDS <= max(many) <= MAX_REFUSAL_DELAY_SECONDS


def test_delayed_refusals_hold_up_nobody(full):
    """The next refusal has its turn in two seconds: other routes are answered meanwhile, and a client may leave."""
    full.run(lambda: setattr(full.engine.refusals, "_next", time.monotonic() + 2))
    body = b'{"prompt": "a"}'
    with socket.create_connection(("127.0.0.1", full.port), timeout=10) as leaves:
        leaves.sendall(head_of("/v1/completions", body) + body)
    with socket.create_connection(("127.0.0.1", full.port), timeout=10) as stays:
        stays.sendall(head_of("/v1/completions", body) + body)
        assert full.http.get("/health").status_code == 200
        stays.setblocking(False)
        with pytest.raises(BlockingIOError):
            stays.recv(1)
        stays.settimeout(10)
        assert stays.recv(65536).startswith(b"HTTP/1.1 429")
