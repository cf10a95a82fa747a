"""Ranks that end before there are steps, or between steps: the ended rank is named, and no process is left behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.distributed import pulse, wire
from quire.distributed.group import GroupError
from quire.distributed.layout import Grid
from quire.engine import external, node_process, nodes, process, ranks
from quire.engine.nodes import Joined
from quire.engine.process import EngineProcess
from quire.engine.rank_messages import Failed, RankLaunch, StepOrders, encode
from quire.errors import AdapterNotFoundError, EngineDeadError, PeerLostError
from quire.kernels import cpu
from quire.messages import EngineLaunch, UnixSockets
from quire.worker.worker import DeviceWorker
from tests.engine.ranks import ignore
from tests.engine.test_rank_processes import wait_for

WAITING = "import os, sys; os.read(int(sys.argv[1]), 1)"  # until the connection to the first rank ends


class Told:
    """Failing: who has failed."""

    failed_rank: int | None = None
    own_reason: EngineDeadError | None = None
    cause = ""

    def __init__(self) -> None:
        self.ranks: list[int] = []

    def fail_for(self, rank: int, reason: EngineDeadError | None = None, cause: int = 0) -> None:
        self.ranks.append(rank)


class Interpreter:
    """A RankInterpreter whose process loads nothing."""

    def launch(self, launch: RankLaunch) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-S", "-c", WAITING, str(launch.connection)]
        return subprocess.Popen(command, pass_fds=[launch.connection])

    def end(self) -> None: ...


def launch_of(config: EngineConfig, rank: int = 1) -> RankLaunch:
    return RankLaunch(config, "", None, rank, -1, -1, None, False, {}, set())


@pytest.fixture
def second() -> ranks.RankProcess:
    launch = launch_of(EngineConfig(tensor_parallel_size=2))
    return ranks.RankProcess(launch, Grid(2), Told(), StepOrders(), Interpreter())  # type: ignore[arg-type]


def test_a_rank_that_is_lost_between_steps_is_named(second: ranks.RankProcess) -> None:
    second.check_alive()
    second._process.send_signal(signal.SIGKILL)
    assert wait_for(second._is_lost)
    with pytest.raises(
        EngineDeadError, match=rf"Rank 1 of 2 \(process {second._process.pid} on .*\) was killed by SIG"
    ):
        second.check_alive()
    second.close()


def test_a_machine_that_is_lost_between_steps_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    orders, adapters, told = Pipe(), Pipe(), Told()
    home = ranks.Home(ours, 1, told, ())
    rank = ranks.RemoteRank(1, Grid(1, 2, 2), told, StepOrders(), orders[0], adapters[0], home, None)  # type: ignore[arg-type]
    rank.check_alive()
    told.failed_rank, told.cause = 1, "its connection was closed"
    with pytest.raises(
        EngineDeadError,
        match=r"Rank 1 of 2, in stage 0 of 2 \(on 127.0.0.1\) has failed: its connection was closed",
    ):
        rank.check_alive()
    told.failed_rank = None
    adapters[1].send_bytes(encode(Failed.of(AdapterNotFoundError("There is no adapter here", fix="Copy it"))))
    with pytest.raises(AdapterNotFoundError, match=r"There is no adapter here, on 127.0.0.1\. .*Copy it"):
        rank.load_adapter("adapter", None, False).result()
    theirs.close()
    assert wait_for(rank._is_lost)
    with pytest.raises(
        EngineDeadError,
        match=r"\(on 127.0.0.1\) is lost: the connection to its node has ended \((the connection was closed|.* reset)",
    ):
        rank.check_alive()
    rank.close()


def test_a_rank_that_is_lost_before_its_node_has_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection to the node is there. Then the node sends something else than a reason."""
    monkeypatch.setattr(ranks, "SAY_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    told, (orders, others), (kept, ended) = Told(), Pipe(), socket.socketpair()
    home = ranks.Home(ours, 1, told, [kept])
    rank = ranks.RemoteRank(1, Grid(1, 2, 2), told, StepOrders(), orders, None, home, None)  # type: ignore[arg-type]
    others.close()
    lost = r"\(on 127\.0\.0\.1\) is lost: "
    with pytest.raises(EngineDeadError, match=lost + r"its connection has ended, and its node has not said why\.$"):
        rank.check_alive()
    assert told.ranks == [1]
    wire.send(theirs, nodes.encode(nodes.Refused("no reason for a loss")))
    assert wait_for(rank._is_lost)
    with pytest.raises(EngineDeadError, match=lost + r"its node has sent something that no node sends\.$"):
        rank.check_alive()
    ended.settimeout(10.0)
    assert ended.recv(1) == b"", "other connections to a lost node end too"
    rank.close()
    theirs.close()
    ended.close()


def test_a_machine_that_has_said_why_and_then_is_silent() -> None:
    """Nobody waits for its ranks, and its reason is kept."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    told, (kept, ended) = Told(), socket.socketpair()
    home = ranks.Home(ours, 1, told, [kept])
    wire.send(theirs, nodes.encode(nodes.NodeLost("Rank 2 of 3 was killed")))
    assert wait_for(home.is_lost)
    assert not told.ranks
    ended.settimeout(10.0)
    home._on_end(pulse.SilenceError())
    assert told.ranks == [1]
    assert ended.recv(1) == b""
    assert home.end("Rank 1 of 3") == "Rank 2 of 3 was killed"
    home.close()
    theirs.close()
    ended.close()


def test_an_engine_without_requests_looks_at_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PAUSE_SECONDS", 0.001)
    looks: list[int] = []

    def check_alive() -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            raise EngineDeadError("Rank 1 of 2 was killed")

    idle: Any = SimpleNamespace(take_memory=bool, calibrate=bool, keep_costs=lambda: None, check_alive=check_alive)
    engine = EngineProcess(
        EngineLaunch(EngineConfig(), "", UnixSockets(f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out"))
    )
    with pytest.raises(EngineDeadError, match="Rank 1 of 2 was killed"):
        engine._wait(idle)
    engine.close()


@pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")
def test_a_start_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three ranks here and three on another machine, the third process cannot be started."""
    spawned: list[subprocess.Popen[bytes]] = []

    class One(Interpreter):
        def launch(self, launch: RankLaunch) -> subprocess.Popen[bytes]:
            if spawned:
                raise BlockingIOError("no more processes")
            spawned.append(super().launch(launch))
            return spawned[0]

    pairs = {name: socket.socketpair() for name in ("home", "3", "4", "5", "3 sends", "4 sends", "5 sends")}
    ours = {name: pair[0] for name, pair in pairs.items()}
    joined = Joined(
        {1: ours["home"]},
        {rank: ours[str(rank)] for rank in (3, 4, 5)},
        {rank - 3: {rank: ours[f"{rank} sends"]} for rank in (3, 4, 5)},
    )
    monkeypatch.setattr(ranks, "let_in", lambda *arguments: joined)
    monkeypatch.setattr(ranks, "RankInterpreter", One)
    config = EngineConfig(tensor_parallel_size=3, pipeline_parallel_size=2, nnodes=2, device="cpu")
    with pytest.raises(BlockingIOError, match="no more processes"):
        ranks.start_ranks(
            config,
            Path(),
            None,  # type: ignore[arg-type]
            ignore,
            drafter_folder=None,
            is_server=False,
            engine_index=0,
            interpreters=[One()],  # type: ignore[list-item]
        )
    assert spawned[0].returncode == 0
    for _, theirs in pairs.values():
        theirs.settimeout(10.0)
        assert theirs.recv(1) == b"", "a machine is not told"
        theirs.close()


def test_a_node_says_how_it_has_lost_node_0(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.send(b"unread")
        theirs.close()
        assert node_process._watch({}, node_process.Connected(ours, {}, {}, {}, {}), Grid(1, 2, 2)) == 0
    assert "node 0 is lost: the connection to it has failed ([Errno 104] Connection reset by peer)" in caplog.text


def test_what_waits_in_vain_says_what_it_was_doing() -> None:
    told: list[int] = []
    failing, places = SimpleNamespace(failed_rank=1), SimpleNamespace(name=lambda rank: f"process {rank} on host-a")
    ranks: Any = SimpleNamespace(
        rank=2, fail=lambda: told.append(2), own_failure=None, failing=failing, whereabouts=places
    )
    worker = DeviceWorker(None, ignore, ranks=ranks)  # type: ignore[arg-type]
    with (
        pytest.raises(
            PeerLostError, match=r"^Rank 2 cannot go on with a step: rank 1 has failed\. Rank 1 is process 1 on h"
        ),
        worker._as_rank("a step", in_step=True),
    ):
        raise GroupError("rank 1 has failed")
    assert told == [2]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_somebody_else_that_end_before_they_have_met(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", str(tmp_path))
    name = f"\0quire-ranks-{tmp_path}-0-0"

    def other() -> None:
        with socket.socket(socket.AF_UNIX) as end:
            if rank:
                end.bind(name)
                end.listen()
                end.accept()[0].close()
                return
            while end.connect_ex(name):
                time.sleep(0.01)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    with pytest.raises(ConnectionError, match=r"has ended|reset|Broken pipe"):
        external._meet(rank, Grid(2), EngineConfig(tensor_parallel_size=2), tmp_path, lambda text: None)
    thread.join()
