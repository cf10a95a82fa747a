"""Runs the ranks of a node that has no engine (`quire serve --headless`). They obey node 0, and end with it."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quire import envs
from quire.config import EngineConfig
from quire.distributed import wire
from quire.distributed.layout import Grid
from quire.distributed.pulse import Pulse, is_silence, why
from quire.distributed.shared_memory import make_memory
from quire.engine import nodes
from quire.engine.nodes import Joined, NodeLost, RankConnects, Refused, Use, Welcome
from quire.engine.rank_messages import RankLaunch
from quire.engine.rank_spawn import RankInterpreter
from quire.engine.ranks import CLOSE_SECONDS, LOOK_SECONDS, end_of, is_stopped, rank_name
from quire.errors import ConfigError
from quire.logs import get_logger
from quire.planning.binding import cpus_of_processes
from quire.planning.cut_stages import grid_of

logger = get_logger(__name__)


def run_node(
    config: EngineConfig, model_folder: Path, drafter_folder: Path | None, interpreters: list[RankInterpreter]
) -> int:
    """Compute for node 0 until it ends. Returns the exit code: 0, or 1 if a rank of this node was lost.

    Args:
        drafter_folder: the folder of the model that drafts; None: no model drafts.
        interpreters: interpreters for the ranks: see ranks.start_ranks.

    Raises ConfigError if node 0 cannot be reached, or refuses this node.
    """
    with ExitStack() as opened:
        return _run(config, model_folder, drafter_folder, interpreters, opened)


@dataclass(frozen=True)
class Connected:
    """The connections of a node that computes for node 0.

    Attributes:
        home: the connection of the node. Over it, the node says why it ends.
        controls: the connection of each rank of this node to node 0.
        adapters: another one of each rank, for adapters; empty: there are no adapters.
        links: the connections between ranks of this node and of other nodes: {own rank: {other rank: connection}}.
        pulses: the connections for pulses to nodes other than node 0 with which ranks here exchange rows, by the first
            rank there.
    """

    home: socket.socket
    controls: dict[int, socket.socket]
    adapters: dict[int, socket.socket]
    links: dict[int, dict[int, socket.socket]]
    pulses: dict[int, socket.socket]


def connect_node(
    config: EngineConfig, model_folder: Path, opened: ExitStack, drafter_folder: Path | None = None
) -> Connected:
    """Connect this node and all its ranks to node 0.

    Args:
        opened: closes the connections at its end.
        drafter_folder: see nodes.hello.

    Raises ConfigError if node 0 cannot be reached, or refuses this node.
    """
    key, grid = wire.cluster_key(), grid_of(config)
    until = time.monotonic() + envs.ENGINE_READY_TIMEOUT_S.get()
    name, place = "Node 0", (config.master_addr, config.master_port)
    logger.info("node %d connects to node 0 at %s, port %d", config.node_rank, *place)
    try:
        home = opened.enter_context(wire.connect(*place, key, until))
        listener = opened.enter_context(wire.listen(home.getsockname()[0], 0))
        own = nodes.hello(config, model_folder, listener.getsockname()[1], drafter_folder)
        wire.send(home, nodes.encode(own))
        message = nodes.decode(wire.receive(home))
        if isinstance(message, Refused):
            raise ConfigError(
                f"Node 0 refuses this node: {message.why}", fix="Start all nodes alike", param="node_rank"
            )
        assert isinstance(message, Welcome)
        until, places = time.monotonic() + nodes.MOST_WAIT_SECONDS, [place, *message.places]

        def connect(rank: int, use: Use, to: int = 0) -> socket.socket:
            nonlocal place, name
            name, place = f"Node {grid.node(to)}", places[grid.node(to)]
            peer = opened.enter_context(wire.connect(*place, key, until))
            wire.send(peer, nodes.encode(RankConnects(rank, use, to)))
            return peer

        here = grid.ranks_of(config.node_rank)
        out = {(rank, to): connect(rank, "rows", to) for rank, to in sorted(nodes.links_out(config, grid))}
        pulses = {to: connect(here[0], "pulse", to) for to in sorted(nodes.pulses_out(config, grid))}
        arrived, links_in, pulses_in = Joined(), nodes.links_in(config, grid), nodes.pulses_in(config, grid)
        while missing := {other for _, other in links_in - arrived.linked()} | (pulses_in - set(arrived.pulses)):
            other = min(missing)
            name, place = f"The connection of node {grid.node(other)}", listener.getsockname()[:2]
            nodes.take(listener, key, until, arrived)
        listener.close()
        for peer in arrived.peers():
            opened.enter_context(peer)
        controls = {rank: connect(rank, "orders") for rank in here}
        adapters = {rank: connect(rank, "adapters") for rank in here} if config.enable_lora else {}
    except (TimeoutError, wire.WireError, OSError) as error:
        raise ConfigError(
            f"{name} is not there: {error}",
            value=f"{place[0]}, port {place[1]}",
            fix="Check that the node was started, that no firewall closes this port, --master-addr and --master-port, "
            f"and {envs.CLUSTER_KEY.name} on both",
            param="master_addr",
        ) from error
    links = {rank: arrived.links.get(rank, {}) for rank in controls}
    for (rank, to), peer in out.items():
        links[rank][to] = peer
    return Connected(home, controls, adapters, links, pulses | arrived.pulses)


def _run(
    config: EngineConfig,
    model_folder: Path,
    drafter_folder: Path | None,
    interpreters: list[RankInterpreter],
    opened: ExitStack,
) -> int:
    grid, cpus = grid_of(config), cpus_of_processes(config)
    connected = connect_node(config, model_folder, opened, drafter_folder)
    memory = make_memory(grid)
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank, control in connected.controls.items():
            links = {other: peer.fileno() for other, peer in connected.links[rank].items()}
            own = cpus[rank % grid.num_local] if cpus else set[int]()
            model, drafter = str(model_folder), None if drafter_folder is None else str(drafter_folder)
            adapters = connected.adapters[rank].fileno() if connected.adapters else None
            launch = RankLaunch(config, model, drafter, rank, control.fileno(), memory, adapters, True, links, own)
            interpreter = interpreters.pop() if interpreters else RankInterpreter()
            processes[rank] = interpreter.launch(launch)
        os.close(memory)
        for peer in (
            *connected.controls.values(),
            *connected.adapters.values(),
            *(peer for own in connected.links.values() for peer in own.values()),
        ):
            peer.close()  # the processes have them
        return _watch(processes, connected, grid)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _watch(processes: dict[int, subprocess.Popen[bytes]], connected: Connected, grid: Grid) -> int:
    """Wait until node 0 is gone, or until a rank of this node or another node is lost. Node 0 is told about a loss."""
    is_over, ended = threading.Event(), dict[int, Exception]()

    def on_end(rank: int, error: Exception) -> None:
        if rank == 0 or is_silence(error):  # node 0 notices by itself that another node has ended
            ended[grid.node(rank)] = error
            is_over.set()

    with ExitStack() as watching:
        home = Pulse(connected.home, partial(on_end, 0))
        watching.callback(home.close)
        for rank, peer in connected.pulses.items():
            watching.callback(Pulse(peer, partial(on_end, rank)).close)
        lost = _lost_rank(processes, is_over, grid)
        if lost is None and 0 in ended:
            return _follow(ended[0], processes)
        for node, error in ended.items():
            lost = lost or f"Node {node} is lost, as node {grid.node(min(processes))} sees it: {why(error)}"
        assert lost is not None
        logger.error("%s", lost)
        with suppress(OSError):  # node 0 may be lost too
            home.say(nodes.encode(NodeLost(lost)))
        return 1


def _lost_rank(processes: dict[int, subprocess.Popen[bytes]], is_over: threading.Event, grid: Grid) -> str | None:
    """Wait until a rank of this node is lost, and say how. None: `is_over` was set before."""
    num_stopped = dict.fromkeys(processes, 0)
    while not is_over.wait(LOOK_SECONDS):
        for rank, process in processes.items():
            num_stopped[rank] = num_stopped[rank] + 1 if is_stopped(process.pid) else 0
            if (process.poll() is not None or num_stopped[rank] > 1) and not is_over.wait(LOOK_SECONDS):
                return end_of(process, rank_name(rank, grid))
    return None


def _follow(error: Exception, processes: dict[int, subprocess.Popen[bytes]]) -> int:
    """End behind node 0. If it has ended its connections, ranks end by themselves. Returns the exit code."""
    if is_silence(error):
        logger.error("node 0 is lost: %s", why(error))
        return 0
    if isinstance(error, OSError):
        logger.error("node 0 is lost: the connection to it has failed (%s)", error)
    else:
        logger.info("node 0 has ended")
    end = time.monotonic() + CLOSE_SECONDS
    while any(process.poll() is None for process in processes.values()) and time.monotonic() < end:
        time.sleep(LOOK_SECONDS / 5)
    return 0
