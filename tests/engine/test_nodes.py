"""Stages and ranks on several machines, which are two addresses of this one: tokens of one process, and failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import quire.demo
from quire import envs
from quire.config import EngineConfig
from quire.distributed import wire
from quire.engine import nodes
from quire.engine.nodes import Hello, Joined, Refused, Use, Welcome, let_in
from quire.engine.start import StartedEngine, start_engine
from quire.errors import ConfigError, EngineDeadError
from quire.kernels import cpu
from quire.messages import AddRequest
from quire.model_config import load_model_config
from quire.sampling_params import SamplingParams
from quire.speculative_config import SpeculativeConfig
from tests.engine.harness import run
from tests.engine.ranks import LIMITS, ignore, started
from tests.engine.test_leaving_ranks import LEAVES_WITHIN, Witness
from tests.engine.test_rank_processes import ENDLESS, EXPERTS, is_there, wait_for
from tests.engine.test_sameness import brief
from tests.engine.test_sameness_ranks import answers
from tests.engine.test_sameness_ranks_drafters import drafted
from tests.engine.test_sameness_ranks_lora import load
from tests.lora.adapters import write_random_adapter

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

ADDRESS, KEY = "127.0.0.2", "of the tests, long enough"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CLUSTER_KEY", KEY)


def free_port() -> int:
    with socket.create_server((ADDRESS, 0)) as taken:
        return int(taken.getsockname()[1])


def settings(port: int, **more: Any) -> dict[str, Any]:
    nodes = {"pipeline_parallel_size": 2, "nnodes": 2, "master_addr": ADDRESS, "master_port": port}
    return LIMITS | nodes | more


@contextmanager
def other_node(port: int, **more: Any) -> Iterator[subprocess.Popen[str]]:
    given = {name.replace("_", "-"): value for name, value in settings(port, **{"node_rank": 1} | more).items()}
    flags = [
        word
        for name, value in given.items()
        for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    ]
    command = [sys.executable, "-m", "quire", "serve", "--headless", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def head(port: int, drafter_folder: Path | None = None, folder: Path | None = None, **more: Any) -> StartedEngine:
    config = EngineConfig.from_kwargs(**settings(port, **more))
    folder = folder or quire.demo.path("target")
    return start_engine(config, folder, is_server=False, progress=ignore, drafter_folder=drafter_folder)


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children() if child.name() != "nursery"]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "num_stages"), [(1, 2), (2, 2), (4, 1)])
def test_two_machines_give_the_tokens_of_one_process(width: int, num_stages: int, tmp_path: Path) -> None:
    """Also with an adapter that comes later."""
    port, config = free_port(), load_model_config(quire.demo.path("target"))
    adapter = write_random_adapter(tmp_path, config, rank=8, modules=("down_proj", "lm_head"))
    more = {"tensor_parallel_size": width, "pipeline_parallel_size": num_stages, "enable_lora": True}
    with other_node(port, **more) as node:
        engine, one = head(port, **more), started(1, enable_lora=True)
        pids = children(node.pid)
        assert len(pids) == width * num_stages // 2
        assert run(engine.core, brief()) == run(one.core, brief())
        facts = [load(core, adapter).facts for core in (engine.core, one.core)]
        assert facts[0] is not None
        assert facts[0] == facts[1]
        adapted = [replace(prompt, adapter=facts[0].digest) for prompt in brief()]
        assert run(engine.core, adapted, prefix="adapted") == run(one.core, adapted, prefix="adapted")
        engine.core.shutdown()
        assert node.wait(10) == 0
        assert not any(map(is_there, pids))


@pytest.mark.slow
def test_a_head_reads_streams_of_another_machine() -> None:
    """Drafts go back to it. Drafters may have other places there, and must be the same."""
    port, folder = free_port(), quire.demo.path("eagle3")
    given = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
    with other_node(port, speculative_config=json.dumps(given)) as node:
        engine = head(port, speculative_config=SpeculativeConfig(**given), drafter_folder=folder)
        tokens, num_drafts, num_held = drafted(engine)
        assert tokens == run(started(1).core, brief())
        assert num_drafts > num_held > 10
        engine.core.shutdown()
        assert node.wait(10) == 0


def test_another_drafter_does_not_fit(tmp_path: Path) -> None:
    folder = quire.demo.path("draft")
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))

    def of(drafter: Path) -> Hello:
        speculation = SpeculativeConfig(method="draft_model", model=str(drafter))
        config = EngineConfig.from_kwargs(**settings(1), speculative_config=speculation)
        return nodes.hello(config, quire.demo.path("target"), drafter_folder=drafter)

    assert nodes.misfit(of(folder), of(copied)) is None
    (copied / "config.json").write_text((copied / "config.json").read_text() + " ")
    assert "with drafter" in str(nodes.misfit(of(folder), of(copied)))


@pytest.mark.slow
def test_a_model_that_drafts_on_two_machines() -> None:
    port, folder = free_port(), quire.demo.path("draft")
    drafts = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
    more = RANKS | {"tensor_parallel_size": 2}
    with other_node(port, **more, speculative_config=json.dumps(drafts)):
        engine = head(port, folder, **more, speculative_config=drafts)
        tokens, num_drafted, num_held = drafted(engine)
        engine.core.shutdown()
    assert tokens == run(started(1).core, brief())
    assert num_drafted > num_held > 5


@pytest.mark.parametrize(
    ("width", "asked", "own"),
    [
        (1, {"nnodes": 2}, {}),
        pytest.param(2, {"data_parallel_size_local": 1}, {"data_parallel_start_rank": 1}, marks=pytest.mark.slow),
    ],
)
def test_lanes_on_two_machines(width: int, asked: dict[str, int], own: dict[str, int], tmp_path: Path) -> None:
    """Tokens, logprobs and prefix hits of one process; in vLLM's words too. A rank that is lost there is named."""
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    port, form = free_port(), {"max_model_len": 128, "load_format": "dummy"}
    lanes = {"pipeline_parallel_size": 1, "tensor_parallel_size": width, "data_parallel_size": 2}
    more = form | lanes | {"enable_expert_parallel": True, "nnodes": 1, "enable_prefix_caching": True} | asked
    elsewhere = {"model": tmp_path, "node_rank": 0 if own else 1} | own
    with other_node(port, **more | elsewhere) as node:
        engine, one = head(port, folder=tmp_path, **more), started(1, tmp_path, **form)
        pids = children(node.pid)
        assert len(pids) == width
        wanted = answers(one.core)
        assert answers(engine.core) == wanted

        def cached(lane: int) -> int:
            """The tokens of a long prompt that are in the prefix cache of the lane."""
            params, found = SamplingParams(temperature=0.0, max_tokens=2), 0
            engine.core.add(AddRequest(f"cached {lane}", [7] * 60, params, 2, lane=lane))
            while engine.core.has_work():
                engine.core.step()
                if engine.core.last_record is not None:
                    found += engine.core.last_record.prefix_cache_hits
            return found

        assert [cached(lane) for lane in (1, 1, 0)] == [0, 48, 0]

        def hit(core: Any, step: int) -> None:
            if step == 20:
                os.kill(pids[-1], signal.SIGKILL)

        words = rf"Rank [{width}-{2 * width - 1}] of {2 * width} \(process {pids[-1]} on .*\) was killed by SIGKILL"
        with pytest.raises(EngineDeadError, match=words):
            run(engine.core, [ENDLESS] * 20, before_step=hit)
        engine.core.shutdown()
        assert node.wait(5) == 1
        assert wait_for(lambda: not any(map(is_there, pids)), 5.0)


STAGES = {"pipeline_parallel_size": 2}
RANKS = {"pipeline_parallel_size": 1, "tensor_parallel_size": 4}
BOTH = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
SIGNALS = {"is killed": signal.SIGKILL, "is stopped": signal.SIGSTOP}


@pytest.mark.parametrize(
    ("lost", "fault", "sizes"),
    [
        ("rank", "is killed", STAGES),
        ("rank", "is killed", RANKS),
        pytest.param("rank", "is killed", BOTH, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("node", "is killed", STAGES), ("node", "is killed", RANKS), ("rank", "is stopped", RANKS))
        ),
    ],
)
def test_what_is_lost_on_another_machine_is_named(lost: str, fault: str, sizes: dict[str, int]) -> None:
    """Within two seconds. Before that both machines give the tokens of one process."""
    port, times = free_port(), list[float]()
    with other_node(port, **sizes) as node, closing(Witness()) as witness:
        engine = head(port, **sizes)
        pids = children(node.pid)
        assert run(engine.core, brief()) == run(started(1).core, brief())

        def hit(core: Any, step: int) -> None:
            if step == 20:
                os.kill(pids[-1] if lost == "rank" else node.pid, SIGNALS[fault])
                times.append(time.monotonic())

        end = "was killed by SIGKILL" if fault == "is killed" else "was stopped by a signal"
        words = rf"\(process {pids[-1]} on .*\) {end}" if lost == "rank" else r"\(on 127.0.0.1\) is lost"
        last = "Rank 1 of 2, in stage 0 of 2" if sizes is STAGES else "Rank [23] of 4(, in stage 0 of 2)?"
        with pytest.raises(EngineDeadError, match=f"{last} {words}"):
            run(engine.core, [ENDLESS] * 200, before_step=hit)  # a busy machine may take some time to end a process
        times.append(time.monotonic())
        assert times[1] - times[0] - witness.seconds_between(*times) < LEAVES_WITHIN
        engine.core.shutdown()
        assert wait_for(lambda: not any(map(is_there, pids)), 5.0)
        assert node.wait(5) == (1 if lost == "rank" else -signal.SIGKILL)


HEAD = """
import sys
from quire import LLM
llm = LLM(**{arguments})
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_another_machine_ends_when_machine_0_is_killed() -> None:
    port = free_port()
    with other_node(port) as node:
        command = [sys.executable, "-c", HEAD.format(arguments=settings(port))]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout is not None
            assert "ready" in first.stdout.read(6)
            pids = children(node.pid)
            first.kill()
        assert node.wait(5) == 0
        assert not any(map(is_there, pids))
    socket.create_server((ADDRESS, port)).close()


@pytest.mark.slow
def test_a_machine_with_other_settings_says_what_differs() -> None:
    port = free_port()
    found: list[Joined] = []
    config = EngineConfig.from_kwargs(**settings(port))
    letting = in_thread(lambda: found.append(let_in(config, quire.demo.path("target"), str)))
    with other_node(port, max_num_seqs=3) as node:
        assert node.stderr is not None
        text = node.stderr.read()
        assert node.wait(5) == 2
    assert "max_num_seqs is 4 on node 0 and 3 on node 1" in text
    assert not found
    finish(port, config)
    letting.join(15.0)
    close(found)


def in_thread(task: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    return thread


def come(port: int) -> socket.socket:
    return wire.connect(ADDRESS, port, KEY.encode(), time.monotonic() + 20)


def told(config: EngineConfig, node: int = 1, **changes: Any) -> Hello:
    own = nodes.hello(config, quire.demo.path("target"), 1)
    return msgspec.structs.replace(own, node=node, **changes)


def finish(port: int, config: EngineConfig) -> None:
    """Come as the machine that is waited for."""
    with come(port) as home:
        wire.send(home, nodes.encode(told(config)))
        assert nodes.decode(wire.receive(home)) == Welcome([])
        connect(port, (1, "rows"), (1, "orders"))


def connect(port: int, *uses: tuple[int, Use]) -> None:
    """Connections of ranks, each for one use."""
    for rank, use in uses:
        with come(port) as peer:
            wire.send(peer, nodes.encode(nodes.RankConnects(rank, use)))


def close(found: list[Joined]) -> None:
    """What was let in."""
    (joined,) = found
    assert (*joined.homes, *joined.ranks, *joined.linked()) == (1, 1, (0, 1))
    for peer in joined.peers():
        peer.close()


def test_a_machine_that_starts_again_while_others_are_awaited() -> None:
    port, waited, found = free_port(), list[str](), list[Joined]()
    config = EngineConfig.from_kwargs(**settings(port, pipeline_parallel_size=3, nnodes=3))
    letting = in_thread(lambda: found.append(let_in(config, quire.demo.path("target"), waited.append)))

    def coming(node: int) -> socket.socket:
        home = come(port)
        wire.send(home, nodes.encode(told(config, node)))
        return home

    with coming(1):
        assert wait_for(lambda: any("for node 2 at" in text for text in waited))
        with coming(1) as another:
            assert nodes.decode(wire.receive(another)) == Refused("node 1 is here already, or is none of 1 to 2")
    with coming(1) as one, coming(2) as two:
        welcomes = [nodes.decode(wire.receive(home)) for home in (one, two)]
        assert welcomes == [Welcome([]), Welcome([(one.getsockname()[0], 1)])]
        connect(port, (1, "rows"), (1, "orders"), (2, "orders"))
        letting.join(15.0)
    for peer in found[0].peers():
        peer.close()


class AbortedOnce:
    """A listener whose first peer has gone before it was let in."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._has_aborted = listener, False

    def settimeout(self, seconds: float) -> None:
        self._listener.settimeout(seconds)

    def accept(self) -> tuple[socket.socket, Any]:
        if self._has_aborted:
            return self._listener.accept()
        self._has_aborted = True
        raise ConnectionAbortedError("Software caused connection abort")


def test_strangers_hold_nobody_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One has gone again, and one sends slowly: the limit is of its whole answer, not of each piece."""
    found: list[socket.socket] = []
    with wire.listen(ADDRESS, 0) as listener:
        until, port = time.monotonic() + 60, listener.getsockname()[1]
        letting = in_thread(lambda: found.append(wire.accept(AbortedOnce(listener), KEY.encode(), until)))  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(wire, "HANDSHAKE_SECONDS", 0.3)
            with socket.create_connection((ADDRESS, port)) as slow, suppress(OSError):
                for byte in (64).to_bytes(8) + bytes(64):
                    slow.sendall(bytes([byte]))
                    time.sleep(0.05)
            assert wait_for(lambda: "because it is none of our machines: timed out" in caplog.text)
        with come(port):
            letting.join(15.0)
    assert "Software caused connection abort" in caplog.text
    (peer,) = found
    peer.close()


def test_who_is_let_in(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are dropped and logged; the right machine comes after all of them."""
    port, waited = free_port(), list[str]()
    config = EngineConfig.from_kwargs(**settings(port))
    found: list[Joined] = []
    letting = in_thread(lambda: found.append(let_in(config, quire.demo.path("target"), waited.append)))
    with pytest.raises(wire.WireError, match="does not accept this machine"):
        wire.connect(ADDRESS, port, b"another key, as long", time.monotonic() + 5)
    with socket.create_connection((ADDRESS, port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 4)
        with suppress(OSError):
            while stranger.recv(4096):
                pass
    assert wait_for(lambda: "a frame has" in caplog.text, 5.0)
    for frame in (b"no message", nodes.encode(Welcome([("here", 1)]))):
        with come(port) as peer:
            wire.send(peer, frame)
    for changes in ({"version": "0.0.1"}, {"isa": "none"}, {"checkpoint": "other"}, {"settings": {}}):
        with come(port) as peer:
            wire.send(peer, nodes.encode(told(config, **changes)))
            answer = nodes.decode(wire.receive(peer))
            assert isinstance(answer, Refused)
            name = "VLLM_PP_LAYER_PARTITION" if "settings" in changes else next(iter(changes))
            assert f"{name} is" in answer.why
            assert "on node 0 and" in answer.why
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 1.0)
    with come(port):  # it says nothing, and is waited for in vain
        finish(port, config)
        letting.join(15.0)
    close(found)
    assert "it does not know the cluster key" in caplog.text
    assert "because its message is not a node's" in caplog.text
    assert waited[0] == f"waiting for node 1 at {ADDRESS}, port {port}"


def test_a_machine_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "1")
    with pytest.raises(ConfigError, match="Node 1 of 2 has not come") as error:
        head(free_port())
    assert "--node-rank 1 --headless --master-addr 127.0.0.2" in error.value.message


def test_a_port_in_use_names_its_flag() -> None:
    with socket.create_server((ADDRESS, 0)) as taken, pytest.raises(ConfigError, match="in use") as error:
        head(taken.getsockname()[1])
    assert error.value.param == "master_port"
    assert "--master-port" in error.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nnodes": 3}, "3 machines cannot share 2 stages of 1 rank[.].*one of 1, 2:"),
        (
            {"tensor_parallel_size": 6, "nnodes": 3},
            "3 machines cannot share 2 stages of 6 ranks.*one of 1, 2, 4, 6, 12:",
        ),
        ({"nnodes": 0}, "0 machines cannot share"),
        ({"node_rank": 2, "headless": True}, "There is no such machine"),
        ({"node_rank": 1}, "Only machine 0 runs the server"),
        ({"headless": True}, "Only machine 0 runs the server"),
        ({"node_rank": 1, "headless": True}, "has no engine"),
        ({"data_parallel_size": 2}, "Each of several replicas is on one machine"),
        ({"master_addr": "0.0.0.0"}, "from all networks"),
        ({"master_addr": "::"}, "from all networks"),
        ({"master_addr": "0"}, "from all networks"),
        ({"master_port": 0}, "Illegal value of master_port"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        head(29501, **changes)


def test_nobody_listens_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("", "short"):
        monkeypatch.setenv(envs.CLUSTER_KEY.name, key)
        with pytest.raises(ConfigError, match="Machines need a cluster key"):
            head(free_port())
