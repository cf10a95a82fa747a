"""A machine that is lost is told from one that is busy."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from quire.distributed import pulse, wire
from quire.distributed.group import GroupError
from quire.distributed.network import SocketLink
from quire.distributed.pulse import Pulse
from tests.engine.test_leaving_ranks import Witness
from tests.network import two_machines

KEY = b"of the tests, long enough"
LONG_SECONDS = pulse.LOST_SECONDS + 1.0


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends, which know the key."""
    found: list[socket.socket] = []
    with wire.listen("127.0.0.1", 0) as listener:
        until = time.monotonic() + 20
        accepting = threading.Thread(target=lambda: found.append(wire.accept(listener, KEY, until)))
        accepting.start()
        theirs = wire.connect(*listener.getsockname(), KEY, until)
        accepting.join()
    with found[0] as ours, theirs:
        yield ours, theirs


def test_beats_are_no_messages(connection: tuple[socket.socket, socket.socket]) -> None:
    heard, ended = list[bytes](), list[Exception]()
    own, other = (Pulse(end, ended.append, heard.append) for end in connection)
    time.sleep(3 * pulse.BEAT_SECONDS)
    own.say(b"a message")
    own.close()
    other.wait(10.0)
    assert heard == [b"a message"]
    assert [str(error) for error in ended] == ["the connection was closed"], "only the other end is told"
    assert other.is_over
    other.close()


def test_a_machine_that_reads_nothing_is_not_lost(connection: tuple[socket.socket, socket.socket]) -> None:
    """Its system answers."""
    ended = list[Exception]()
    own = Pulse(connection[0], ended.append)
    time.sleep(LONG_SECONDS)
    assert not ended
    own.close()
    assert not ended


def test_a_machine_that_reads_nothing_for_long_gets_no_more_beats(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would fill its system's memory, which then acknowledges nothing. It gets beats again when it beats."""
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(pulse, "MOST_UNHEARD", 5)
    ended = list[Exception]()
    own, other = Pulse(connection[0], ended.append), connection[1]
    for _ in range(2):
        time.sleep(0.5)
        assert len(other.recv(1000)) == 5 * wire.HEADER_BYTES
        wire.send(other, b"")
    assert not ended
    own.close()


def test_a_number_is_said_only_if_it_is_known() -> None:
    """Systems notice a loss too, with times of their own."""
    silences = [pulse.SilenceError()] + [OSError(number, "") for number in (errno.ETIMEDOUT, errno.EHOSTUNREACH)]
    assert all(pulse.is_silence(error) for error in silences)
    assert not pulse.is_silence(ConnectionResetError(errno.ECONNRESET, ""))
    lost = "its machine {}: it is down, or the network to it is cut"
    texts = [lost.format(how) for how in ("has not answered for 1.5 s", "does not answer", "does not answer")]
    assert [pulse.why(error) for error in silences] == texts


class Places:
    """As much of Whereabouts as a link uses."""

    def wait_for(self, rank: int | None) -> None: ...


class Failed:
    """A Failing."""

    own_reason = None
    cause = "its process was stopped by a signal"

    def __init__(self) -> None:
        self.failed_rank: int | None = None
        self.told: list[int] = []

    def fail_for(self, rank: int, reason: object = None, cause: int = 0) -> None:
        self.told.append(rank)


def link(end: socket.socket, failing: Failed) -> SocketLink:
    return SocketLink(end, 1, Places(), failing)  # type: ignore[arg-type]


def test_rows_wait_for_a_busy_rank(connection: tuple[socket.socket, socket.socket]) -> None:
    """More of them than the systems hold. No system's timer may end the connection meanwhile."""
    failing, rows_TD = Failed(), torch.arange(16 << 20, dtype=torch.float32).view(-1, 1024)
    ours, theirs = (link(end, failing) for end in connection)
    sending = threading.Thread(target=lambda: ours.send(rows_TD))
    sending.start()
    sending.join(0.3)
    assert sending.is_alive(), "too few rows"
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        assert [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for end in connection] == [0, 0]
    assert torch.equal(theirs.receive(*rows_TD.shape, torch.float32), rows_TD)
    sending.join()
    assert not failing.told


@pytest.mark.parametrize("sends", [True, False])
def test_a_waiting_rank_learns_of_a_failure_elsewhere(
    sends: bool, connection: tuple[socket.socket, socket.socket]
) -> None:
    """Its own connection stays silent."""
    failing = Failed()
    ours = link(connection[0], failing)
    timer = threading.Timer(0.3, lambda: setattr(failing, "failed_rank", 2))
    timer.start()
    begin = time.monotonic()
    wait = partial(ours.send, torch.zeros(1, 16 << 20)) if sends else partial(ours.receive, 1, 4, torch.float32)
    with pytest.raises(GroupError, match="rank 2 has failed: its process was stopped by a signal"):
        wait()
    assert time.monotonic() - begin < 1.3
    timer.join()


# Both machines beat. They say when they have come, and how the connection has ended.
BEATING = """
import sys, time
from quire.distributed import pulse, wire
key, until = b"of the tests, long enough", time.monotonic() + 20
if sys.argv[1] == "listen":
    with wire.listen(sys.argv[2], 29501) as listener:
        peer = wire.accept(listener, key, until)
else:
    peer = wire.connect(sys.argv[2], 29501, key, until)
def end(error):
    print(time.monotonic(), pulse.is_silence(error), pulse.why(error), flush=True)
beating = pulse.Pulse(peer, end)
print("beats", flush=True)
beating.wait(30)
"""


@pytest.mark.parametrize(("fault", "remedy"), [("cut", "mend"), ("divert", "lead"), ("unplug", "plug")])
def test_a_network_that_is_cut(fault: str, remedy: str, tmp_path: Path) -> None:
    """Both ends notice it in two seconds. Half a second is no loss."""
    with two_machines(tmp_path) as network:
        cut, mend = getattr(network, fault), getattr(network, remedy)
        words, address = [sys.executable, "-c", BEATING], network.machines[0].address
        ends = [
            machine.popen([*words, role, address], stdout=subprocess.PIPE, text=True)
            for machine, role in zip(network.machines, ("listen", "connect"), strict=True)
        ]
        for end in ends:
            assert end.stdout.readline() == "beats\n"
        cut()
        time.sleep(0.5)
        mend()
        time.sleep(LONG_SECONDS)
        assert [end.poll() for end in ends] == [None, None]
        witness, begin = Witness(), cut()
        said = [end.communicate(timeout=20)[0].split(" ", 2) for end in ends]
        witness.close()
        for when, is_silence, why in said:
            took, busy = float(when) - begin, witness.seconds_between(begin, float(when))
            print(f"{fault}: noticed after {took:.2f} s, on a machine that was busy for {busy:.2f} s")
            assert took - busy < 2.0
            assert is_silence == "True"
            assert "has not answered for 1.5 s" in why
