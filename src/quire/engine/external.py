"""Ranks that another program has started, such as torchrun: each has a whole engine, and all schedule the same.

Each computes its part of a step. The first rank samples, and the others get its results. Before a step all compare what
they have scheduled, so ranks that were given different requests end with an error.

Ranks of a machine meet at a Unix socket. On several machines, the first rank of each connects them as nodes do
(`engine/nodes.py`), and gives its neighbours their connections.
"""

from __future__ import annotations

import errno
import hashlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from quire import envs
from quire.config import EngineConfig
from quire.distributed import wire
from quire.distributed.group import CLOSED, STOPPED, Ranks
from quire.distributed.layout import MOST_LINKS, Grid
from quire.distributed.pulse import Pulse, is_silence, why
from quire.distributed.shared_memory import make_memory, ranks_on
from quire.engine.node_process import connect_node
from quire.engine.nodes import let_in
from quire.engine.rank_messages import Answer, Failed, FromRank, decode_from_rank, encode
from quire.engine.ranks import LOOK_SECONDS, is_stopped
from quire.engine.worker_thread import WorkerThread
from quire.errors import ConfigError, EngineDeadError, InvalidRequestError, PeerLostError
from quire.life_cycle import CacheSize, FirstWorker, Measured, WorkerSettings
from quire.logs import get_logger
from quire.lora.facts import AdapterFacts
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.planning import devices
from quire.planning.binding import bind, cpus_of_processes
from quire.planning.cut_stages import grid_of, part_of_rank
from quire.planning.replicas import has_own_cores
from quire.resolve import DeviceFacts
from quire.schedule import Pending, Polled, ScheduledBatch, StepResult, StepTokens
from quire.worker.worker import DeviceWorker

MOST_RESULT_BYTES, MOST_MEETING_BYTES = 1 << 30, 1024
MOST_DESCRIPTORS = MOST_LINKS + 2  # of a rank: its memory, a connection to the first rank, and its links
_RANK, _CREDENTIALS = struct.Struct("i"), struct.Struct("3i")
logger = get_logger(__name__)
_digested: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode


class Companions:
    """The connections of a rank to the first one, or of the first one to all others, by rank.

    Args:
        pulses: the connections for pulses to other machines, by the first rank there. The first rank of a machine has
            them. The companions own all connections.
    """

    def __init__(
        self, rank: int, peers: dict[int, socket.socket], pulses: dict[int, socket.socket] | None = None
    ) -> None:
        self.rank, self._peers = rank, peers
        self._pulse_peers, self._pulses = pulses or {}, list[Pulse]()
        self._is_closing = False
        self._ranks: Ranks | None = None  # None: they are not watched yet

    def all(self, frame: bytes) -> list[bytes]:
        """What all ranks say, in their order."""
        if self.rank:
            self._send(0, frame)
            return msgspec.msgpack.decode(self._receive(0), type=list[bytes])
        frames = [frame, *(self._receive(rank) for rank in sorted(self._peers))]
        self.tell(_digested(frames))
        return frames

    def tell(self, frame: bytes) -> None:
        """The first one says it to all others."""
        for rank in self._peers:
            self._send(rank, frame)

    def hear(self) -> bytes:
        """What the first one says."""
        return self._receive(0)

    def watch(self, ranks: Ranks) -> None:
        """From now on, tell waiting ranks when a rank has ended, or when two looks have found one here stopped.

        Also when another machine is lost, which the first rank here notices, and tells its neighbours.
        """
        self._ranks, poll = ranks, select.poll()
        self._pulses = [Pulse(peer, partial(self._on_silence, rank)) for rank, peer in self._pulse_peers.items()]
        numbers = {peer.fileno(): rank for rank, peer in self._peers.items()}
        for descriptor in numbers:
            poll.register(descriptor, select.POLLRDHUP)

        def look() -> None:
            stopped, causes, has_failed = set[int](), dict[int, int](), False
            while not causes:
                causes = {numbers[descriptor]: CLOSED for descriptor, _ in poll.poll(1000 * LOOK_SECONDS)}
                if self._is_closing:
                    return
                before, pids = stopped, ranks.whereabouts.neighbours()
                stopped = {rank for rank, pid in pids.items() if is_stopped(pid)}
                causes |= dict.fromkeys(before & stopped, STOPPED)
                # A rank that has failed since a look ago has had time to say why. A lost machine says nothing.
                if has_failed or ranks.failing.cause.endswith(os.strerror(errno.ETIMEDOUT)):
                    break
                has_failed = ranks.failing.failed_rank is not None
            for rank, cause in causes.items():
                ranks.failing.fail_for(rank, cause=cause)
            if not causes or STOPPED in causes.values():
                self._end()  # this rank may wait for a stopped or lost one outside of its steps

        if numbers:
            threading.Thread(target=look, name="other ranks", daemon=True).start()

    def _on_silence(self, rank: int, error: Exception) -> None:
        """Note that the machine of a rank is lost. If only the rank has ended, its other connections end too."""
        if is_silence(error):
            assert self._ranks is not None, "it is watched"
            name = self._ranks.whereabouts.name(rank)
            logger.error("rank %d (%s) is lost: %s", rank, name, why(error))
            self._ranks.failing.fail_for(rank, cause=errno.ETIMEDOUT)
            self._end()

    def close(self) -> None:
        self._is_closing = True
        for pulse in self._pulses:
            pulse.close()
        self._end()  # closing alone is not enough: the thread that watches keeps them open
        for peer in (*self._peers.values(), *self._pulse_peers.values()):
            peer.close()

    def _end(self) -> None:
        for peer in self._peers.values():
            wire.end(peer)

    def _send(self, rank: int, frame: bytes) -> None:
        try:
            wire.send(self._peers[rank], frame)
        except OSError as error:
            raise self._lost(rank, error) from error

    def _receive(self, rank: int) -> bytes:
        try:
            return wire.receive(self._peers[rank], MOST_RESULT_BYTES)
        except (wire.WireError, OSError) as error:
            raise self._lost(rank, error) from error

    def _lost(self, rank: int, error: Exception) -> EngineDeadError:
        if self._ranks is None:
            return EngineDeadError(f"Rank {rank} has ended: {error}")
        failing, name = self._ranks.failing, self._ranks.whereabouts.name
        if (failed := failing.failed_rank) is not None:
            return EngineDeadError(f"Rank {failed} ({name(failed)}) has failed: {failing.cause or error}")
        return EngineDeadError(f"Rank {rank} ({name(rank)}) has ended: {error}")


def start_external(config: EngineConfig, model_config: ModelConfig, progress: Progress) -> ExternalExecutor:
    """The executor of this rank, as soon as all ranks are there. Raises ConfigError.

    Args:
        config: see `placed`.
    """
    grid, rank = grid_of(config), envs.RANK.get()
    if cpus := cpus_of_processes(config):
        bind(cpus[rank % grid.num_local])
    if config.device != "cpu" and rank % grid.num_local:
        devices.see_gpu(devices.own_gpu(rank % grid.num_local))
    progress("load", 0.0, f"rank {rank} of {grid.size} waits for the others")
    try:
        met = _meet(rank, grid, config, model_config, partial(progress, "load", 0.0))
    except OSError as error:
        raise ConfigError(
            f"The ranks have not met: {error}", fix="Start as many as WORLD_SIZE says", param="RANK"
        ) from error
    try:
        ranks = ranks_on(
            met.memory,
            rank,
            grid,
            met.links,
            has_own_cores=has_own_cores(config, devices.num_cores()),
            timeout_seconds=config.distributed_timeout_seconds,
        )
    finally:
        os.close(met.memory)
    companions = Companions(rank, met.peers, met.pulses)
    companions.watch(ranks)
    worker = DeviceWorker(part_of_rank(model_config, config, rank), progress, ranks=ranks)
    return ExternalExecutor(worker, companions, _loads(config, grid, rank))


def _loads(config: EngineConfig, grid: Grid, rank: int) -> list[bool]:
    """See ExternalExecutor."""
    at_once = config.max_parallel_loading_workers or grid.num_local
    num_turns = -(-grid.num_local // at_once)
    return [turn == rank % grid.num_local // at_once for turn in range(num_turns)]


def placed(config: EngineConfig, *, is_server: bool) -> EngineConfig:
    """The config of this process, with the machines that the launcher tells. Raises ConfigError."""
    if is_server or config.nnodes > 1:
        raise ConfigError(
            "Ranks that another program starts cannot run a server: each of them has its own engine",
            value=config.distributed_executor_backend,
            fix="Use LLM(...) in a script that torchrun starts, or leave --distributed-executor-backend out",
            param="distributed_executor_backend",
        )
    size, local, rank = envs.WORLD_SIZE.get(), envs.LOCAL_WORLD_SIZE.get(), envs.RANK.get()
    if size != config.num_ranks:
        raise ConfigError(
            "Another program has started a number of ranks that differs from the settings",
            value=size,
            expected=f"WORLD_SIZE = tensor_parallel_size x pipeline_parallel_size = {config.num_ranks}",
            fix="Start this script with torchrun, with as many processes",
            param="distributed_executor_backend",
        )
    if not 0 <= rank < size:
        raise ConfigError("There is no such rank", value=rank, expected=f"RANK of 0 to {size - 1}", param="RANK")
    if local in (0, size):
        return config
    if size % local:
        raise ConfigError(
            "Machines have different numbers of ranks",
            value=local,
            expected=f"LOCAL_WORLD_SIZE that divides WORLD_SIZE = {size}",
            fix="Give all machines the same --nproc-per-node",
            param="distributed_executor_backend",
        )
    address = envs.MASTER_ADDR.get() if config.sources["master_addr"] == "default" else config.master_addr
    node = rank // local
    return replace(config, nnodes=size // local, node_rank=node, headless=node > 0, master_addr=address)


@dataclass
class _Met:
    """A rank's connections to the others.

    Attributes:
        peers: the connection to the first rank, or the connections from the first rank to all others.
        links: file descriptors to ranks of other machines, by rank.
        pulses: see Companions.
    """

    memory: int
    peers: dict[int, socket.socket]
    links: dict[int, int]
    pulses: dict[int, socket.socket]


def _meet(rank: int, grid: Grid, config: EngineConfig, model: ModelConfig, waiting: Callable[[str], None]) -> _Met:
    """Connections to all ranks, and the memory that ranks of this machine share. Raises OSError or ConfigError."""
    until = time.monotonic() + envs.ENGINE_READY_TIMEOUT_S.get()
    name = f"\0quire-ranks-{envs.MASTER_ADDR.get()}-{envs.MASTER_PORT.get()}-{config.node_rank}"
    with ExitStack() as on_error:
        if rank % grid.num_local:
            met = _join(rank, name, until, on_error)
        else:
            met = _gather(rank, grid, name, until, on_error, partial(_connect, config, grid, model, waiting))
        on_error.pop_all()
    return met


# The connections of each rank here to other machines: to the first rank, or from it to the others; and links, by rank.
# Then the connections for pulses: see Companions.
_Connections = tuple[dict[int, dict[int, socket.socket]], dict[int, dict[int, socket.socket]], dict[int, socket.socket]]


def _connect(
    config: EngineConfig, grid: Grid, model: ModelConfig, waiting: Callable[[str], None], on_error: ExitStack
) -> _Connections:
    """All connections of this machine to others. Raises ConfigError."""
    if grid.num_nodes == 1:
        return {}, {}, {}
    folder, drafter_folder = Path(model.model), model.drafter_folder
    if config.node_rank:
        connected = connect_node(config, folder, on_error, drafter_folder)
        pulses = {0: connected.home, **connected.pulses}
        return {rank: {0: peer} for rank, peer in connected.controls.items()}, connected.links, pulses
    joined = let_in(config, folder, waiting, drafter_folder=drafter_folder)
    for peer in joined.peers():
        on_error.enter_context(peer)
    return {0: joined.ranks}, joined.links, {grid.ranks_of(node)[0]: home for node, home in joined.homes.items()}


def _gather(
    rank: int,
    grid: Grid,
    name: str,
    until: float,
    on_error: ExitStack,
    connect: Callable[[ExitStack], _Connections],
) -> _Met:
    """The first rank of a machine waits for its neighbours, connects the machine, and gives them their connections."""
    neighbours: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        while len(neighbours) < grid.num_local - 1:
            listener.settimeout(max(until - time.monotonic(), 0.001))
            peer = on_error.enter_context(listener.accept()[0])
            if not _is_ours(peer):
                peer.close()
                continue
            peer.settimeout(max(until - time.monotonic(), 0.001))
            if len(frame := peer.recv(_RANK.size, socket.MSG_WAITALL)) < _RANK.size:
                raise ConnectionError("a rank has ended")
            peer.settimeout(None)
            neighbours[_RANK.unpack(frame)[0]] = peer
    peers, links, pulses = connect(on_error)
    memory = make_memory(grid)
    on_error.callback(os.close, memory)
    for other, neighbour in neighbours.items():
        to_first, to_others = peers.get(other, {}), links.get(other, {})
        given = [*to_first.values(), *to_others.values()]
        frame = _digested((list(to_first), list(to_others)))
        socket.send_fds(neighbour, [frame], [memory, *(each.fileno() for each in given)])
        for each in given:
            each.close()
    own = peers.get(rank, {}) | ({} if rank else neighbours)
    own_links = {other: peer.detach() for other, peer in links.get(rank, {}).items()}
    return _Met(memory, dict(sorted(own.items())), own_links, pulses)


def _join(rank: int, name: str, until: float, on_error: ExitStack) -> _Met:
    """Another rank connects to the first one of its machine, and gets its connections."""
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(name)
            break
        except OSError:
            peer.close()
            if time.monotonic() > until:
                raise
            time.sleep(wire.RETRY_SECONDS)
    on_error.enter_context(peer)
    if not _is_ours(peer):
        raise PermissionError("another user's process is in the place of the first rank")
    peer.sendall(_RANK.pack(rank))
    peer.settimeout(max(until - time.monotonic(), 0.001))
    frame, (memory, *given), _, _ = _received(peer)
    peer.settimeout(None)
    to_first, to_others = msgspec.msgpack.decode(frame, type=tuple[list[int], list[int]])
    peers = {other: socket.socket(fileno=given.pop(0)) for other in to_first}
    if peers:
        peer.close()  # the first rank of all is on another machine
    return _Met(memory, peers or {0: peer}, dict(zip(to_others, given, strict=True)), {})


def _received(peer: socket.socket) -> tuple[bytes, list[int], int, object]:
    """Bytes and file descriptors. Raises ConnectionError."""
    found = socket.recv_fds(peer, MOST_MEETING_BYTES, MOST_DESCRIPTORS)
    if not found[1]:
        raise ConnectionError("the first rank has ended")
    return found


def _is_ours(peer: socket.socket) -> bool:
    """Whether the process is the same user's."""
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.getuid())


class ExternalExecutor:
    """The WorkerExecutor of one of the ranks: each method is called on all of them, in the same order.

    Args:
        loads: for each turn of reading weights, whether this rank reads in it. All ranks have the same number of turns.
    """

    def __init__(self, worker: FirstWorker, companions: Companions, loads: Sequence[bool] = (True,)) -> None:
        self.worker, self._companions, self._loads = worker, companions, loads
        self._thread = WorkerThread(f"quire-worker-{companions.rank}")
        self._untold: list[StepTokens] = []

    def facts(self, wants_gpu: bool) -> list[DeviceFacts]:
        answers = self._everywhere(lambda: Answer(facts=self.worker.facts(wants_gpu)))
        return [answer.facts for answer in answers if answer.facts is not None]

    def load(self, settings: WorkerSettings) -> None:
        for is_own in self._loads:  # in the turns of others this rank has nothing to do
            self._everywhere(partial(self.worker.load, settings) if is_own else Answer)

    def measure(self) -> list[Measured]:
        answers = self._everywhere(lambda: Answer(measured=self.worker.measure()))
        return [answer.measured for answer in answers if answer.measured is not None]

    def allocate(self, size: CacheSize) -> None:
        self._everywhere(lambda: self.worker.allocate(size))

    def capture(self) -> None:
        self._everywhere(self.worker.capture)

    def use_tokenizer(self, tokenizer: str, eos_token_ids: Sequence[int]) -> None:
        """There are no grammars."""

    def prepare_grammar(self, text: str) -> Polled[None]:
        raise InvalidRequestError(
            "Structured output cannot be used if another program has started the ranks",
            fix="Leave structured output out, or let Quire start the ranks",
        )

    def check_alive(self) -> None:
        """Whoever has started the ranks watches them."""

    def describe(self) -> str:
        return self.worker.describe()

    def late_ranks(self) -> str:
        return ""

    def use_idle_time(self, num_blocks_ever_used: int) -> bool:
        return self.worker.use_idle_time(num_blocks_ever_used)

    def load_adapter(self, path: str, digest: str | None, is_awaited: bool) -> Polled[AdapterFacts]:
        raise AssertionError("a config with adapters is refused")

    def drop_adapter(self, digest: str) -> None:
        raise AssertionError("a config with adapters is refused")

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        digests = self._companions.all(_digest(batch))
        if (other := next((rank for rank, each in enumerate(digests) if each != digests[0]), None)) is not None:
            self._companions.close()
            raise EngineDeadError(
                f"Rank {other} has scheduled something else than rank 0: give all ranks the same requests, with the "
                "same parameters, in the same order"
            )
        batch.tokens_before, self._untold = self._untold, []
        # Each rank waits for its own device: only so the others hear of its failure in this step.
        own = self._thread.submit(lambda: self.worker.submit(batch).result())
        return _Shared(own, self._companions, self._note)

    def _note(self, tokens: StepTokens) -> None:
        self._untold.append(tokens)

    def shutdown(self) -> None:
        self._thread.shutdown()
        self.worker.close()
        self._companions.close()

    def _everywhere(self, step: Callable[[], Answer | None]) -> list[Answer]:
        """The answers of all ranks. Raises the error of a failed rank; others may only have waited for it."""
        own: FromRank
        try:
            own = step() or Answer()
        except Exception as error:
            own = Failed.of(error)
        answers = [decode_from_rank(frame) for frame in self._companions.all(encode(own))]
        errors = [answer.error() for answer in answers if isinstance(answer, Failed)]
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerLostError)), errors[0])
        return [answer for answer in answers if isinstance(answer, Answer)]


class _Shared:
    """A step whose result the first rank has."""

    def __init__(self, own: Future[StepResult], companions: Companions, note: Callable[[StepTokens], None]) -> None:
        self._own, self._companions, self._note = own, companions, note

    def result(self) -> StepResult:
        error: Exception | None = None
        try:
            result = self._own.result()
            own: FromRank = Answer(result=result) if self._companions.rank == 0 else Answer()
        except EngineDeadError:
            self._companions.close()
            raise
        except Exception as failure:
            error, own = failure, Failed.of(failure)
        answers = [decode_from_rank(frame) for frame in self._companions.all(encode(own))]
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failed):
                raise error if error is not None and rank == self._companions.rank else answer.error()
        answer = answers[0]
        assert isinstance(answer, Answer)
        assert answer.result is not None
        self._note(StepTokens(answer.result.step_id, answer.result.token_ids))
        return answer.result


def _digest(batch: ScheduledBatch) -> bytes:
    """The digest of everything that decides about tokens, except parameters of sampling: only the first rank
    samples.
    """
    rows = [(new.request_id, new.token_ids, new.block_ids, new.rope_offset) for new in batch.new_rows]
    seen = (
        batch.step_id,
        batch.request_ids,
        batch.num_computed_tokens,
        batch.num_scheduled_tokens,
        batch.num_logits,
        [list(drafts) for drafts in batch.draft_token_ids],
        batch.new_block_ids,
        batch.removed_request_ids,
        batch.block_copies,
        rows,
    )
    return hashlib.sha256(_digested(seen)).digest()
