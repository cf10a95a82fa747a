"""Connects the nodes of an engine that is spread over several machines. Node 0 waits for the others.

Each node describes itself to node 0. If it fits, and when all nodes have come, node 0 tells it where the nodes before
it listen. Then the node connects its ranks: each to node 0, and to the ranks of nodes before it with which it exchanges
rows.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from quire import __version__, envs, extension
from quire.config import EngineConfig
from quire.distributed import wire
from quire.distributed.layout import Grid
from quire.errors import ConfigError
from quire.logs import get_logger
from quire.option import options
from quire.planning.cut_stages import grid_of

T = TypeVar("T", bound=msgspec.Struct)
Use = Literal["orders", "adapters", "rows", "pulse"]  # of the connection of a rank: see RankConnects

MOST_WAIT_SECONDS = 60.0  # the most seconds that connected nodes take for one step of their start
MOST_NAMED = 5  # the most differences of two nodes that an error names
LOOK_SECONDS = 1.0  # seconds between two checks of nodes that are started from here
# These settings may differ: the places of files, the number of the node, and the address at which it reaches node 0.
_OWN_SETTINGS = {"model", "tokenizer", "download_dir", "node_rank", "headless", "served_model_name"}
_OWN_SETTINGS |= {"master_addr", "master_port", "numa_bind", "numa_bind_nodes", "numa_bind_cpus", "device_ids"}
_OWN_SETTINGS |= {"data_parallel_start_rank"}

logger = get_logger(__name__)


class Hello(msgspec.Struct, tag=True):
    """The first message of a node. `port` is the port at which it listens for the links of another node."""

    node: int
    version: str
    isa: str
    checkpoint: str
    settings: dict[str, Any]
    port: int


class Refused(msgspec.Struct, tag=True):
    """The answer of node 0 to a node that does not fit."""

    why: str


class Welcome(msgspec.Struct, tag=True):
    """The message of node 0 when all nodes have come: where the nodes between node 0 and this one listen."""

    places: list[tuple[str, int]]


class RankConnects(msgspec.Struct, tag=True):
    """The first message on the connection of a rank.

    Attributes:
        use: over `orders`, node 0 tells the rank what to do. Over `adapters`, it lets the rank read adapters meanwhile.
            Over `rows`, a link, two ranks exchange rows. Over `pulse`, two nodes notice when the network between them
            is cut; the first ranks of both stand for them.
        to: the rank at the other end.
    """

    rank: int
    use: Use
    to: int = 0


class NodeLost(msgspec.Struct, tag=True):
    """A node cannot go on, because of one of its ranks."""

    why: str


Message = Hello | Refused | Welcome | RankConnects | NodeLost
encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Message).decode


def hello(config: EngineConfig, model_folder: Path, port: int = 0, drafter_folder: Path | None = None) -> Hello:
    """The description of this node.

    Args:
        drafter_folder: the folder of the model that drafts; None: no model drafts.
    """
    shown = {f.name: getattr(config, f.name) for f in options(EngineConfig) if not f.metadata["secret"]}
    settings: dict[str, Any] = {name: value for name, value in shown.items() if name not in _OWN_SETTINGS}
    settings[envs.PP_LAYER_PARTITION.name] = envs.PP_LAYER_PARTITION.get()
    told = msgspec.json.decode(msgspec.json.encode(settings))  # the form in which the settings of other nodes arrive
    is_dummy = config.load_format == "dummy"
    found = checkpoint(model_folder, is_dummy=is_dummy)
    if drafter_folder is not None:  # the cut of the model depends on it. Its place may differ, as the model's may
        found += f" with drafter {checkpoint(drafter_folder, is_dummy=is_dummy)}"
        del told["speculative_config"]["model"]
    return Hello(config.node_rank, __version__, extension.chosen_isa(), found, told, port)


def checkpoint(folder: Path, *, is_dummy: bool) -> str:
    """A digest that tells checkpoints apart, from the names and sizes of their files and the content of config.json."""
    found = hashlib.sha256()
    files = [folder] if folder.is_file() else [] if is_dummy else sorted(folder.glob("*.safetensors"))
    for path in files:
        found.update(f"{path.name} {path.stat().st_size} ".encode())
    if folder.is_dir():
        found.update((folder / "config.json").read_bytes())
    return found.hexdigest()[:16]


def misfit(own: Hello, other: Hello) -> str | None:
    """The reason why another node does not fit this one, with both values; None: it fits."""
    facts = [(name, getattr(own, name), getattr(other, name)) for name in ("version", "isa", "checkpoint")]
    names = sorted(own.settings.keys() | other.settings.keys())
    facts += [(name, own.settings.get(name), other.settings.get(name)) for name in names]
    found = [
        f"{name} is {mine!r} on node {own.node} and {its!r} on node {other.node}"
        for name, mine, its in facts
        if mine != its
    ]
    more = f"; {len(found) - MOST_NAMED} more differ" if len(found) > MOST_NAMED else ""
    return "; ".join(found[:MOST_NAMED]) + more or None


@dataclass(frozen=True)
class Joined:
    """The connections that a node has taken.

    Attributes:
        homes: the connection to each other node. It ends with its node.
        ranks: the connection to each rank of another node.
        links: the connections to ranks of other nodes that exchange rows with ranks here: {rank here: {other rank:
            connection}}.
        adapters: another connection to each rank of another node, for adapters; empty: there are no adapters.
        pulses: the connection for a pulse to each later node, by its first rank; empty on node 0, which has homes.
    """

    homes: dict[int, socket.socket] = field(default_factory=dict)
    ranks: dict[int, socket.socket] = field(default_factory=dict)
    links: dict[int, dict[int, socket.socket]] = field(default_factory=dict)
    adapters: dict[int, socket.socket] = field(default_factory=dict)
    pulses: dict[int, socket.socket] = field(default_factory=dict)

    def linked(self) -> set[tuple[int, int]]:
        """The pairs of a rank here and another rank that have a link."""
        return {(rank, other) for rank, own in self.links.items() for other in own}

    def peers(self) -> list[socket.socket]:
        """All connections."""
        links = (peer for own in self.links.values() for peer in own.values())
        return [*self.homes.values(), *self.ranks.values(), *links, *self.adapters.values(), *self.pulses.values()]


class Starting(Protocol):
    """Starts the other nodes. They connect to `address`, and know the key."""

    address: str
    port: int  # the port of node 0; 0: the system chooses one
    key: str

    def start(self, address: str, port: int) -> None:
        """Start the other nodes. Node 0 listens at this address and port."""
        ...

    def check(self) -> None:
        """Raise ConfigError if a node has ended and so will not come."""
        ...

    def close(self) -> None:
        """Let the nodes end."""
        ...


def let_in(
    config: EngineConfig,
    model_folder: Path,
    waiting: Callable[[str], None],
    starting: Starting | None = None,
    drafter_folder: Path | None = None,
) -> Joined:
    """Wait for all other nodes, and connect their ranks.

    Args:
        waiting: is called with a text that says which nodes are still missing.
        starting: starts the nodes; None: people start them.
        drafter_folder: see `hello`.

    Raises:
        ConfigError: the port is in use, or a node does not come in time.
    """
    key = wire.cluster_key() if starting is None else starting.key.encode()
    place = (config.master_addr, config.master_port) if starting is None else (starting.address, starting.port)
    own, joined = hello(config, model_folder, drafter_folder=drafter_folder), Joined()
    try:
        with wire.listen(*place) as listener:
            if starting is not None:
                starting.start(*listener.getsockname()[:2])
            ports = _gather(config, own, listener, key, joined.homes, waiting, starting)
            _connect(config, listener, key, ports, joined)
    except BaseException:
        for peer in joined.peers():
            peer.close()
        raise
    return joined


def _gather(
    config: EngineConfig,
    own: Hello,
    listener: socket.socket,
    key: bytes,
    homes: dict[int, socket.socket],
    waiting: Callable[[str], None],
    starting: Starting | None,
) -> dict[int, int]:
    """Wait for all nodes. Returns the ports at which they listen."""
    until, ports = time.monotonic() + envs.ENGINE_READY_TIMEOUT_S.get(), dict[int, int]()
    address, port = listener.getsockname()[:2]
    while missing := set(range(1, config.nnodes)) - _present(homes):
        names = ", ".join(map(str, sorted(missing)))
        waiting(f"waiting for node {names} at {address}, port {port}")
        if starting is not None:
            starting.check()
        try:
            peer = wire.accept(listener, key, min(until, time.monotonic() + LOOK_SECONDS))
        except TimeoutError:
            if time.monotonic() < until:
                continue
            raise ConfigError(
                f"Node {names} of {config.nnodes} has not come",
                value=envs.ENGINE_READY_TIMEOUT_S.get(),
                fix=f"Start it with --node-rank {min(missing)} --headless --master-addr {address} "
                f"--master-port {port}, or raise {envs.ENGINE_READY_TIMEOUT_S.name}",
                param="nnodes",
            ) from None
        message = _first_message(peer, Hello)
        if message is None:
            continue
        why = misfit(own, message)
        if message.node in _present(homes) or message.node not in range(1, config.nnodes):
            why = f"node {message.node} is here already, or is none of 1 to {config.nnodes - 1}"
        if why is None:
            homes[message.node], ports[message.node] = peer, message.port
            continue
        logger.warning("a node is refused: %s", why)
        with suppress(OSError), peer:
            wire.send(peer, encode(Refused(why)))
    return ports


def _present(homes: dict[int, socket.socket]) -> set[int]:
    """The nodes that are still connected. Other nodes have ended, and may connect again."""
    for node, home in list(homes.items()):
        if _has_ended(home):
            logger.warning("node %d has ended; node 0 waits for it to connect again", node)
            homes.pop(node).close()
    return set(homes)


def _has_ended(home: socket.socket) -> bool:
    try:
        return not home.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:  # the node is there and waits
        return False
    except OSError:
        return True


def _connect(
    config: EngineConfig, listener: socket.socket, key: bytes, ports: Mapping[int, int], joined: Joined
) -> None:
    """Tell all nodes that everybody has come, and wait for the connections of their ranks."""
    grid, until = grid_of(config), time.monotonic() + MOST_WAIT_SECONDS
    others, links = set(range(grid.num_local, grid.size)), links_in(config, grid)
    loading = others if config.enable_lora else set()
    try:
        places = list[tuple[str, int]]()
        for node, home in sorted(joined.homes.items()):
            wire.send(home, encode(Welcome(places)))
            places.append((home.getpeername()[0], ports[node]))
        while (set(joined.ranks), joined.linked(), set(joined.adapters)) != (others, links, loading):
            take(listener, key, until, joined)
    except OSError as error:  # a time limit is an OSError too
        raise ConfigError(
            f"A node has left before all ranks were connected: {error}",
            fix="Look at the messages of the other nodes, and start them again",
            param="nnodes",
        ) from error


def take(listener: socket.socket, key: bytes, until: float, joined: Joined) -> None:
    """Wait for one connection of a rank. Raises TimeoutError."""
    peer = wire.accept(listener, key, until)
    if (message := _first_message(peer, RankConnects)) is not None:
        links = joined.links.setdefault(message.to, {}) if message.use == "rows" else {}
        uses = {"orders": joined.ranks, "adapters": joined.adapters, "rows": links, "pulse": joined.pulses}
        uses[message.use][message.rank] = peer


def _first_message(peer: socket.socket, kind: type[T]) -> T | None:
    """The first message of a peer; None: it is of another kind, and the peer was dropped."""
    try:
        message = decode(wire.receive(peer, until=time.monotonic() + wire.HANDSHAKE_SECONDS))
        peer.settimeout(None)
        if isinstance(message, kind):
            return message
        raise wire.WireError(f"{type(message).__name__} where {kind.__name__} comes first")
    except (wire.WireError, OSError, msgspec.MsgspecError) as error:
        logger.warning("a connection is closed, because its message is not a node's: %s", error)
        peer.close()
        return None


def links_out(config: EngineConfig, grid: Grid) -> set[tuple[int, int]]:
    """The links of ranks here with ranks of nodes before this one, to which this node connects: (rank, other rank)."""
    return {(rank, other) for rank in grid.ranks_of(config.node_rank) for other in grid.far(rank) if other < rank}


def links_in(config: EngineConfig, grid: Grid) -> set[tuple[int, int]]:
    """The links of ranks here with ranks of later nodes, which connect to this one: (rank, other rank)."""
    return {(rank, other) for rank in grid.ranks_of(config.node_rank) for other in grid.far(rank) if other > rank}


def pulses_out(config: EngineConfig, grid: Grid) -> set[int]:
    """The first ranks of the nodes before this one, node 0 left out, to which ranks here connect."""
    return {grid.ranks_of(node)[0] for _, other in links_out(config, grid) if (node := grid.node(other)) > 0}


def pulses_in(config: EngineConfig, grid: Grid) -> set[int]:
    """The first ranks of the later nodes that connect to ranks here."""
    return {grid.ranks_of(grid.node(other))[0] for _, other in links_in(config, grid)}
