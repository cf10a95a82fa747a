"""Several prompts as one stream: no request is left running, however the reader ends."""

from __future__ import annotations

import asyncio

import pytest

from quire.errors import InvalidRequestError
from quire.frontend.stream import RequestStream
from quire.outputs import RequestOutput
from quire.server.generation import collect, merged


def make_streams(count: int) -> tuple[list[RequestStream], list[str]]:
    """Streams, and the ids of streams that were left before their end."""
    left: list[str] = []
    return [RequestStream(str(index), is_delta=True, on_leave=left.append) for index in range(count)], left


def output(stream: RequestStream, finished: bool = False) -> None:
    stream.put(RequestOutput(stream.request_id, None, [1], [], finished))


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_closing_leaves_every_stream(count):
    streams, left = make_streams(count)
    for stream in streams:
        output(stream)
    outputs = merged(streams)
    await anext(outputs)
    await asyncio.sleep(0)  # the other streams' outputs now wait for the reader
    async with asyncio.timeout(5):
        await outputs.aclose()
    assert sorted(left) == [str(index) for index in range(count)]


async def test_an_error_ends_all():
    streams, left = make_streams(3)
    streams[1].fail(InvalidRequestError("no"))
    async with asyncio.timeout(5):
        with pytest.raises(InvalidRequestError, match="no"):
            await collect(streams)
    assert sorted(left) == ["0", "2"]


async def test_all_outputs_arrive():
    streams, left = make_streams(3)
    for stream in streams:
        output(stream, finished=True)
    async with asyncio.timeout(5):
        finals = await collect(streams)
    assert [final.request_id for final in finals] == ["0", "1", "2"]
    assert left == []


async def test_the_first_delta_is_written_once():
    """A reader may ask again behind the end, or after it has left."""
    told: list[float] = []
    stream = RequestStream("r", is_delta=True, on_leave=lambda request_id: None, on_written=told.append)
    output(stream, finished=True)
    assert not told
    assert [each.request_id async for each in stream] == ["r"]
    assert len(told) == 1
    assert not [each async for each in stream]
    assert len(told) == 1
