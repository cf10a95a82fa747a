"""The client of `quire bench serve`: HTTP however it is cut, true concurrency, times as vLLM defines them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.measure import load as loads
from quire.measure.http import Body, HttpClient
from quire.measure.load import Run, run_load
from quire.measure.workload import BenchRequest
from tests.measure.sse_server import SseServer

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=6), st.data())
def test_chunks_however_they_are_cut(contents: list[bytes], data: st.DataObject) -> None:
    wire = b"".join(b"%x\r\n%s\r\n" % (len(content), content) for content in contents) + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    body = Body(CHUNKED)
    found = b"".join(body.feed(wire[a:b]) for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True))
    assert found == b"".join(contents)
    assert body.is_done


async def load(server: SseServer, count: int, times: list[float] | None = None, **options: Any) -> Run:
    client = HttpClient(server.url)
    requests = [BenchRequest(f"prompt {i}", 5, 3) for i in range(count)]

    def make_body(request: BenchRequest) -> dict[str, Any]:
        return {"prompt": request.prompt}

    try:
        return await run_load(client, "/v1/completions", requests, times or [0.0] * count, make_body, **options)
    finally:
        client.close()


@pytest.mark.parametrize("limit", [1, 3])
async def test_so_many_in_flight_and_never_more(limit: int) -> None:
    async with SseServer() as server:
        run = await load(server, 12, max_concurrency=limit)
    assert server.most_in_flight == limit
    assert server.num_connections == limit, "connections are used again"
    assert all(outcome.success for outcome in run.outcomes)
    assert run.outcomes[-1].queue_time > run.outcomes[0].queue_time, "waiting in the client was not measured"


async def test_without_a_limit_all_at_once() -> None:
    async with SseServer(gap=0.02) as server:
        await load(server, 12)
    assert server.most_in_flight == 12


async def test_what_is_noted_of_an_answer() -> None:
    async with SseServer(num_tokens=4, gap=0.01) as server:
        (outcome,) = (await load(server, 1)).outcomes
    assert outcome.text == "0 1 2 3 "
    assert (outcome.prompt_len, outcome.output_tokens) == (7, 8), "the server's usage says the tokens"
    assert len(outcome.itl) == 3
    assert outcome.latency == pytest.approx(outcome.ttft + sum(outcome.itl))
    assert min(outcome.itl) > 0


async def test_requests_wait_for_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves only while the load waits, with answers that take no time."""
    now, sleep = 100.0, asyncio.sleep

    async def pass_time(seconds: float) -> None:
        nonlocal now
        await sleep(0)  # who can go on does so before the time is over
        now += seconds

    class Client:
        async def events(self, path: str, body: bytes) -> AsyncIterator[tuple[float, bytes]]:
            yield now, b'{"choices": [{"text": "a"}]}'

    monkeypatch.setattr(loads, "time", SimpleNamespace(perf_counter=lambda: now, process_time=lambda: 0.0))
    monkeypatch.setattr(asyncio, "sleep", pass_time)
    requests, times = [BenchRequest("prompt", 5, 3)] * 4, [0.0, 0.25, 0.25, 2.0]
    client: Any = Client()
    run = await run_load(client, "/v1/completions", requests, times, lambda request: {"prompt": request.prompt})
    assert [outcome.start_time - 100 for outcome in run.outcomes] == times
    assert run.duration == 2.0


async def test_connections_that_the_server_closes_are_replaced() -> None:
    async with SseServer(closes=True) as server:
        run = await load(server, 3, max_concurrency=1)
    assert [outcome.error for outcome in run.outcomes] == [""] * 3


async def test_errors_are_outcomes() -> None:
    async with SseServer(status=429) as server:
        run = await load(server, 2)
    assert [outcome.success for outcome in run.outcomes] == [False, False]
    assert "429: busy" in run.outcomes[0].error
    async with SseServer(num_tokens=0) as server:
        (outcome,) = (await load(server, 1)).outcomes
    assert (outcome.success, outcome.error) == (False, "no token came")
    (outcome,) = (await load(server, 1)).outcomes
    assert "OSError" in outcome.error or "Refused" in outcome.error, "nobody listens any more"
