"""A link between a front end and an engine process in both forms, and the peers that a connection lets in."""

from __future__ import annotations

import asyncio
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from quire.distributed import wire
from quire.errors import ConfigError
from quire.frontend.engine_link import LinkEndedError, TcpLink, UnixLink
from quire.messages import UnixSockets
from tests.frontend.links import Ends

LARGE = bytes(range(256)) * (40 << 12)  # 40 MiB: a tokenizer, or the logprobs of a long prompt


async def test_frames_of_all_sizes_cross_in_order(ends: Ends) -> None:
    frames = [b"first", b"", LARGE, b"x" * (1 << 20), b"last"]
    for frame in frames[:3]:
        ends.front.send(frame)  # before there is an engine
    engine, receiving = await ends.connected()
    for frame in frames[3:]:
        ends.front.send(frame)
    assert [await asyncio.to_thread(engine.receive) for _ in frames] == frames

    sending = asyncio.ensure_future(asyncio.to_thread(lambda: [engine.send(frame) for frame in frames]))
    assert [await receiving, *[await ends.front.receive() for _ in frames[1:]]] == frames
    await sending
    ends.front.close()


async def test_the_engine_looks_before_it_waits(ends: Ends) -> None:
    engine, receiving = await ends.connected()
    assert not engine.wait(0.0)
    assert engine.take() is None
    ends.front.send(b"one")
    ends.front.send(b"two")
    assert await asyncio.to_thread(engine.wait, 10.0)
    assert engine.wait(0.0), "looking takes nothing away"
    assert engine.take() == b"one"
    assert await asyncio.to_thread(engine.receive) == b"two"
    with engine.beats() as send:
        await asyncio.to_thread(send, b"beat")
        assert await receiving == b"beat"
    ends.front.close()


# Its threads share one CPU, and none of them preempts another. So whatever is left to another thread is not done.
DYING = """
import os, signal, sys
from quire.engine.server_link import UnixLink
from quire.messages import UnixSockets
if hasattr(os, "SCHED_BATCH"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
for number in range(10):
    if os.fork() == 0:
        link = UnixLink(UnixSockets(*sys.argv[1:]))
        link.wait(0.05)  # it is connected
        link.deliver(b"%d" % number)
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()
"""

# It leaves what has come unread. So its end is a reset, at which its system drops what has not arrived.
DYING_FAR_AWAY = """
import os, select, signal, sys
from quire.engine.server_link import TcpLink
from quire.messages import ServerAddress
class Deaf(TcpLink):
    def _read(self):
        pass
link = Deaf(ServerAddress(sys.argv[1], int(sys.argv[2])), lambda: None)
select.select([link._peer], [], [])
link.send(bytes(40 << 20))
link.deliver(b"the last words")
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_what_is_delivered_outlives_the_process(tmp_path: Path) -> None:
    sockets = UnixSockets(f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out")
    front = UnixLink(sockets)
    words = [sys.executable, "-c", DYING, sockets.input_address, sockets.output_address]
    await asyncio.to_thread(subprocess.run, words, check=True, timeout=60)
    front.end()
    frames = []
    with suppress(LinkEndedError):
        while True:
            frames.append(await front.receive())
    front.close()
    assert sorted(frames) == [b"%d" % number for number in range(10)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what has arrived")
@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
async def test_what_is_delivered_to_another_machine_outlives_the_process(ends: Ends) -> None:
    assert ends.server is not None
    ends.front.send(b"unread")
    words = [sys.executable, "-c", DYING_FAR_AWAY, ends.server.address, str(ends.server.port)]
    running = asyncio.ensure_future(asyncio.to_thread(subprocess.run, words, timeout=60))
    frames = []
    with suppress(LinkEndedError):
        while True:
            frames.append(await ends.front.receive())
    ends.front.close()
    assert (await running).returncode == -signal.SIGKILL
    assert [len(frame) for frame in frames] == [40 << 20, len(b"the last words")]


async def test_what_has_come_is_received_behind_the_end(ends: Ends) -> None:
    engine, receiving = await ends.connected()
    engine.send(b"first")
    assert await receiving == b"first"
    engine.send(b"second")
    engine.send(b"third")
    time.sleep(0.2)  # for them to arrive, while the loop reads nothing
    ends.front.end()
    assert [await ends.front.receive() for _ in range(2)] == [b"second", b"third"]
    for _ in range(2):
        with pytest.raises(LinkEndedError):
            await ends.front.receive()
    ends.front.close()


async def test_nobody_comes(ends: Ends) -> None:
    receiving = asyncio.ensure_future(ends.front.receive())
    await asyncio.sleep(0.05)
    ends.front.end()
    with pytest.raises(LinkEndedError):
        await asyncio.wait_for(receiving, 5.0)
    ends.front.close()


async def test_last_words_leave(ends: Ends) -> None:
    engine, receiving = await ends.connected()
    engine.send(b"hello")
    assert await receiving == b"hello"
    ends.front.send(LARGE)  # more than the system takes at once
    ends.front.send(b"shutdown")
    ends.front.close()
    assert await asyncio.to_thread(engine.receive) == LARGE
    assert await asyncio.to_thread(engine.receive) == b"shutdown"
    if ends.server is not None:
        assert await asyncio.to_thread(ends.has_left.wait, 5.0), "an engine ends with its connection"


def test_nothing_is_left_of_a_link_that_was_not_used(ends: Ends) -> None:
    ends.front.close()


@pytest.mark.parametrize("ends", ["unix"], indirect=True)
def test_sockets_are_unix_sockets(ends: Ends, tmp_path: Path) -> None:
    assert all(stat.S_ISSOCK((tmp_path / name).stat().st_mode) for name in ("input", "output"))
    ends.front.close()


def raw(ends: Ends, key: str) -> socket.socket:
    """A connection of somebody else."""
    assert ends.server is not None
    return wire.connect(ends.server.address, ends.server.port, key.encode(), time.monotonic() + 10)


@asynccontextmanager
async def engine_without_code(ends: Ends) -> AsyncIterator[socket.socket]:
    """The connection of an engine that knows the key. Another one is for a pulse."""
    key = "of the tests, long enough"
    with await asyncio.to_thread(raw, ends, key) as engine, await asyncio.to_thread(raw, ends, key):
        yield engine


@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
async def test_who_does_not_know_the_key_is_dropped(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    """And the engine is let in behind it."""
    receiving = asyncio.ensure_future(ends.front.receive())
    with pytest.raises(wire.WireError, match="does not accept this machine"):
        await asyncio.to_thread(raw, ends, "of somebody else, long enough")
    assert "does not know the cluster key" in caplog.text
    engine = await asyncio.to_thread(ends.connect)
    engine.send(b"hello")
    assert await receiving == b"hello"
    ends.front.close()


@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
async def test_a_front_end_never_waits_for_an_engine_that_reads_nothing(ends: Ends) -> None:
    receiving = asyncio.ensure_future(ends.front.receive())
    async with engine_without_code(ends) as engine:
        wire.send(engine, b"hello")
        assert await receiving == b"hello"
        for _ in range(2):
            ends.front.send(LARGE)
        ends.front.end()
        with pytest.raises(LinkEndedError):
            await ends.front.receive()
    ends.front.close()


async def test_engines_that_are_awaited_take_no_thread_of_others() -> None:
    """asyncio has few of them, and prompts need some."""
    links = [TcpLink(wire.listen("127.0.0.1", 0), b"of the tests, long enough") for _ in range(40)]
    receiving = [asyncio.ensure_future(link.receive()) for link in links]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(asyncio.to_thread(int, "7"), 5.0) == 7
    for link in links:
        link.close()
    assert all(isinstance(error, LinkEndedError) for error in await asyncio.gather(*receiving, return_exceptions=True))


@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
async def test_only_one_engine_is_let_in(ends: Ends) -> None:
    engine, receiving = await ends.connected()
    engine.send(b"hello")
    assert await receiving == b"hello"
    assert ends.server is not None
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((ends.server.address, ends.server.port), 5.0)
    ends.front.close()


@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
@pytest.mark.parametrize("bytes_sent", [b"\xff" * 8, wire.header(b"four") + b"one", b"\x00"])
async def test_a_malformed_frame_ends_the_link(ends: Ends, bytes_sent: bytes) -> None:
    receiving = asyncio.ensure_future(ends.front.receive())
    async with engine_without_code(ends) as engine:
        engine.sendall(bytes_sent)
        engine.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkEndedError):
            await receiving
    ends.front.close()


@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
async def test_a_frame_that_is_too_long_is_logged(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    receiving = asyncio.ensure_future(ends.front.receive())
    async with engine_without_code(ends) as engine:
        engine.sendall(b"\xff" * 8)
        with pytest.raises(LinkEndedError):
            await receiving
    assert "an engine is dropped: a frame has 18446744073709551615 bytes, and 1073741824 are allowed" in caplog.text
    ends.front.close()


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_nobody_is_listened_for_in_all_networks(address: str) -> None:
    with pytest.raises(ConfigError, match="from all networks"):
        wire.listen(address, 0)
