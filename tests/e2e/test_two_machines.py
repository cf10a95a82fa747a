"""Two machines with a network between them, which is cut without a word. Commands are those of docs/parallel.md.

A cut network sends no FIN and no RST. Both machines have to notice it, and busy machines must not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.kernels import cpu
from tests.e2e.serving import READY, SMALL, START_SECONDS, Program, Serve
from tests.engine.ranks import LIMITS
from tests.engine.test_external import check_answers, commands
from tests.engine.test_leaving_ranks import Witness
from tests.network import Machine, Network, two_machines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels"),
]

KEY, PORT = "of the tests, long enough", "29501"
LEAVES_WITHIN = 2.0  # seconds behind a cut, as docs/parallel.md promises
SHORT_SECONDS = 0.5  # of an interruption that is survived
PROMPT, LENGTH = "Hello", 400
STREAMED = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, "stream": True}
SIZES = {"ranks": ("-tp", "2"), "stages": ("-pp", "2")}


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with two_machines(tmp_path) as network:
        for machine in network.machines:
            machine.environment["QUIRE_CLUSTER_KEY"] = KEY
        yield network


class Node(Serve):
    """`quire serve` on a machine."""

    def __init__(self, machine: Machine, *flags: str) -> None:
        super().__init__(*flags, *SMALL, waits=False, program=Program(("-m", "quire"), machine.popen))  # type: ignore[arg-type]


class Server(Node):
    """One that answers at a Unix socket, which is not of any network."""

    def __init__(self, machine: Machine, folder: Path, *flags: str) -> None:
        self.path = folder / "quire.sock"
        super().__init__(machine, "--uds", str(self.path), *flags)

    def client(self) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(self.path))
        return httpx.Client(transport=transport, base_url="http://quire", timeout=START_SECONDS)

    def get(self, path: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path)

    def wait_ready(self) -> None:
        self.wait_for(lambda: re.search(READY, self.log) is not None, "readiness", START_SECONDS)

    def wait_restarted(self) -> None:
        self.wait_for(lambda: "the engine is ready again" in self.log, "the next engine", START_SECONDS)

    def stream(self, has_begun: Callable[[], None]) -> str:
        """The text of a streamed answer. `has_begun` is called with each event."""
        text = ""
        with self.client() as client, client.stream("POST", "/v1/completions", json=STREAMED) as response:
            for line in filter(None, response.iter_lines()):
                if (data := line.removeprefix("data: ")) == "[DONE]":
                    return text
                event = json.loads(data)
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                has_begun()
        raise AssertionError("the stream was cut")

    def streams_over(self, disturb: Callable[[], None], count: int = 4) -> set[str]:
        """The different texts of streams that are disturbed when all of them have begun."""
        begun = [threading.Event() for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(self.stream, event.set) for event in begun]
            for event in begun:
                assert event.wait(START_SECONDS)
            assert not any(future.done() for future in futures), "the streams were too short to be disturbed"
            disturb()
            return {future.result(START_SECONDS) for future in futures}


def nodes_of(sizes: tuple[str, ...], network: Network) -> tuple[str, ...]:
    """The flags of both nodes."""
    return (*sizes, "--nnodes", "2", "--master-addr", network.machines[0].address, "--master-port", PORT)


def other_node(sizes: tuple[str, ...], network: Network) -> Node:
    return Node(network.machines[1], *nodes_of(sizes, network), "--node-rank", "1", "--headless")


@contextmanager
def served(sizes: tuple[str, ...], network: Network, folder: Path) -> Iterator[tuple[Server, Node]]:
    """The server on machine 0, and the node on machine 1."""
    flags = (*nodes_of(sizes, network), "--node-rank", "0")
    with Server(network.machines[0], folder, *flags) as server, other_node(sizes, network) as node:
        server.wait_ready()
        yield server, node


def text_of_one_process(llm: LLM) -> str:
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


def seconds_until(condition: Callable[[], bool], begin: float) -> float:
    while not condition():
        assert time.monotonic() - begin < 20.0
        time.sleep(0.005)
    return time.monotonic() - begin


@pytest.mark.parametrize(("sizes", "fault"), [("ranks", "cut"), ("stages", "unplug")])
def test_a_cut_network(sizes: str, fault: str, network: Network, tmp_path: Path, llm: LLM) -> None:
    """Both machines leave, and say why. The requests go on when the network is there again, with the same tokens.

    A short interruption is survived.
    """
    expected = text_of_one_process(llm)
    cut, mend = (network.cut, network.mend) if fault == "cut" else (network.unplug, network.plug)
    with served(SIZES[sizes], network, tmp_path) as (server, node):
        assert {machine.name for machine in network.machines} == {"machine-0", "machine-1"}

        def interrupt() -> None:
            cut()
            time.sleep(SHORT_SECONDS)
            mend()

        assert server.streams_over(interrupt) == {expected}
        assert server.get("/health").status_code == 200
        assert "Starting it again" not in server.log
        assert node.process.poll() is None

        took: dict[str, float] = {}

        def lose() -> None:
            witness, begin = Witness(), cut()
            with ThreadPoolExecutor(2) as pool:
                health = pool.submit(seconds_until, lambda: server.get("/health").status_code == 503, begin)
                took["ranks"] = seconds_until(lambda: len(network.machines[1].processes()) <= 1, begin)
                took["server"] = health.result()
            took["busy"] = witness.seconds_between(begin, time.monotonic())
            witness.close()

        with ThreadPoolExecutor(1) as pool:
            streams = pool.submit(server.streams_over, lose)
            streams_end = time.monotonic() + START_SECONDS
            while len(took) < 3:
                assert time.monotonic() < streams_end
                assert not streams.done(), streams.result()
                time.sleep(0.01)
            print(f"{sizes}: behind the cut {took}")
            assert max(took["ranks"], took["server"]) - took["busy"] < LEAVES_WITHIN
            assert node.wait_exit() == 0
            assert not network.machines[1].processes(), "a process is left on the other machine"
            assert "node 0 is lost: its machine has not answered for 1.5 s" in node.log
            address = network.machines[1].address
            named = rf"Rank 1 of 2.* \(on {re.escape(address)}\) is lost: its machine has not answered for 1\.5 s"
            assert re.search(named, server.log), server.log
            mend()
            with other_node(SIZES[sizes], network):
                server.wait_restarted()
                assert streams.result(START_SECONDS) == {expected}
                assert server.get("/health").status_code == 200


def test_a_name_of_another_network(network: Network, tmp_path: Path) -> None:
    """Some systems give a machine's own name an address of the loopback interface. Others would wait for it in vain."""
    first = network.machines[0]
    flags = ("-pp", "2", "--nnodes", "2", "--node-rank", "0", "--master-addr", first.name)
    first.hosts.write_text(f"127.0.1.1 {first.name}\n")
    with Server(first, tmp_path, *flags) as server:
        assert server.wait_exit() == 2
    assert "machine-0, which is 127.0.1.1 on this machine" in server.log
    assert "--master-addr" in server.log
    assert "MASTER_ADDR" in server.log


@pytest.mark.parametrize("sizes", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=["stages", "ranks"])
def test_torchrun(sizes: dict[str, int], network: Network, tmp_path: Path) -> None:
    """The command of docs/parallel.md."""
    agents = launched(network, *commands(tmp_path, **sizes))
    try:
        assert [agent.wait(100) for agent in agents] == [0, 0]
    finally:
        end(agents)
    check_answers(tmp_path, 2)


def launched(network: Network, *words: str) -> list[subprocess.Popen[bytes]]:
    """By torchrun, on both machines."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
    where = ("--master-addr", network.machines[0].name)
    return [
        machine.popen([*launcher, "--node-rank", str(number), *where, *words])
        for number, machine in enumerate(network.machines)
    ]


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


ENDLESS = """
import json, os, sys
from quire import LLM, SamplingParams
llm = LLM(distributed_executor_backend="external_launcher", **json.loads(sys.argv[1]))
params = SamplingParams(max_tokens=100, ignore_eos=True)
try:
    while True:
        llm.generate([[5, 7, 9, 11]], params, use_tqdm=False)
        print("answered", flush=True)
finally:
    print("has left", flush=True)
    os._exit(1)
"""


@pytest.mark.parametrize("sizes", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=["stages", "ranks"])
def test_a_cut_network_of_external_ranks(sizes: dict[str, int], network: Network, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDLESS)
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": network.machines[0].address}
    processes = [
        machine.popen(
            [sys.executable, str(script), json.dumps(LIMITS | sizes)],
            env=shared | {"RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, machine in enumerate(network.machines)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "answered\n", process.stderr.read()
        witness, begin = Witness(), network.cut()
        for process in processes:
            while (line := process.stdout.readline()) == "answered\n":
                pass
            assert line == "has left\n"
        took, busy = time.monotonic() - begin, witness.seconds_between(begin, time.monotonic())
        witness.close()
        errors = [process.communicate(timeout=10)[1] for process in processes]
    finally:
        end(processes)
    print(f"both have left after {took:.2f} s, on a machine that was busy for {busy:.2f} s")
    assert took - busy < LEAVES_WITHIN, errors
    for other, text in zip(reversed(network.machines), errors, strict=True):
        assert f"(on {other.address}) is lost: its machine has not answered for 1.5 s" in text


@pytest.fixture
def cluster(network: Network) -> Iterator[Network]:
    """A Ray cluster of both machines, as docs/parallel.md says. Each has a CPU."""
    pytest.importorskip("ray", reason="ray is in the extra `ray`")
    first, folder = network.machines[0], Path("/tmp/ray")  # Ray's own folder, which each machine has for itself
    folder.mkdir(exist_ok=True)
    place = f"{first.address}:6379"
    roles = (["--head", "--port=6379", "--include-dashboard=false"], [f"--address={place}"])
    started = []
    try:
        for machine, role in zip(network.machines, roles, strict=True):
            machine.run("mount", "-t", "tmpfs", "none", str(folder))
            machine.environment |= {"RAY_ADDRESS": place, "RAY_USAGE_STATS_ENABLED": "0"}
            size = ["--num-cpus=1", "--object-store-memory=80000000", f"--node-ip-address={machine.address}"]
            words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role, *size]
            started.append(machine.popen(words, stdout=subprocess.DEVNULL))
        yield network
    finally:
        end(started)


def test_a_cut_network_of_replicas(cluster: Network, tmp_path: Path, llm: LLM) -> None:
    """Streams of the lost replica go on at the other one. It is there again when the network is."""
    expected = text_of_one_process(llm)
    first, second = cluster.machines

    def engines() -> list[int]:
        return [each.pid for each in second.processes() if "quire.entry.replica" in each.cmdline()]

    with Server(first, tmp_path, "-dp", "2", "-dpb", "ray") as server:
        server.wait_ready()
        for machine in cluster.machines:
            assert re.search(rf"places for the replicas: .*{re.escape(machine.address)}", server.log), server.log
        assert engines()
        cuts: list[float] = []

        def lose() -> None:
            cuts.append(cluster.cut())
            assert seconds_until(lambda: not engines(), cuts[0]) < LEAVES_WITHIN

        assert server.streams_over(lose, 6) == {expected}
        took = time.monotonic() - cuts[0]
        print(f"replicas: all streams have ended {took:.2f} s behind the cut")
        assert took < 2 * LEAVES_WITHIN, "streams of the lost replica did not go on at once"
        lost = f"The engine at {second.address} is lost: its machine has not answered for 1.5 s"
        server.wait_for(lambda: lost in server.log, "the reason")
        assert server.get("/health").status_code == 200
        cluster.mend()
        server.wait_restarted()
        assert engines()
        assert server.streams_over(lambda: None, 6) == {expected}
