"""Ranks that another program starts, such as torchrun: each has an engine, and all get the tokens of one process."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import quire.demo
from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.distributed import wire
from quire.distributed.layout import Grid
from quire.distributed.shared_memory import make_memory, ranks_on
from quire.engine import external
from quire.engine.external import Companions, ExternalExecutor
from quire.errors import ConfigError, EngineDeadError
from quire.kernels import cpu
from quire.schedule import ScheduledBatch
from tests.engine.ranks import LIMITS

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

KEY = "of the tests, long enough"
ANY_MODEL: Any = SimpleNamespace(model="a folder")
PROMPTS = ["The river", "A cat sat", "Once", "Why is the sky blue?"]
SCRIPT = """
import json, os, sys
from quire import LLM, SamplingParams
prompts, arguments, rank = json.loads(sys.argv[1]), json.loads(sys.argv[2]), os.environ["RANK"]
llm = LLM(distributed_executor_backend="external_launcher", **arguments)
params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, logprobs=1)
found = [[list(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob] for o in llm.generate(prompts, params)]
assert "torch._dynamo" not in sys.modules, "torch has loaded its compiler, which takes longer than the start"
with open(f"{sys.argv[3]}/{rank}.json", "w") as file:
    json.dump(found, file)
if "differ" in sys.argv:
    llm.generate([*prompts, "Something else" if rank == "1" else "The same"], params)
if "lost" in sys.argv:
    import signal
    from quire.distributed.shared_memory import SharedMemoryGroup
    def end(*arguments):
        os.kill(os.getpid(), signal.SIGSTOP if "stopped" in sys.argv else signal.SIGKILL)
    if rank == "1":
        SharedMemoryGroup.gather_to = end
    if "outside" in sys.argv and rank == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    llm.generate([[5, 7, 9, 11]], params)
"""


def commands(folder: Path, **sizes: Any) -> list[str]:
    (folder / "script.py").write_text(SCRIPT)
    return [str(folder / "script.py"), json.dumps(PROMPTS), json.dumps(LIMITS | sizes), str(folder)]


@cache
def expected() -> list[Any]:
    llm = LLM(**LIMITS)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, logprobs=1)
    return [[list(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob] for o in llm.generate(PROMPTS, params)]


def together(folder: Path, num_ranks: int, *more: str, **sizes: Any) -> list[tuple[int, str]]:
    """The exit code and the errors of each rank. Others that are stopped are killed when the first one has ended."""
    own = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": str(folder), "MASTER_PORT": str(os.getpid())}
    words = [sys.executable, *commands(folder, **sizes), *more]
    processes = [
        subprocess.Popen(words, env=os.environ | own | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
    try:
        texts = [processes[0].communicate(timeout=100)[1]]
        for process in processes[1:]:
            if "stopped" in more:
                process.kill()
            texts.append(process.communicate(timeout=100)[1])
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]


def check_answers(folder: Path, size: int) -> None:
    for rank in range(size):
        assert json.loads((folder / f"{rank}.json").read_text()) == expected()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "num_stages"), [(1, 2), (2, 1), (2, 2)])
def test_every_rank_gets_the_answers_of_one_process(width: int, num_stages: int, tmp_path: Path) -> None:
    """With two stages of one rank each, a head in the last one drafts."""
    size = width * num_stages
    sizes: dict[str, Any] = {"tensor_parallel_size": width, "pipeline_parallel_size": num_stages}
    if size == num_stages:
        sizes["speculative_config"] = {"method": "eagle3", "model": str(quire.demo.path("eagle3"))}
    ended = together(tmp_path, size, **sizes)
    assert [code for code, _ in ended] == [0] * size, ended
    check_answers(tmp_path, size)


def test_ranks_with_different_requests_end(tmp_path: Path) -> None:
    """An error, and no hang. Before it they get the answers of one process, also if they read weights in turns."""
    ended = together(tmp_path, 2, "differ", pipeline_parallel_size=2, max_parallel_loading_workers=1)
    check_answers(tmp_path, 2)
    for code, text in ended:
        assert code == 1
        assert "Rank 1 has scheduled something else than rank 0" in text


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["lost"], "its connection was closed"),
        (["lost", "stopped"], "its process was stopped by a signal"),
        pytest.param(["lost", "stopped", "outside"], "its process was stopped by a signal", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost(words: list[str], cause: str, tmp_path: Path) -> None:
    """The other one waits for it in an exchange or outside, where 600 s would be the limit. It says who is lost."""
    (first, text), (second, _) = together(tmp_path, 2, *words, pipeline_parallel_size=2)
    assert (first, second) == (1, -signal.SIGKILL)
    place = rf"process \d+ on {re.escape(platform.node())}"
    assert re.search(rf"rank 1 has failed: {cause}. Rank 1 is {place}|Rank 1 \({place}\) has (failed|ended): ", text)
    assert cause in text or ("stopped" not in words and "the connection was closed" in text)


@pytest.mark.parametrize(("visible", "own"), [("GPU-abc", "GPU-abc"), ("4,5", "5"), ("", "")])
def test_the_gpu_of_a_process(visible: str, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one that it may see, or the one of its place on the machine."""

    def meet(*arguments: Any) -> None:
        raise OSError("this test has one rank")

    monkeypatch.setattr(external, "_meet", meet)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="this test has one rank"):
        external.start_external(EngineConfig(tensor_parallel_size=2, device="auto"), ANY_MODEL, lambda *report: None)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


def test_ranks_read_weights_in_turns() -> None:
    """A turn begins when the one before has ended on all ranks."""
    config, grid, events = EngineConfig(max_parallel_loading_workers=2), Grid(width=3), list[tuple[str, int]]()
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    peers = {0: {rank: pair[0] for rank, pair in pairs.items()}, **{rank: {0: pair[1]} for rank, pair in pairs.items()}}

    def load_on(rank: int) -> None:
        worker: Any = SimpleNamespace(load=lambda settings: events.extend([("begins", rank), ("ends", rank)]))
        settings: Any = None
        ExternalExecutor(worker, Companions(rank, peers[rank]), external._loads(config, grid, rank)).load(settings)

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(load_on, rank) for rank in (2, 1, 0)]:
            done.result()
    assert sorted(events) == [(what, rank) for what in ("begins", "ends") for rank in range(3)]
    assert events[4:] == [("begins", 2), ("ends", 2)]
    for pair in pairs.values():
        for each in pair:
            each.close()


@pytest.mark.parametrize(("cause", "num_looks"), [(errno.ETIMEDOUT, 1), (errno.ECONNRESET, 2)])
def test_a_rank_whose_neighbour_notices_a_failure(cause: int, num_looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops waiting for the first rank. A failed rank gets a look's time to say why, and a lost machine none."""
    memory = make_memory(grid := Grid(width=2))
    ranks = ranks_on(memory, 1, grid, {}, has_own_cores=False, timeout_seconds=60.0)
    os.close(memory)
    looks = list[bool]()
    monkeypatch.setattr(type(ranks.whereabouts), "neighbours", lambda whereabouts: looks.append(True) or {})
    ranks.failing.fail_for(0, cause=cause)
    ours, theirs = socket.socketpair()
    companions = Companions(1, {0: ours})
    companions.watch(ranks)
    with pytest.raises(EngineDeadError, match=rf"Rank 0 .* has failed: .*{os.strerror(cause)}"):
        companions.hear()
    companions.close()
    theirs.close()
    ranks.close()
    assert len(looks) == num_looks


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    words = commands(tmp_path, pipeline_parallel_size=2)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([sys.executable, *launcher, *words], check=True, timeout=200)
    check_answers(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=["stages", "ranks"])
def test_torchrun_on_two_machines(sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are two addresses of this one."""
    monkeypatch.setenv("QUIRE_CLUSTER_KEY", KEY)
    port, own_port = free_ports(2)
    agents = []
    for node in range(2):
        where = ["--node-rank", str(node), "--local-addr", f"127.0.0.{node + 1}"]
        where += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        launcher = ["-m", "torch.distributed.run", "--nnodes", "2", *where, "--nproc-per-node", "1"]
        words = [sys.executable, *launcher, *commands(tmp_path, master_port=own_port, **sizes)]
        agents.append(subprocess.Popen(words))
    try:
        assert [agent.wait(200) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    check_answers(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "num_stages", "num_local"), [(2, 2, 2), (4, 1, 2), (2, 2, 1)])
def test_ranks_of_a_stage_on_several_machines(
    width: int, num_stages: int, num_local: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one rank on each, the last stage is on two machines, and a head drafts there."""
    for name, value in (("QUIRE_CLUSTER_KEY", KEY), ("LOCAL_WORLD_SIZE", str(num_local))):
        monkeypatch.setenv(name, value)
    (own_port,) = free_ports(1)
    sizes: dict[str, Any] = {"tensor_parallel_size": width, "pipeline_parallel_size": num_stages}
    if num_local == 1:
        sizes["speculative_config"] = {"method": "eagle3", "model": str(quire.demo.path("eagle3"))}
    ended = together(tmp_path, 4, master_addr="127.0.0.2", master_port=own_port, **sizes)
    assert [code for code, _ in ended] == [0] * 4, ended
    check_answers(tmp_path, 4)


def free_ports(count: int) -> list[int]:
    with ExitStack() as taken:
        servers = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in servers]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "WORLD_SIZE = tensor_parallel_size x pipeline_parallel_size = 2"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, "Machines need a cluster key"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, "Machines have different numbers of ranks"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "There is no such rank"),
    ],
)
def test_what_is_refused(environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        LLM(**LIMITS, pipeline_parallel_size=2, distributed_executor_backend="external_launcher")


def test_adapters_are_refused() -> None:
    """Ranks with an engine each would begin to use one at different steps."""
    with pytest.raises(ValueError, match="another program has started the ranks"):
        LLM(**LIMITS, enable_lora=True, distributed_executor_backend="external_launcher")


def test_each_rank_takes_the_gpu_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch looks for GPUs. The first one sees all, and counts them."""

    def meet(*arguments: Any) -> None:
        raise OSError("nobody is there")

    monkeypatch.setattr(external, "_meet", meet)
    model: Any = SimpleNamespace(model="m")
    for rank, device, wanted in ((1, "cpu", "4,7"), (0, "auto", "4,7"), (1, "auto", "7")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(ConfigError, match="nobody is there"):
            external.start_external(
                EngineConfig(tensor_parallel_size=2, device=device), model, lambda phase, share, detail: None
            )
        assert os.environ["CUDA_VISIBLE_DEVICES"] == wanted


def test_a_device_that_fails_ends_its_rank_in_that_step() -> None:
    """Of a rank that does not sample, too: nobody gives it an order behind the last step."""

    def fail() -> None:
        raise EngineDeadError("The GPU is gone")

    worker: Any = SimpleNamespace(submit=lambda batch: SimpleNamespace(result=fail))
    ours, theirs = socket.socketpair()
    running = ExternalExecutor(worker, Companions(1, {0: ours}))
    batch = ScheduledBatch(1, ["a"])
    wire.send(theirs, msgspec.msgpack.encode([external._digest(batch)] * 2))
    with pytest.raises(EngineDeadError, match="The GPU is gone"):
        running.submit(batch).result()
    wire.receive(theirs, 1000)
    assert theirs.recv(1) == b"", "the others wait for its answer"
    theirs.close()
